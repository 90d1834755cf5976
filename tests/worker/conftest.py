"""Fixtures that several test files of the worker share."""

from collections.abc import Iterator

import pytest
import torch

from octet.worker.fp8.accelerator import cpu_as_accelerator


@pytest.fixture
def accelerator() -> Iterator[None]:
    """The CPU behaves as an accelerator, in one thread."""
    torch.set_num_threads(1)
    with cpu_as_accelerator():
        yield
