"""A checkpoint continues at another level: values, moments, step and data position; at its own level bit for bit."""

import copy
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from octet.api_schemas import EventReport, StepReport
from octet.api_schemas.levels import LEVELS
from octet.worker import initialize, plain_state_dict
from octet.worker.checkpoint.resume import resume
from octet.worker.common.errors import Cancelled, Diverged
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.fp8.weight import Float8Weight, is_float8_weight
from octet.worker.optim.codecs import CODECS
from octet.worker.train.progress import DIVERGED_FACTOR
from tests.kit.small_model import Small, make
from tests.kit.training import Recorder, train, with_training

SPREAD = ("fp32", "bf16-amp", "fp16-amp", "te", "O2", "O3", "O3-split-8bit")


def is_common(source: str, target: str) -> bool:
    """True for a pair that `make test` has: a resume decodes, then encodes, so each level is a source and a target once."""
    return source == "O2" or target == "O3-split" or (source in ("O3", "O3-split") and target == "fp32")


PAIRS = [
    pytest.param(source, target, marks=() if is_common(source, target) else pytest.mark.matrix)
    for source in (*SPREAD, "ao", "O3-split")
    for target in (*SPREAD, "ao", "O3-split")
    if source != target
]
WEIGHT_ERROR = {"fp32": 1e-7, "fp16+scale": 2.0**-11, "fp8": 2.0**-4}
MOMENT_ERROR = {"fp32": 1e-7, "fp16-block": 2.0**-11, "fp8-dre": 0.07, "int8-companded": 0.05, "uint8-companded": 0.05}


def step(model: Small, optimizer: torch.optim.Optimizer, seed: int) -> float:
    inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
    loss = (model(inputs) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def moments(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """The fp32 values of a parameter's moments."""
    [group] = optimizer.param_groups
    is_small = parameter.numel() < 4096
    return {
        name: CODECS["fp32" if is_small else group[f"{name}_codec"]].decode(optimizer.state[parameter][name]).clone()
        for name in ("exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_everything_comes_along(source: str, target: str) -> None:
    model, optimizer = make(source, lr=1e-3)
    for seed in range(4):
        step(model, optimizer, seed)
    before, held = plain_state_dict(model), moments(optimizer, model.inner[0].weight)
    saved = copy.deepcopy((exact_state_dict(model), optimizer.state_dict()))
    other, other_optimizer = make(target, lr=1e-3, seed=1)
    resume(other, other_optimizer, *saved)
    after = plain_state_dict(other)
    row = LEVELS[target]
    error = 2.0**-11 if row.master_weight != "none" else WEIGHT_ERROR[row.weight]
    for name, values in before.items():
        torch.testing.assert_close(after[name], values, rtol=error, atol=2.0**-12 * float(values.abs().max()))
    for name, values in moments(other_optimizer, other.inner[0].weight).items():
        expected = held[name]
        near = MOMENT_ERROR[getattr(row, name)]
        torch.testing.assert_close(values, expected, rtol=near, atol=near * 1e-2 * float(expected.abs().max()))
    assert int(other_optimizer.state[other.inner[0].weight]["step"]) == 4
    assert all(weight.state.wide is None for weight in other.parameters() if isinstance(weight, Float8Weight))
    losses = [step(other, other_optimizer, seed) for seed in range(4, 8)]
    assert losses == pytest.approx([step(model, optimizer, seed) for seed in range(4, 8)], rel=0.05)


@pytest.mark.parametrize("level", ["O2", "O3", "O3-split", "te"])
def test_the_same_level_is_loaded_bit_for_bit(level: str) -> None:
    model, optimizer = make(level)
    for seed in range(3):
        step(model, optimizer, seed)
    other, other_optimizer = make(level, seed=1)
    resume(other, other_optimizer, *copy.deepcopy((exact_state_dict(model), optimizer.state_dict())))
    for seed in range(3, 6):
        assert step(other, other_optimizer, seed) == step(model, optimizer, seed)


def test_a_skipped_step_of_before_does_not_halve_the_loss_scale() -> None:
    model, optimizer = make("O2")
    step(model, optimizer, 0)
    (model(torch.full((16, 32), torch.inf))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.num_skipped_steps == 1
    other, other_optimizer = make("fp16-amp", seed=1)
    before = float(other.octet_loss_scaling_state[0])
    resume(other, other_optimizer, exact_state_dict(model), optimizer.state_dict())
    step(other, other_optimizer, 1)
    assert float(other.octet_loss_scaling_state[0]) == before


@pytest.mark.parametrize(("source", "targets"), [
    ("O2", ("O3-split", "bf16-amp")), ("bf16-amp", ("O3",)), pytest.param("O3", ("O2-8bit",), marks=pytest.mark.matrix),
])  # fmt: skip
def test_a_job_continues_at_another_level(
    source: str, targets: tuple[str, ...], tmp_path: Path, spec_document: dict[str, Any]
) -> None:
    options = {"steps": 9, "checkpoint_every": 4, "optimizer": {"learning_rate": 1e-2}}
    whole, _ = train(with_training(spec_document, source, **options), tmp_path / "whole")
    interrupted = Recorder(stop_after_step=6)
    with pytest.raises(Cancelled):
        train(with_training(spec_document, source, **options), tmp_path / "parts", recorder=interrupted)
    for target in targets:
        shutil.copytree(tmp_path / "parts", tmp_path / target)
        resumed, _ = train(with_training(spec_document, target, **options), tmp_path / target, interrupted.checkpoints())
        assert [report.step for report in resumed.of(StepReport)] == [5, 6, 7, 8, 9]
        assert resumed.losses() == pytest.approx(whole.losses()[4:], rel=0.02)
        at_other_data = whole.losses()[:5]
        assert resumed.losses() != pytest.approx(at_other_data, rel=0.02)


def test_another_level_goes_on_from_before_the_loss_went_off(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    """At the same level a job goes on where it was, to the bit; at another it leaves out what had diverged by then."""
    options = {"steps": 12, "checkpoint_every": 1, "keep": {"last": 12}, "optimizer": {"learning_rate": 2.0}}
    first = Recorder(stop_after_step=8)
    with pytest.raises(Cancelled):
        train(with_training(spec_document, "O2", **options), tmp_path / "job", recorder=first)
    losses = first.losses()
    is_sound = [loss <= DIVERGED_FACTOR * losses[0] for loss in losses]
    assert is_sound[0]
    assert not is_sound[-1]
    newest_sound = max(step for step, sound in enumerate(is_sound, start=1) if sound)
    for level, goes_on_after in (("O2", first.checkpoints()[0].step), ("fp32", newest_sound)):
        shutil.copytree(tmp_path / "job", tmp_path / level)
        resumed = Recorder()
        with pytest.raises(Diverged):  # this learning rate is too high at any level
            train(with_training(spec_document, level, **options), tmp_path / level, first.checkpoints(), resumed)
        assert resumed.of(StepReport)[0].step == goes_on_after + 1
        rejected = [report.data["step"] for report in resumed.of(EventReport) if report.type == "checkpoint.rejected"]
        assert rejected == list(range(first.checkpoints()[0].step, goes_on_after, -1))


@pytest.mark.parametrize("former", ["O2", "bf16-amp"])
@pytest.mark.parametrize(
    "level", ["O2", *(pytest.param(level, marks=pytest.mark.matrix) for level in ("te", "O3", "O3-split"))]
)
def test_attention_that_was_saved_in_one_parameter_is_split(monkeypatch: pytest.MonkeyPatch, former: str, level: str) -> None:
    """All levels saved torch's own so before they converted it. Moments are taken over to the bit."""

    def build(level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model: Any = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
        options = {"auto_filter": False} if LEVELS[level].has_own_fp8 else {}
        return initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, **options)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        (model(torch.randn(2, 8, 64)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with monkeypatch.context() as patch:
        patch.setattr(import_module("octet.worker.prepare.initialize"), "unstack_attention", lambda *_: None)
        model, optimizer = build(former)
    train_step(model, optimizer)
    saved_model, saved_optimizer = copy.deepcopy((exact_state_dict(model), optimizer.state_dict()))
    saved = saved_model["self_attn.in_proj_weight"]
    key = [name for name, _ in model.named_parameters()].index("self_attn.in_proj_weight")
    model, optimizer = build(level)
    resume(model, optimizer, saved_model, saved_optimizer)
    row = LEVELS[level]
    bound = 2.0**-11 if row.master_weight != "none" else WEIGHT_ERROR[row.weight]
    for index, matrix in enumerate(saved.chunk(3)):
        weight: Any = model.get_parameter(f"self_attn.in_proj.{index}.weight")
        values = weight.whole_values() if is_float8_weight(weight) else weight.detach()
        torch.testing.assert_close(values, matrix, rtol=bound, atol=bound * 2.0**-6 * float(matrix.abs().max()))
        for name in ("exp_avg", "exp_avg_sq"):
            if former == level:
                for part, held in optimizer.state[weight][name].items():
                    matrix = saved_optimizer["state"][key][name][part].chunk(3)[index]
                    assert torch.equal(held.view(torch.uint8), matrix.view(torch.uint8)), (name, part)
    train_step(model, optimizer)
