"""Promise 4: processes that register under one name at once get a version each, without locks."""

from pathlib import Path

import pytest
from forks import Forks

from ram_trl import AgentRegistry, register_agent


PROCESSES = 8


@pytest.mark.parametrize("via", ["checkpoint", "live"])
@pytest.mark.parametrize(
    ("rounds", "times"), [(1, 4), pytest.param(5, 50, marks=[pytest.mark.faults, pytest.mark.timeout(3600)])]
)
def test_every_process_gets_versions_of_its_own(forks: Forks, zoo, tmp_path: Path, rounds, times, via):
    base = zoo.base("qwen2_untied")
    models = [str(zoo.agent(base, seed=seed)) for seed in range(PROCESSES)]
    known = AgentRegistry(tmp_path / "known")
    records = [
        register_agent(known, f"a{number}", model, base_model=str(base)).tensors()
        for number, model in enumerate(models)
    ]
    for number in range(rounds):
        registry = tmp_path / f"registry-{number}"
        jobs = [
            {"registry": str(registry), "agent": "math", "model": model, "base": str(base), "via": via, "times": times}
            for model in models
        ]
        outcomes = forks.result("writers", {"jobs": jobs})
        assert [outcome.get("error") for outcome in outcomes] == [None] * PROCESSES
        given = [version for outcome in outcomes for version in outcome["versions"]]
        total = PROCESSES * times
        assert sorted(given) == list(range(1, total + 1))
        seen = forks.result("examined", {"registry": str(registry), "agent": "math"})
        assert seen["left"] == [] and len(seen["valid"]) == total and set(seen["valid"].values()) == {True}
        # under the number that a process was told is what it wrote
        for expected, outcome in zip(records, outcomes, strict=True):
            for version in outcome["versions"]:
                assert AgentRegistry(registry).get(f"math@v{version}").tensors() == expected
    print(f"{via}: {rounds} rounds of {PROCESSES} processes x {times}: {rounds * PROCESSES * times} distinct versions")
