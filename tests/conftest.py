"""Shared set-up of all tests: one thread per worker, fixed seeds, reproducible hypothesis examples.

Triton decides when it is imported whether it compiles kernels or interprets them; the tests have no GPU and interpret.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from processes import Ranks

settings.register_profile(
    "repository", deadline=None, derandomize=True, max_examples=20, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repository")
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-from", type=int, default=0, help="the first seed of tests/kernels/test_soak.py")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four processes of torch.distributed, started where a test asks for them."""
    ranks = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()
