"""What the tests of faults share: a small model, what was trained from it, and a process that forks."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import Forks
from models import Zoo


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """A process that forks children."""
    with Forks() as server:
        yield server


@pytest.fixture(scope="session")
def base(zoo: Zoo) -> Path:
    """A model of 1.3 million parameters."""
    return zoo.base("qwen2_wide")


@pytest.fixture(scope="session")
def model(zoo: Zoo, base: Path) -> Path:
    """A full fine-tune of it."""
    return zoo.agent(base, seed=1)


@pytest.fixture
def chance(request) -> random.Random:
    """Random numbers; pytest shows their seed if the test fails. `--seed` has them come again."""
    seed = request.config.getoption("--seed")
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    print(f"seed {seed}: pytest --seed {seed} has it again")
    return random.Random(seed)
