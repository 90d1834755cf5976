"""torch's own optimizers over a converted model: with the same gradients each leaves the bits that a plain model has."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas.levels import LEVELS
from tests.kit.small_model import SPREAD
from tests.worker.prepare.test_user_parameters import plain_twin, prepared, values

Made = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Made] = {
    **{
        f"{kind.__name__}, {name}": lambda parameters, kind=kind, options=options: kind(parameters, lr=1e-3, **options)  # type: ignore[misc]
        for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
        for name, options in {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items()
    },
    "AdamW, amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "SGD, Nesterov, foreach": lambda parameters: torch.optim.SGD(parameters, 1e-2, 0.9, nesterov=True, foreach=True),
    "SGD, momentum, fused": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, fused=True),
    "Adafactor, loop": lambda parameters: torch.optim.Adafactor(parameters, foreach=False),
    "Adafactor, foreach": lambda parameters: torch.optim.Adafactor(parameters, foreach=True),
    "Muon": lambda parameters: torch.optim.Muon([one for one in parameters if one.dim() == 2]),
    **{
        kind.__name__: lambda parameters, kind=kind: kind(parameters, lr=1e-3)  # type: ignore[misc]
        for kind in (
            *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam),
            *(torch.optim.RMSprop, torch.optim.Rprop),
        )
    },
}
WRITES_INTO_GRADIENTS = {"SGD, Nesterov, foreach": 0.06}
"""The largest part of a step that is lost where an optimizer writes its update into gradients, which FP8 then rounds."""


def cases() -> list[Any]:
    """Each optimizer at every level; in `make test-system` at one of SPREAD, which take turns."""
    found = []
    for number, name in enumerate(OPTIMIZERS):
        for level in LEVELS:
            marks = pytest.mark.system if level == SPREAD[number % len(SPREAD)] else pytest.mark.matrix
            found.append(pytest.param(name, level, id=f"{name}-{level}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "level"), cases())
def test_an_optimizer_leaves_what_it_leaves_on_a_plain_model(name: str, level: str) -> None:
    """The gradients are the level's own, in FP8 where it holds them so: what differs from fp32's is their rounding alone."""
    model = prepared(level)
    plain = plain_twin(model)
    start = values(plain)
    optimizer, expected = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](plain.parameters())
    for step in range(5):
        input = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        (model(input) - 1).float().square().mean().backward()
        for parameter, twin in zip(model.parameters(), plain.parameters(), strict=True):
            assert parameter.grad is not None
            twin.grad = parameter.grad.detach() + 0
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
    for found, other, before in zip(values(model), values(plain), start, strict=True):
        assert (found - other).norm() <= WRITES_INTO_GRADIENTS.get(name, 0.0) * (other - before).norm()
    states: list[Tensor] = [part for state in optimizer.state.values() for part in state.values() if isinstance(part, Tensor)]
    assert {type(part) for part in states} <= {Tensor}
