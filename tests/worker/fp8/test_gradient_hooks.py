"""Hooks of parameters whose gradients come through the ports of compiled graphs."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from octet.worker import initialize
from octet.worker.fp8.gradient_hooks import has_new_gradient


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.parametrize("is_compiled", [False, True])
def test_each_pass_brings_a_parameter_one_new_gradient(is_compiled: bool) -> None:
    """Autograd calls the hooks of a graph's weights again, before or after the delivery."""
    layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model, _ = initialize(layers, opt_level="O2", auto_filter=False)
    if is_compiled:
        torch.compiler.reset()
        model.compile(backend="aot_eager")
    arrived: list[str] = []

    def arrive(parameter: Tensor, name: str) -> None:
        if has_new_gradient(parameter):
            arrived.append(name)

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(arrive, name=name))
    for _ in range(2):
        model(torch.randn(16, 32)).square().mean().backward()
        assert sorted(arrived) == sorted(name for name, _ in model.named_parameters())
        arrived.clear()
