PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
export HF_HUB_OFFLINE := 1

.PHONY: quickstart test test-faults matrix lint format clean

quickstart: $(VENV)/installed  ## Train three agents, register, merge with RAM+, compare. FRESH=1 starts over
	$(RUN) recipes/quickstart.py $(if $(FRESH),--fresh)

test: $(VENV)/installed  ## The whole test suite, two files at a time
	$(RUN) -m pytest --numprocesses 2 --dist loadfile

test-faults: $(VENV)/installed  ## The long tests of docs/RELIABILITY.md: kills, power loss, full disks, attacks; about an hour
	nice -n 19 $(RUN) -m pytest -m faults -s

matrix: $(VENV)/installed  ## Backend x kind x dtype, each a real run: pass, or the refusal, as a Markdown table
	$(RUN) -m pytest --quiet --capture=no --no-header tests/test_backends.py

lint: $(VENV)/installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(VENV)/installed
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf $(VENV) quickstart

KERNELS := $(wildcard ram_trl/arithmetic/_kernels*.[ch])
# torch first and alone: its pinned wheel decides which of torch's own dependencies are installed at all
$(VENV)/installed: pyproject.toml constraints.txt $(KERNELS)
	@echo "Installing into $(VENV): about a minute, more where torch must be fetched first"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --constraint constraints.txt torch
	@echo "Installing transformers, trl, accelerate, peft and this package"
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[quickstart,test]"
	touch $@
