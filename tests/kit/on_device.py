"""A plugin for tests on a GPU (`make test-gpu`): a kernel that faults fails its own test, and no other.

CUDA reports a fault, such as an illegal address, at a later call, and refuses every call of the process from then on. So each
test ends with a wait for the device, and a process that has lost its device ends; pytest-xdist starts another in its place.
"""

import os
import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def device_answers() -> Iterator[None]:
    """Wait for the device when the test is done: its fault would be raised in the next one."""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@pytest.hookimpl(trylast=True)  # when the test's reports have left this process
def pytest_runtest_logfinish() -> None:
    """End a process of pytest-xdist whose device answers no more."""
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            sys.stderr.write(f"ending a process that has lost its device: {error}\n")
            sys.stderr.flush()
            os._exit(1)
