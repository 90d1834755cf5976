"""The residual stream in bf16: dtypes, bytes and values at every level, with what else changes blocks."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas import StepReport
from octet.api_schemas.levels import LEVELS
from octet.worker import fuse_loss, initialize, keep_activations_in_fp8, keep_residual_in_bf16
from octet.worker.common.errors import InvalidConfig, Stopped
from octet.worker.models.blocks import repeated_blocks
from octet.worker.planning.live_bytes import LiveBytes
from octet.worker.prepare.blocks import checkpoint_blocks, compile_blocks
from tests.kit.accelerator import cuda_dtypes
from tests.kit.families import FAMILIES, batch_of
from tests.kit.training import Recorder, train, with_training
from tests.worker.prepare.test_memory_options import gradients_of, refusal_of, relative_error

BF16_LEVELS = [name for name, level in LEVELS.items() if level.gemm in ("bf16", "fp8")]
USUAL = {"O2": ("gpt", "llama", "transformers-llama", "roberta", "vit", "swin"), "bf16-amp": ("gpt",), "ao": ("llama",)}
"""The families that meet a level in `make test`; the others do in `make test-matrix`."""


def families_and_levels() -> list[Any]:
    return [
        pytest.param(family, level, marks=() if family in USUAL.get(level, ()) else pytest.mark.matrix)
        for family in FAMILIES
        for level in BF16_LEVELS
    ]


def make(family: str, level: str, *, is_bf16: bool = True) -> tuple[Any, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FAMILIES[family]()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level)
    if is_bf16:
        assert keep_residual_in_bf16(model) == len(repeated_blocks(model))
    return model, optimizer


def losses_of(family: str, model: Any, optimizer: Any, steps: int = 2) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model.loss(batch_of(family)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:.*scales must be:UserWarning")
@pytest.mark.parametrize("context", [cuda_dtypes, nullcontext])
@pytest.mark.parametrize(("family", "level"), families_and_levels())
def test_blocks_pass_on_bf16_and_the_model_learns(
    family: str, level: str, context: Callable[[], AbstractContextManager[Any]]
) -> None:
    model, optimizer = make(family, level)
    seen: list[torch.dtype] = []

    def note(_block: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        seen.append((output if isinstance(output, Tensor) else output[0]).dtype)

    for block in repeated_blocks(model):
        block.register_forward_hook(note)
        block.register_full_backward_hook(lambda _block, _inputs, outputs: seen.append(outputs[0].dtype))
    with context():
        losses = losses_of(family, model, optimizer)
    assert losses[1] < losses[0]
    assert set(seen) == {torch.bfloat16}
    assert len(seen) == 2 * 2 * len(repeated_blocks(model))


@pytest.mark.parametrize("family", ["gpt", "llama", "transformers-llama", "vit"])
def test_a_cpu_computes_the_dtypes_and_values_of_an_accelerator(family: str) -> None:
    """Here alone a level has the same bits on both, since a CPU enters autocast too."""
    found = []
    for context in (cuda_dtypes, nullcontext):
        model, _ = make(family, "bf16-amp")
        with context():
            loss = model.loss(batch_of(family)).loss
            loss.backward()
        found.append((loss.detach(), gradients_of(model)))
    assert torch.equal(found[0][0], found[1][0])
    for name, gradient in found[0][1].items():
        assert torch.equal(gradient, found[1][1][name]), name


@pytest.mark.parametrize(
    ("family", "level"), [("gpt", "O2"), ("llama", "O2"), ("transformers-llama", "O2"), ("gpt", "bf16-amp")]
)
def test_gradients_stay_and_blocks_keep_half_of_their_sums(family: str, level: str) -> None:
    found = []
    for is_bf16 in (False, True):
        model, _ = make(family, level, is_bf16=is_bf16)
        with cuda_dtypes():
            with LiveBytes(granule=1) as live:
                loss = model.loss(batch_of(family)).loss
            num_bytes = live.num_bytes
            loss.backward()
        found.append((num_bytes, loss.detach(), gradients_of(model)))
    (num_bytes, loss, gradients), (num_bf16_bytes, bf16_loss, bf16_gradients) = found
    num_hidden = 2 * 16 * 32
    assert num_bytes - num_bf16_bytes >= 2 * 2 * num_hidden  # two sums of one block, each in 2 bytes less
    torch.testing.assert_close(bf16_loss, loss, rtol=2.0**-8, atol=0.0)
    assert 0.0 < relative_error(bf16_gradients, gradients) < 0.05


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("level", ["O2", "bf16-amp"])
def test_checkpointed_blocks_change_no_bit_and_keep_bf16(level: str, kind: Any) -> None:
    found = []
    for checkpointing in ("none", kind):
        model, optimizer = make("llama", level)
        checkpoint_blocks(model, checkpointing)
        found.append(losses_of("llama", model, optimizer, 3))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks at inputs
@pytest.mark.parametrize(
    "family", [pytest.param("gpt", marks=pytest.mark.system), pytest.param("llama", marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize("level", ["O2", pytest.param("bf16-amp", marks=pytest.mark.matrix)])
def test_compiled_blocks_train_as_eager_ones_do(family: str, level: str) -> None:
    torch.compiler.reset()
    found = []
    for is_compiled in (False, True):
        model, optimizer = make(family, level)
        if is_compiled:
            compile_blocks(model, backend="aot_eager")
        found.append(losses_of(family, model, optimizer, 2))
    assert found[1] == found[0]


def test_it_goes_with_the_other_functions_that_save_memory_and_with_copies() -> None:
    model, _ = make("gpt", "O2")
    fuse_loss(model)
    keep_activations_in_fp8(model)
    loss = model.loss(batch_of("gpt")).loss
    plain, _ = make("gpt", "O2")
    torch.testing.assert_close(loss, plain.loss(batch_of("gpt")).loss, rtol=1e-6, atol=0.0)
    loss.backward()
    assert torch.equal(copy.deepcopy(plain.eval()).loss(batch_of("gpt")).loss, plain.loss(batch_of("gpt")).loss)


def test_a_model_without_layers_in_bf16_or_without_blocks_is_refused() -> None:
    for model, message in (
        (FAMILIES["gpt"](), "found none; allowed"),
        (initialize(FAMILIES["gpt"](), opt_level="fp32")[0], "found none; allowed"),
        (initialize(FAMILIES["gpt"](), opt_level="fp16-amp")[0], "found layers in fp16; allowed"),
        (initialize(nn.Sequential(nn.Linear(16, 16)), opt_level="bf16-amp")[0], "repeats no blocks"),
        (make("gpt", "bf16-amp")[0], "in bf16 already"),
    ):
        with pytest.raises(ValueError, match=message):
            keep_residual_in_bf16(model)


class Wide(nn.Module):
    """A block that makes its stream fp32 again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, hidden: Any) -> Any:
        return hidden.float() + self.linear(hidden)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide() for _ in range(2))

    def forward(self, hidden: Any) -> Any:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def test_blocks_that_return_something_else_are_refused_at_the_first_call() -> None:
    model, _ = initialize(Blocks(), opt_level="bf16-amp")
    keep_residual_in_bf16(model)
    with pytest.raises(
        InvalidConfig, match=r"training.residual_stream: Wide was given bf16 and returns torch.float32; allowed"
    ):
        model(torch.randn(4, 32))
    with pytest.raises(InvalidConfig, match="Wide got a int where bf16 needs the hidden state"):
        model(3)


# Jobs


def test_a_job_trains_and_resumes_to_the_bit(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = with_training(spec_document, "O3-split", steps=4, checkpoint_every=2, residual_stream="bf16")
    whole, _ = train(document, tmp_path / "whole")
    plain, _ = train(with_training(spec_document, "O3-split", steps=4, checkpoint_every=2), tmp_path / "plain")
    assert whole.losses() != plain.losses()
    assert whole.losses() == pytest.approx(plain.losses(), rel=2.0**-8)
    interrupted = Recorder(stop_after_step=3)
    with pytest.raises(Stopped):
        train(document, tmp_path / "again", recorder=interrupted)
    resumed, _ = train(document, tmp_path / "whole", whole.checkpoints()[1:])
    assert [step.step for step in resumed.of(StepReport)] == [3, 4]
    assert resumed.losses() == whole.losses()[2:]


@pytest.mark.parametrize(("level", "gemm"), [("fp32", "fp32"), ("fp16-amp", "fp16")])
def test_levels_whose_layers_return_another_dtype_are_refused(spec_document: dict[str, Any], level: str, gemm: str) -> None:
    problem = refusal_of(with_training(spec_document, level, residual_stream="bf16"))
    assert f"fp32 at level {level}: its layers return {gemm}" in problem
    assert "such as bf16-amp or O2" in problem
