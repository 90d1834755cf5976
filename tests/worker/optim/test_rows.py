"""The table of a step's gradients follows every change of them, also where addresses stay."""

from typing import Any

import pytest
import torch
from torch import nn

from octet.worker import initialize
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.rounding_position import RoundingPosition
from octet.worker.optim.fused import Rows, describe


@pytest.fixture
def rows() -> Rows:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "O2")
    model(torch.randn(16, 32)).sum().backward()
    optimizer.step()
    updates = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    counted = {"step": torch.zeros((), dtype=torch.int64)}  # as on a device
    return Rows([each._replace(state=each.state | counted) for each in describe(optimizer, updates)], optimizer.rule)


def table(rows: Rows, *, decays: bool = False) -> Any:
    gradients = [row.update.parameter.grad for row in rows.rows]
    return rows.with_gradients([each for each in gradients if each is not None], [decays])


def test_the_table_stays_while_gradients_do(rows: Rows) -> None:
    assert table(rows) == table(rows)


def test_each_change_of_a_gradient_is_seen(rows: Rows) -> None:
    seen = [table(rows)]
    parameters = [row.update.parameter for row in rows.rows]
    fp8 = next(parameter for parameter in parameters if isinstance(parameter.grad, Float8Gradient))
    plain = next(parameter for parameter in parameters if not isinstance(parameter.grad, Float8Gradient))

    def changed(decays: bool = False) -> None:
        fresh = Rows([row.update for row in rows.rows], rows.rule)
        assert table(rows, decays=decays) == table(fresh, decays=decays)
        assert table(rows, decays=decays) not in seen
        seen.append(table(rows, decays=decays))

    fp8.grad = Float8Gradient(fp8.grad.codes.clone(), fp8.grad.dequant_scale, RoundingPosition(0, 0))
    changed()
    fp8.grad = Float8Gradient(fp8.grad.codes, fp8.grad.dequant_scale.clone(), RoundingPosition(0, 0))
    changed()
    memory = torch.zeros(64)
    plain.grad = memory[:32]
    changed()
    plain.grad = memory.view(torch.bfloat16)[:32] if plain.dtype == torch.bfloat16 else memory[4:36]
    changed()
    changed(decays=True)
