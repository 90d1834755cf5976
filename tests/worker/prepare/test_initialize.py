"""`octet.worker.initialize` returns a model and an optimizer that work in an ordinary loop, at every level."""

import copy
import io
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas import GPTSizes
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.precision import PrecisionSpec
from octet.api_schemas.recipe import RecipeSpec
from octet.worker import initialize
from octet.worker.fp8.fallback import Fallback
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.speedups import Chip
from octet.worker.models.gpt import GPT
from octet.worker.prepare.convert import check_chip
from tests.kit.small_model import spread

TINY = GPTSizes(hidden_size=64, num_layers=1, num_heads=4, vocab_size=64, max_sequence_length=32)


def make(level: str, num_layers: int = 1, lr: float = 3e-3, **options: object) -> tuple[GPT, torch.optim.Optimizer]:
    model = GPT(TINY.model_copy(update={"num_layers": num_layers}))
    decayed = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return initialize(model, torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95)), opt_level=level, **options)


def batch(step: int, num_sequences: int = 4) -> dict[str, Tensor]:
    """Sequences that count upwards from a random token, which a small model learns at once."""
    start = torch.randint(0, 64, (num_sequences, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + torch.arange(33)) % 64
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def train(model: GPT, optimizer: torch.optim.Optimizer, steps: range, num_micro_batches: int = 1) -> list[float]:
    losses = []
    for step in steps:
        for micro_batch in range(num_micro_batches):
            loss = model.loss(batch(step * num_micro_batches + micro_batch)).loss / num_micro_batches
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() * num_micro_batches)
    return losses


def assert_same_tensors(one: nn.Module, other: nn.Module) -> None:
    for (name, tensor), value in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(as_bytes(tensor), as_bytes(value)), name


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("level", ["fp16-amp", "ao", *spread(level for level in LEVELS if level not in ("fp16-amp", "ao"))])
def test_every_level_trains_in_an_ordinary_loop(level: str) -> None:
    losses = train(*make(level, lr=1e-2), range(11))
    assert losses[0] == pytest.approx(4.16, abs=0.1)
    assert losses[-1] < 2.0


@pytest.mark.parametrize("accumulation", ["fp8", "fp32"])
def test_gradients_accumulate_over_micro_batches(accumulation: str) -> None:
    model, optimizer = make("O2", lr=1e-2, gradient_accumulation=accumulation)
    assert train(model, optimizer, range(12), num_micro_batches=2)[-1] < 1.5
    model.loss(batch(0)).loss.backward()
    assert isinstance(model.blocks[0].mlp.up.weight.grad, Float8Gradient) == (accumulation == "fp8")


@pytest.mark.parametrize("level", spread(LEVELS))
def test_resume_is_bit_identical(level: str) -> None:
    model, optimizer = make(level, seed=1)
    train(model, optimizer, range(3), num_micro_batches=2)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    expected = train(model, optimizer, range(3, 6), num_micro_batches=2)

    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    resumed, resumed_optimizer = make(level, seed=1)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    assert train(resumed, resumed_optimizer, range(3, 6), num_micro_batches=2) == expected
    assert_same_tensors(resumed, model)


@pytest.mark.parametrize("level", spread(LEVELS))
def test_a_deep_copy_trains_on_alike_and_apart(level: str) -> None:
    model, optimizer = make(level)
    train(model, optimizer, range(2))
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    assert train(twin, twin_optimizer, range(2, 4)) == train(model, optimizer, range(2, 4))
    assert_same_tensors(twin, model)


@pytest.mark.parametrize("level", ["fp32", "fp16-amp", *spread(level for level in LEVELS if level not in ("fp32", "fp16-amp"))])
def test_a_non_finite_gradient_skips_the_step_and_is_counted(level: str) -> None:
    model, optimizer = make(level)
    before = copy.deepcopy(model)
    loss = model.loss(batch(0)).loss
    (loss * torch.inf).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.num_skipped_steps == 1
    for parameter, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(parameter, old)
    assert train(model, optimizer, range(1))[-1] < 5


@pytest.mark.parametrize("level", LEVELS)
def test_ties_and_parameter_objects_stay(level: str) -> None:
    model = GPT(TINY)
    before = dict(model.named_parameters())
    converted, _ = initialize(model, torch.optim.AdamW(model.parameters()), opt_level=level)
    assert converted is model
    assert dict(model.named_parameters()) == before
    assert model.head.weight is model.token_embedding.weight


@pytest.mark.parametrize("level", LEVELS)
def test_learning_rate_schedulers_of_torch_drive_it(level: str) -> None:
    model, optimizer = make(level)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, optimizer, range(1))
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1.5e-3, 1.5e-3]


def test_groups_keep_their_hyperparameters() -> None:
    _, optimizer = make("O2")
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(group["betas"] == (0.9, 0.95) for group in optimizer.param_groups)


def test_the_report_names_what_was_converted_and_why_not() -> None:
    model, _ = make("O2", num_layers=2, exclude=("blocks.1.*",))
    report = model.octet_report
    assert len(report.converted) == 4
    assert all(isinstance(model.get_submodule(name), Float8Linear) for name in report.converted)
    text = str(report)
    assert "level O2: 4 layers converted, 5 skipped" in text
    assert "blocks.1.mlp.up: excluded by name" in text
    assert "bytes of exp_avg_sq" in text


def test_a_cpu_filters_nothing() -> None:
    model = initialize(GPT(TINY), opt_level="O2", tokens=1)[0]
    assert model.octet_report.filtered == ()
    assert {layer.fallback for layer in model.modules() if isinstance(layer, Float8Linear)} == {Fallback.NONE}


@pytest.mark.parametrize("tokens", [0, -1])
def test_tokens_are_counted_from_one(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"tokens is {tokens}; allowed: 1 or more"):
        initialize(GPT(TINY), opt_level="O2", tokens=tokens)


@pytest.mark.parametrize("level", ["te", pytest.param("O2", marks=pytest.mark.matrix), "O3-split"])
def test_filtered_layers_are_resumed_even_if_the_table_has_changed(level: str) -> None:
    model, optimizer = make(level, num_layers=2)
    model.blocks[0].mlp.up.fallback = Fallback.TOO_SMALL
    train(model, optimizer, range(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, range(2, 4))
    resumed, resumed_optimizer = make(level, num_layers=2)
    resumed.blocks[1].mlp.up.fallback = Fallback.TOO_SMALL
    resumed.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    found = [name for name, layer in resumed.named_modules() if getattr(layer, "fallback", Fallback.NONE) is not Fallback.NONE]
    assert found == ["blocks.0.mlp.up"]
    assert "too_small, all in bf16" in repr(resumed.blocks[0].mlp.up)
    assert train(resumed, resumed_optimizer, range(2, 4)) == expected
    assert_same_tensors(resumed, model)


def test_an_optimizer_that_the_level_cannot_hold_is_refused_before_anything_changes() -> None:
    model = GPT(TINY)
    with pytest.raises(ValueError, match="O2 cannot hold the states of SGD; allowed: AdamW, Adam"):
        initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2")
    assert type(model.blocks[0].mlp.up) is nn.Linear
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    assert initialize(model, sgd, opt_level="bf16-amp")[1] is sgd


@pytest.mark.parametrize(("name", "hint"), [("02", "'O2'"), ("o2", "'O2'"), ("bf16_amp", "'bf16-amp'")])
def test_an_unknown_level_is_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"level: got {name}; allowed: fp32, .*Did you mean {hint}"):
        initialize(GPT(TINY), opt_level=name)


def test_an_option_that_does_not_exist_is_refused_with_a_hint() -> None:
    with pytest.raises(ValueError, match=r"unknown field 'exclud'.*Did you mean 'exclude'"):
        initialize(GPT(TINY), opt_level="O2", exclud=("head",))


def test_arguments_in_another_order_are_named() -> None:
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match=r"model: got AdamW; .* Call initialize\(model, optimizer, opt_level"):
        initialize(optimizer, model, "O2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer: got str; allowed: a torch\.optim\.Optimizer, or None"):
        initialize(model, "O2")  # type: ignore[arg-type]


def test_a_model_is_initialized_once() -> None:
    model, _ = make("O2")
    with pytest.raises(ValueError, match="initialized already"):
        initialize(model, opt_level="O2")


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, octet.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("level", "capability", "is_allowed"), [
    ("O2", (9, 0), True), ("te", (8, 9), True), ("bf16-amp", (8, 0), True), ("O2", (8, 6), False), ("te", (7, 5), False),
    ("ao", (8, 0), False), ("ao", (8, 9), True),
])  # fmt: skip
def test_fp8_needs_the_instructions_whatever_the_device_is_called(
    level: str, capability: tuple[int, int], is_allowed: bool
) -> None:
    refused = pytest.raises(ValueError, match=f"A card has .* {capability[0]}.{capability[1]}; allowed: 8.9")
    with nullcontext() if is_allowed else refused:
        check_chip(Chip("A card", capability), PrecisionSpec(level=level))


def test_mx_needs_blackwell() -> None:
    mx = PrecisionSpec(level="O2", recipe=RecipeSpec(granularity="mx"))
    for capability in ((10, 0), (12, 0)):
        check_chip(Chip("A card", capability), mx)
    with pytest.raises(ValueError, match=r"granularity mx .* A card has .* 9.0; allowed: 10.0 or later.*Use granularity block"):
        check_chip(Chip("A card", (9, 0)), mx)
