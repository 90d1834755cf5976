"""A plugin for the kernels' own tests: programs run in a random order, and two that write one address are a fault.

python -m pytest -p tests.chip.in_random_order --program-seed 1 tests/worker/kernels/cuda
"""

from collections.abc import Iterator

import pytest

from tests.chip.programs import checked


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--program-seed", type=int, default=0, help="of the order in which programs run")


@pytest.fixture(autouse=True)
def programs_in_random_order(request: pytest.FixtureRequest) -> Iterator[None]:
    with checked(seed=request.config.getoption("--program-seed")):
        yield
