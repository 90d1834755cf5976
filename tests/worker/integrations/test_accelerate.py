"""Accelerate's loop with a converted model and optimizer: prepare, accumulate, clip, save the state, continue from it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from octet import carry_model_state, initialize, memory_report, plain_state_dict
from octet.api_schemas.levels import LEVELS
from tests.kit.small_model import Small, make
from tests.worker.integrations.bits import assert_same_bits

CLOSE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 0.02, "fp8": 0.1}
"""Relative distance of a loss from fp32's, by the dtype of the products."""


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Accelerate keeps a process-wide state."""
    yield
    reset()


def reset() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def prepared(level: str | None, *, carries: bool = False, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    """A model, an optimizer and a schedule that Accelerate has prepared; `initialize` has not seen them at level None.

    carries: the optimizer's state brings exact codes and scales.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    torch.manual_seed(0)
    model: nn.Module = Small()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if level is not None:
        model, optimizer = initialize(model, optimizer, level, convert_heads=True)
    if carries:
        carry_model_state(model, optimizer)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


def train(accelerator: Accelerator, model: Any, optimizer: Any, schedule: Any, num_batches: int, start: int = 0) -> list[float]:
    inputs = torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(1))
    loader = accelerator.prepare(DataLoader(TensorDataset(inputs[start : start + num_batches]), batch_size=None))
    losses = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = (model(batch) - batch[:, :16]).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("carries", [True, False])
@pytest.mark.parametrize(
    "level", [level if level == "O3" else pytest.param(level, marks=pytest.mark.matrix) for level in LEVELS]
)
def test_it_trains_and_continues(level: str, carries: bool, tmp_path: Path) -> None:
    """Bit for bit where nothing is encoded, and anywhere after `carry_model_state`: Accelerate's file has values alone.

    Their scales are found again, and with another one the next step rounds otherwise.
    """
    expected = train(*prepared(None), 8)
    parts = prepared(level, carries=carries)
    losses = train(*parts, 4)
    assert memory_report(parts[1], parts[2]) == memory_report(parts[1], parts[2].optimizer)
    parts[0].save_state(str(tmp_path / "state"))
    losses += train(*parts, 4, start=4)
    assert expected[-1] < 0.97 * expected[0]
    assert losses == pytest.approx(expected, rel=CLOSE[LEVELS[level].gemm])

    others = prepared(level, carries=carries)
    others[0].load_state(str(tmp_path / "state"))
    again = train(*others, 4, start=4)
    if LEVELS[level].weight != "fp32" and not carries:
        assert again == pytest.approx(losses[4:], rel=5e-3)
        return
    assert again == losses[4:]
    assert_same_bits(others[1].state_dict(), parts[1].state_dict())
    assert_same_bits(others[2].state_dict(), parts[2].state_dict())


@pytest.mark.parametrize(
    "level", ["O3", *(pytest.param(level, marks=pytest.mark.matrix) for level in ("te", "O2", "O3-split"))]
)
def test_prepare_changes_nothing_of_what_initialize_made(level: str) -> None:
    """It loads the optimizer's states into it again. Values that came after `initialize` are fp32 until they have a master."""
    found = []
    for is_prepared in (False, True):
        torch.manual_seed(0)
        model: Any = Small()
        model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, convert_heads=True)
        values = {name: torch.randn(weight.shape) / 8 for name, weight in plain_state_dict(model).items()}
        model.load_state_dict(values)
        if is_prepared:
            optimizer, model = Accelerator(cpu=True).prepare(optimizer, model)
        held = plain_state_dict(model)
        for name, value in values.items():
            torch.testing.assert_close(held[name], value, rtol=2.0**-11, atol=2.0**-14)
        model(torch.ones(4, 32)).square().sum().backward()
        optimizer.step()
        found.append((model.state_dict(), optimizer.state_dict()))
    assert_same_bits(*found)


@pytest.mark.parametrize(
    "level",
    ["O3", *(pytest.param(level, marks=pytest.mark.matrix) for level in ("bf16-amp", "te", "O2", "O3-split", "O2-8bit"))],
)
def test_a_state_without_its_model_is_refused(level: str, tmp_path: Path) -> None:
    """Accelerate saves the models that it was given: none, where the optimizer alone was prepared."""

    def started(seed: int) -> tuple[Accelerator, Any, Any]:
        model, optimizer = make(level, seed=seed)
        carry_model_state(model, optimizer)
        accelerator = Accelerator(cpu=True)
        return accelerator, model, accelerator.prepare(optimizer)

    def step(model: Any, optimizer: Any) -> None:
        model(torch.ones(4, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    accelerator, model, optimizer = started(0)
    step(model, optimizer)
    accelerator.save_state(str(tmp_path))
    values = plain_state_dict(model)
    accelerator, other, its_optimizer = started(1)
    before = plain_state_dict(other)
    with pytest.raises(
        ValueError, match=r"other values of '\w+[\w.]*' and \d+ more .* call accelerator\.prepare_model\(model, eval"
    ):
        accelerator.load_state(str(tmp_path))
    assert_same_bits(plain_state_dict(other), before)
    other.load_state_dict(values)  # by hand, before it
    accelerator.load_state(str(tmp_path))
    for each in ((model, optimizer), (other, its_optimizer)):
        step(*each)
    assert_same_bits(other.state_dict(), model.state_dict())


def test_parameters_that_were_exchanged_are_refused() -> None:
    """Put a shard in a parameter's place in the groups, as `prepare` does under Accelerate's own FSDP2, which needs GPUs."""
    _, optimizer = make("te")
    shard = nn.Parameter(torch.zeros(32, 64))
    optimizer.param_groups[0]["params"][0] = shard
    shard.grad = torch.ones_like(shard)
    with pytest.raises(ValueError, match=r"replaced after initialize, as Accelerate does for FSDP2\. Use octet\.parallelize"):
        optimizer.step()
    assert not shard.any()


@pytest.mark.matrix
def test_it_trains_under_accelerates_own_bf16() -> None:
    plain = train(*prepared("te"), 4)
    reset()
    both = train(*prepared("te", mixed_precision="bf16"), 4)
    assert both != plain
    assert both == pytest.approx(plain, rel=0.02)
