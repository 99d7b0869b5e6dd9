"""Fixtures of all tests: tiny models on disk, made once."""

import os


# before any library of Hugging Face is imported
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from models import Zoo


torch.set_num_threads(1)


def pytest_addoption(parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of the tests that draw random numbers of their own")


@pytest.fixture(scope="session")
def zoo(tmp_path_factory) -> Zoo:
    """Tiny models on disk, by kind."""
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(autouse=True, scope="session")
def recipes_come_back():
    """A recipe that a test, or a fixture, runs in this process must not end it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ram_trl.distributed.leave_world", lambda: None)
        yield
