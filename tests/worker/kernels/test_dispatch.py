"""The seam: every implementation provides what the protocol names, with the same parameters."""

import inspect
from types import ModuleType

import pytest
import torch

from worker.kernels import cuda, reference
from worker.kernels.dispatch import Kernels, implementation

NAMES = [name for name, member in vars(Kernels).items() if inspect.isfunction(member) and not name.startswith("_")]


@pytest.mark.parametrize("module", [reference, cuda])
@pytest.mark.parametrize("name", NAMES)
def test_the_protocol_is_implemented(name: str, module: ModuleType) -> None:
    function = getattr(module, name)
    if inspect.isfunction(function):  # torch's own have no signature
        parameters = list(inspect.signature(function).parameters)
        assert len(parameters) == len(inspect.signature(getattr(Kernels, name)).parameters) - 1


def test_a_device_gets_its_own() -> None:
    assert implementation(torch.device("cpu")) is reference
    assert implementation(torch.device("cuda", 1)) is cuda
