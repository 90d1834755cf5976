"""Options that save memory: fused losses, FP8 for what blocks keep, and gradients that are freed in the backward pass."""

import copy
import gc
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_flatten

from octet.api_schemas import GPTSizes, JobSpec, StepReport, TrainingSpec, explain
from octet.api_schemas.recipe import RecipeSpec
from octet.worker import (
    fuse_loss,
    initialize,
    keep_activations_in_fp8,
    keep_residual_in_bf16,
    memory_report,
    offload_optimizer,
    release_gradients,
)
from octet.worker.common.errors import InvalidConfig
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.fp8.bf16 import half_linear
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.recipe import Recipe
from octet.worker.models import linear_cross_entropy as module
from octet.worker.models.blocks import repeated_blocks
from octet.worker.models.cross_entropy import IGNORED, cross_entropy
from octet.worker.models.gpt import GPT
from octet.worker.models.linear_cross_entropy import DeferredLogits
from octet.worker.optim import LowBitAdamW, LowBitOptimizer, clip_grad_norm_
from octet.worker.planning.live_bytes import LiveBytes
from octet.worker.prepare.blocks import compile_blocks
from octet.worker.prepare.memory_options import prepare_steps
from octet.worker.prepare.saved_activations import SavedAsItIs, SavedCodes, _Saver
from tests.kit.families import FAMILIES, batch_of, fit_loss_scale
from tests.kit.small_model import FP8_LEVELS
from tests.kit.training import train, with_training

FUSED = {"gpt": "O2", "llama": "fp32", "transformers-llama": "O2", "roberta": "fp32"}
"""Families with a head, and the level at which each is in `make test`."""
KEEPING = ("O2", "O3", "O3-split-8bit")
"""One level for each way of holding a weight in codes."""


def families_and_levels() -> list[Any]:
    return [
        pytest.param(family, level, marks=() if level == usual else pytest.mark.matrix)
        for family, usual in FUSED.items()
        for level in ("fp32", "O2", "bf16-amp")
    ]


LEVELS_OF_8_BITS = ("O2-8bit", "O3-split-8bit")


def levels_in_codes() -> list[Any]:
    levels = ("fp32", *FP8_LEVELS)
    return [level if level in KEEPING else pytest.param(level, marks=pytest.mark.matrix) for level in levels]


def make(family: str, level: str) -> tuple[Any, LowBitOptimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FAMILIES[family]()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level, statistics_every=0)
    assert isinstance(optimizer, LowBitOptimizer)
    return model, optimizer


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad + 0 for name, parameter in model.named_parameters() if parameter.grad is not None}


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference of all gradients over the norm of all expected ones."""
    assert found.keys() == expected.keys()
    whole = [torch.cat([value.float().flatten() for value in part.values()]) for part in (found, expected)]
    return float((whole[0] - whole[1]).norm() / whole[1].norm())


# Fused loss


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_ignored", [False, True])
def test_a_fused_loss_equals_the_unfused_one(monkeypatch: Any, has_bias: bool, has_ignored: bool) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 128 * 52)  # pieces of 128, 128, 128 and 6 entries
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(52, 24, generator=draw)
    weight, bias = torch.randn(390, 24, generator=draw), torch.randn(390, generator=draw) if has_bias else None
    targets = torch.randint(0, 390, (52,), generator=draw)
    if has_ignored:
        targets[::3] = IGNORED
    results = []
    for is_fused in (False, True):
        leaves = [part.clone().requires_grad_() if part is not None else None for part in (inputs, weight, bias)]
        x, w, b = leaves
        assert x is not None
        assert w is not None
        logits = DeferredLogits(x, w, b, functional.linear) if is_fused else functional.linear(x, w, b)
        loss = cross_entropy(logits, targets, has_ignored=has_ignored)
        (loss * 0.3).backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves if leaf is not None)])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # fp32, other orders of addition


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("target", [64, IGNORED])
def test_a_target_outside_of_the_vocabulary_is_refused(is_fused: bool, target: int) -> None:
    model, _ = make("gpt", "O2")
    if is_fused:
        fuse_loss(model)
    batch = batch_of("gpt")
    batch["targets"][0, 3] = target
    with pytest.raises(RuntimeError, match=f"index {target} is out of bounds"):
        model.loss(batch)


@pytest.mark.parametrize(("family", "level"), families_and_levels())
def test_a_model_trains_by_a_fused_loss(family: str, level: str) -> None:
    found = []
    for is_fused in (False, True):
        model, _ = make(family, level)
        if is_fused:
            fuse_loss(model)
        loss = model.loss(batch_of(family)).loss
        loss.backward()
        evaluated = model.eval().loss(batch_of(family))
        found.append((loss.detach(), gradients_of(model), evaluated))
    (loss, gradients, evaluated), (fused_loss, fused_gradients, fused_evaluated) = found
    torch.testing.assert_close(fused_loss, loss, rtol=1e-6, atol=0.0)
    tolerance = 1e-5 if level == "fp32" else 2.0**-8  # gradients of the head's input round to bf16
    assert relative_error(fused_gradients, gradients) < tolerance
    assert evaluated.metrics.keys() == fused_evaluated.metrics.keys() != set()
    assert torch.equal(evaluated.loss, fused_evaluated.loss)


def test_no_tensor_of_a_fused_loss_is_as_large_as_the_logits(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1 << 14)
    inputs = torch.randn(1024, 16, requires_grad=True)
    weight = torch.randn(2048, 16, requires_grad=True)
    targets = torch.randint(0, 2048, (1024,))
    with LiveBytes(granule=1) as live:
        cross_entropy(DeferredLogits(inputs, weight, None, functional.linear), targets).backward()
    gradients, columns = 4 * (1024 + 2048) * 16 * 2, module.ALIGNMENT * 1024
    assert live.peak_bytes < gradients + 4 * 4 * columns  # the logits alone have 8 MiB, four pieces 2 MiB
    assert live.peak_bytes < 4 * 1024 * 2048 / 2


@pytest.mark.system
@pytest.mark.parametrize(("vocab_size", "width", "num_mebibytes"), [(50_304, 768, 216), (50_304, 4096, 320)])
def test_bytes_of_a_fused_loss_are_those_of_the_log(vocab_size: int, width: int, num_mebibytes: int) -> None:
    """GPT of 125M and 6.7B at 8,192 tokens: the peak above the inputs, the weight and its gradient (`docs/log.md`)."""
    with cpu_as_accelerator(), FakeTensorMode(), LiveBytes() as live:
        inputs = torch.empty(8192, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocab_size, width, requires_grad=True)
        targets = torch.empty(8192, dtype=torch.int64)
        first = live.num_bytes
        logits = DeferredLogits(inputs, weight, None, partial(half_linear, bias=None, compute_dtype=torch.bfloat16))
        cross_entropy(logits, targets).backward()
    found = live.peak_bytes - first - 4 * weight.numel()
    assert round(found / 2**20) == num_mebibytes


def test_what_has_no_plain_head_is_refused() -> None:
    for model in (FAMILIES["gpt"](), nn.Module()):
        model.head = Float8Linear(nn.Linear(32, 64), Recipe.resolve(RecipeSpec()))
        with pytest.raises(ValueError, match="found a Float8Linear; allowed: a linear layer in 16 bits"):
            fuse_loss(model)
    with pytest.raises(ValueError, match="fused_loss"):
        fuse_loss(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="other levels than fp16-amp"):
        fuse_loss(initialize(FAMILIES["gpt"](), opt_level="fp16-amp")[0])


def test_a_network_that_makes_its_logits_itself_is_refused() -> None:
    model, _ = make("gpt", "O2")
    fuse_loss(model)
    model.head.forward = lambda input: functional.linear(input, model.head.weight)
    with pytest.raises(InvalidConfig, match="returned logits"):
        model.loss(batch_of("gpt"))


# Activations in FP8


@pytest.mark.parametrize("family", ["gpt", "llama", *(pytest.param(f, marks=pytest.mark.matrix) for f in ("roberta", "vit"))])
@pytest.mark.parametrize("level", ["O2", pytest.param("bf16-amp", marks=pytest.mark.matrix)])
def test_activations_in_fp8_change_gradients_alone_and_keep_less(family: str, level: str) -> None:
    found = []
    for is_fp8 in (False, True):
        model, _ = make(family, level)
        if is_fp8:
            assert keep_activations_in_fp8(model) == 1
        with LiveBytes(granule=1) as live:
            loss = model.loss(batch_of(family)).loss
        num_bytes = live.num_bytes
        loss.backward()
        found.append((num_bytes, loss.detach(), gradients_of(model)))
    (num_bytes, loss, gradients), (num_fp8_bytes, fp8_loss, fp8_gradients) = found
    assert torch.equal(loss, fp8_loss)
    # logits and statistics are in it, heads have a scale for 16 elements, and roberta has copies of weights
    assert num_fp8_bytes < (0.78 if family == "roberta" else 0.7) * num_bytes
    assert 0.0 < relative_error(fp8_gradients, gradients) < 0.05  # E4M3 rounds by at most 2^-4


def compiled_families() -> list[Any]:
    """gpt at O2 in `make test`; each family, and each way of holding a weight, in the matrix."""
    marks: dict[tuple[str, str], Any] = {("gpt", "O2"): (), ("transformers-llama", "bf16-amp"): pytest.mark.system}
    pairs = {(family, level) for family in FAMILIES for level in ("O2", "bf16-amp")} | {("gpt", level) for level in FP8_LEVELS}
    return [pytest.param(*pair, marks=marks.get(pair, pytest.mark.matrix)) for pair in sorted(pairs)]


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks at inputs
@pytest.mark.parametrize(("family", "level"), compiled_families())
def test_compiled_blocks_keep_activations_in_fp8_too(family: str, level: str) -> None:
    found = []
    for is_fp8, is_compiled in ((False, False), (True, False), (False, True), (True, True)):
        torch.compiler.reset()
        torch.manual_seed(1)  # Swin drops paths at random
        with cpu_as_accelerator():
            model, _ = make(family, level)
            fit_loss_scale(model)
            if is_fp8:
                keep_activations_in_fp8(model)
            if is_compiled:
                compile_blocks(model, backend="aot_eager")
                model.loss(batch_of(family)).loss.backward()  # what is compiled here would count
                model.zero_grad()
            with LiveBytes(granule=1) as live:
                loss = model.loss(batch_of(family)).loss
            num_bytes = live.num_bytes
            loss.backward()
        found.append((num_bytes, loss.detach(), gradients_of(model)))
    (_, loss, exact), (num_bytes, _, _), (num_exact_bytes, compiled_loss, _), (num_fp8_bytes, fp8_loss, fp8) = found
    assert torch.equal(fp8_loss, compiled_loss)
    torch.testing.assert_close(fp8_loss, loss, rtol=1e-3, atol=0.0)
    holds_more = (family, level) in {("gpt", "te"), ("roberta", "O2")}  # besides logits and statistics, as copies of weights
    assert num_fp8_bytes < (0.87 if holds_more else 0.8) * num_exact_bytes
    assert num_fp8_bytes < 1.1 * num_bytes
    assert 0.0 < relative_error(fp8, exact) < 0.05


def rounded_alike() -> list[Any]:
    """llama at O2 in `make test`, whose norms and gates consist of several ops; the rest in the matrix.

    Swin on an accelerator has attention of single ops: the backward pass of torch's attention with a bias that is trained
    multiplies in fp32 on a CPU, and in bf16 where AOTAutograd traces it, under autocast.
    """
    recipes: list[dict[str, Any]] = [{}, {"high_precision_gemms": ["grad_weight"]}, {"high_precision_gemms": ["output"]}]
    pairs = [(family, level, {}) for family in FAMILIES for level in ("O2", "bf16-amp")]
    pairs += [("gpt", level, {}) for level in FP8_LEVELS if level != "O2"] + [("llama", "O2", recipe) for recipe in recipes[1:]]
    marks: dict[tuple[str, str], Any] = {("llama", "cpu"): (), ("llama", "accelerator"): pytest.mark.system}
    return [
        pytest.param(family, level, recipe, device, marks=marks[family, device] if is_usual else pytest.mark.matrix)
        for family, level, recipe in pairs
        for device in ("cpu", "accelerator")
        for is_usual in [(family, level, recipe) == ("llama", "O2", {})]
    ]


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks at inputs
@pytest.mark.parametrize(("family", "level", "recipe", "device"), rounded_alike())
def test_compiled_blocks_round_what_eager_blocks_round(family: str, level: str, recipe: dict[str, Any], device: str) -> None:
    found = []
    for is_compiled in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = FAMILIES[family]()
        if (family, device) == ("swin", "accelerator"):
            model.network.set_attn_implementation("eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with nullcontext() if device == "cpu" else cpu_as_accelerator():
            model, _ = initialize(model, optimizer, level, statistics_every=0, recipe=RecipeSpec(**recipe) if recipe else None)
            fit_loss_scale(model)
            keep_activations_in_fp8(model)
            if is_compiled:
                compile_blocks(model, backend="aot_eager")
            for _ in range(2):
                torch.manual_seed(1)  # Swin drops paths at random
                model.loss(batch_of(family)).loss.backward()
        found.append(gradients_of(model))
    eager, compiled = found
    assert eager.keys() == compiled.keys()
    for name, gradient in eager.items():
        assert torch.equal(gradient, compiled[name]), name


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks at inputs
@pytest.mark.parametrize(
    ("family", "level"),
    [
        pytest.param("gpt", "O2", marks=pytest.mark.system),
        *(pytest.param(*pair, marks=pytest.mark.matrix) for pair in [("llama", "O2"), ("gpt", "bf16-amp")]),
    ],
)
def test_compiled_blocks_with_a_stream_in_bf16_have_the_bits_of_eager_ones(family: str, level: str) -> None:
    found = []
    for is_compiled in (False, True):
        torch.compiler.reset()
        model, _ = make(family, level)
        keep_residual_in_bf16(model)
        fuse_loss(model)
        if is_compiled:
            compile_blocks(model, backend="aot_eager")
        for _ in range(2):
            model.loss(batch_of(family)).loss.backward()
        found.append(gradients_of(model))
    eager, compiled = found
    for name, gradient in eager.items():
        assert torch.equal(gradient, compiled[name]), name


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks at inputs
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # Inductor, when it is imported
@pytest.mark.parametrize(
    ("family", "level"), [("gpt", "O2"), ("transformers-llama", "O3-split"), ("vit", "bf16-amp")]
)  # Inductor drops other paths of Swin
def test_inductor_compiles_blocks_that_keep_activations_in_fp8(family: str, level: str) -> None:
    found = []
    for is_compiled in (False, True):
        torch.compiler.reset()
        torch.manual_seed(1)
        with cpu_as_accelerator():
            model, _ = make(family, level)
            keep_activations_in_fp8(model)
            if is_compiled:
                compile_blocks(model)
            torch.manual_seed(1)
            loss = model.loss(batch_of(family)).loss
            loss.backward()
        found.append((loss.detach(), gradients_of(model)))
    (eager_loss, eager), (loss, gradients) = found
    torch.testing.assert_close(loss, eager_loss, rtol=2e-3, atol=0.0)
    assert relative_error(gradients, eager) < 0.05


def test_a_compiler_that_cuts_graphs_by_itself_is_refused() -> None:
    model, _ = make("gpt", "O2")
    keep_activations_in_fp8(model)
    with pytest.raises(ValueError, match=r"got the backend 'eager'.*allowed: inductor, aot_eager"):
        compile_blocks(model, backend="eager")


def test_a_saved_activation_keeps_its_shape_order_and_values() -> None:
    heads = torch.randn(2, 3, 5, 32, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    saved = _Saver().pack(heads.clone(memory_format=torch.preserve_format).requires_grad_() * 1.0)
    assert isinstance(saved, SavedCodes)
    assert saved.codes.is_contiguous()
    values = saved.values()
    assert (values.shape, values.stride(), values.dtype) == (heads.shape, heads.stride(), heads.dtype)
    assert torch.all((values - heads).abs() <= 2.0**-4 * heads.abs() + 2.0**-9 * heads.abs().amax(-1, keepdim=True))
    assert not torch.equal(values, heads)


def test_weights_statistics_and_short_rows_are_kept_as_they_are() -> None:
    saver, weight = _Saver(), nn.Parameter(torch.randn(32, 32))
    rows = torch.randn(4, 8, requires_grad=True) * 1.0
    for kept in (weight, weight.t(), weight.to(torch.bfloat16).t(), rows, torch.randn(32, 32)):
        packed = saver.pack(kept)
        assert isinstance(packed, SavedAsItIs)
        as_it_is = packed.values()
        assert (as_it_is.data_ptr(), as_it_is.stride(), as_it_is.dtype) == (kept.data_ptr(), kept.stride(), kept.dtype)
    product = weight * 2.0
    assert saver.pack(product) is saver.pack(product)  # what two ops save is quantized once


def test_a_weight_that_changes_before_the_backward_pass_is_refused() -> None:
    """Without the option, torch itself refuses it."""
    model, _ = make("gpt", "bf16-amp")
    keep_activations_in_fp8(model)
    loss = model.loss(batch_of("gpt")).loss
    with torch.no_grad():
        for parameter in repeated_blocks(model)[0].parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match=r"keeps for its backward pass, was written into"):
        loss.backward()


@pytest.mark.system
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_loss_without_a_backward_pass_is_freed_whole(family: str) -> None:
    model, _ = make(family, "O2")
    keep_activations_in_fp8(model)

    def num_alive_after(num_losses: int) -> int:
        for _ in range(num_losses):
            model.loss(batch_of(family))
        gc.collect()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    num_after_one = num_alive_after(1)
    assert num_alive_after(3) <= num_after_one


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="repeats no blocks"):
        keep_activations_in_fp8(nn.Sequential(nn.Linear(16, 16)))


# Gradient release


@pytest.mark.parametrize("level", levels_in_codes())
def test_steps_in_the_backward_pass_change_no_bit(level: str) -> None:
    found = []
    for is_released in (False, True):
        model, optimizer = make("gpt", level)
        released = release_gradients(model, optimizer) if is_released else None
        norms = []
        for _ in range(3):
            model.loss(batch_of("gpt")).loss.backward()
            if released is not None:
                assert not gradients_of(model)
            norms.append(clip_grad_norm_(model.parameters(), math.inf) if released is None else released.norm())
            optimizer.step()
            optimizer.zero_grad()
        found.append((model.state_dict(), optimizer.state_dict(), norms))
    (weights, states, norms), (released_weights, released_states, released_norms) = found
    torch.testing.assert_close(released_norms, norms)
    assert_equal(released_weights, weights)
    assert_equal(released_states, states)


def assert_equal(found: Any, expected: Any) -> None:
    leaves, structure = tree_flatten(found)
    expected_leaves, expected_structure = tree_flatten(expected)
    assert structure == expected_structure
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        assert torch.equal(leaf, expected_leaf) if isinstance(leaf, Tensor) else leaf == expected_leaf


@pytest.mark.parametrize("level", LEVELS_OF_8_BITS)
def test_at_8_bits_a_parameter_takes_4_2_bytes_and_one_gradient_is_alive_at_a_time(level: str) -> None:
    blocks = GPTSizes(hidden_size=256, num_layers=2, num_heads=4, vocab_size=64, max_sequence_length=16)
    model: Any = GPT(blocks)
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters()), level, statistics_every=0)
    assert optimizer is not None
    alive: list[int] = []
    for parameter in model.parameters():  # these hooks run before those that release
        parameter.register_post_accumulate_grad_hook(lambda _: alive.append(len(gradients_of(model))))
    release_gradients(model, optimizer)
    tokens = torch.randint(0, 64, (2, 17))
    for _ in range(2):
        model.loss({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}).loss.backward()
        optimizer.step()
    assert set(alive) == {1}
    held = memory_report(model, optimizer, converted_only=True)
    num_parameters = sum(model.get_submodule(name).weight.numel() for name in model.octet_report.converted)
    assert held["gradients"] == 0
    assert sum(held.values()) / num_parameters < 4.2


def test_a_parameter_whose_gradient_is_not_finite_is_skipped_and_the_step_is_counted() -> None:
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = LowBitAdamW([first, second])
    release_gradients(nn.Module(), optimizer)
    for factor in (math.inf, 1.0):
        (first.sum() * factor + second.sum()).backward()
        assert first.grad is second.grad is None
        optimizer.step()
    assert optimizer.num_skipped_steps == 1
    assert [optimizer.state[parameter]["step"] for parameter in (first, second)] == [1, 2]


def test_a_second_backward_pass_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4))
    release_gradients(nn.Module(), LowBitAdamW([weight]))
    weight.sum().backward()
    with pytest.raises(ValueError, match="one backward pass for each"):
        weight.sum().backward()


@pytest.mark.parametrize("level", ["O2", "O3-split-8bit"])
def test_a_copy_of_what_releases_gradients_steps_as_usual_until_it_releases_them_too(level: str) -> None:
    found = []
    for is_released_again in (False, True):
        model, optimizer = make("gpt", level)
        release_gradients(model, optimizer)
        copied, copied_optimizer = copy.deepcopy((model, optimizer))
        if is_released_again:
            release_gradients(copied, copied_optimizer)
        for one, its_optimizer in ((model, optimizer), (copied, copied_optimizer)):
            for _ in range(2):
                its_optimizer.zero_grad()
                one.loss(batch_of("gpt")).loss.backward()
                assert bool(gradients_of(one)) is (one is copied and not is_released_again)
                its_optimizer.step()
            found.append((one.state_dict(), its_optimizer.state_dict()))
    for other in found[1:]:
        assert_equal(other, found[0])


def test_gradient_release_refuses_other_optimizers_and_scaled_losses() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="steps a SGD; allowed: AdamW, Adam, Lion and SGD after initialize"):
        release_gradients(model, torch.optim.SGD(model.parameters()))
    scaled, optimizer = make("gpt", "fp16-amp")
    with pytest.raises(ValueError, match="other levels than fp16-amp"):
        release_gradients(scaled, optimizer)
    optimizer.released = None
    plain = LowBitAdamW(model.parameters())
    release_gradients(model, plain)
    with pytest.raises(ValueError, match="already"):
        release_gradients(model, plain)


# States in host memory


@pytest.mark.parametrize("level", levels_in_codes())
def test_states_in_host_memory_change_no_bit(level: str) -> None:
    found = []
    for is_offloaded, is_released in ((False, False), (True, False), (True, True)):
        model, optimizer = make("gpt", level)
        if is_offloaded:
            offload_optimizer(optimizer)
        if is_released:
            release_gradients(model, optimizer)
        for _ in range(2):
            model.loss(batch_of("gpt")).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((model.state_dict(), optimizer.state_dict()))
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


def test_only_states_of_what_is_stepped_and_of_the_next_are_on_the_device() -> None:
    parameters = [nn.Parameter(torch.ones(64)) for _ in range(5)]
    optimizer = LowBitAdamW(parameters)
    offload_optimizer(optimizer)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    host = {
        id(part) for state in optimizer.state.values() for part in (state["exp_avg"]["codes"], state["exp_avg_sq"]["codes"])
    }
    assert optimizer.host_states is not None
    updates = [(parameter, optimizer.param_groups[0]) for parameter in parameters]
    with LiveBytes(granule=1) as live:
        list(optimizer.host_states.visit(updates, optimizer.state))  # copies return what is on the host, which then counts
        before = live.num_bytes
        live.restart()
        for parameter, _ in optimizer.host_states.visit(updates, optimizer.state):
            assert id(optimizer.state[parameter]["exp_avg"]["codes"]) not in host
            optimizer.state[parameter]["exp_avg"]["codes"].add_(1.0)
    assert live.peak_bytes - before <= 3 * 2 * 64 * 4  # the present, the next, and the one before until it is forgotten
    for state in optimizer.state.values():
        assert id(state["exp_avg"]["codes"]) in host
        assert torch.equal(state["exp_avg"]["codes"], torch.full((64,), 0.1 + 1.0))


@pytest.mark.parametrize("level", LEVELS_OF_8_BITS)
def test_an_offloaded_optimizer_continues_from_a_saved_one(level: str) -> None:
    """Also one that was saved without offload, to the bits of a run that was not interrupted."""

    def step(model: Any, optimizer: LowBitOptimizer) -> None:
        model.loss(batch_of("gpt")).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make("gpt", level)
    step(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(model, optimizer)
    for is_saved_offloaded in (False, True):
        again, continued = make("gpt", level)
        offload_optimizer(continued)
        if is_saved_offloaded:
            step(again, continued)
            assert_equal(continued.state_dict(), saved[1])
            again, continued = copy.deepcopy((again, continued))
        again.load_state_dict(saved[0])
        continued.load_state_dict(saved[1])
        assert continued.host_states is not None
        step(again, continued)
        assert_equal((again.state_dict(), continued.state_dict()), (model.state_dict(), optimizer.state_dict()))


def test_only_an_optimizer_of_initialize_is_offloaded() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="got a SGD not from initialize"):
        offload_optimizer(torch.optim.SGD(model.parameters()))


# Jobs

SAVINGS = {
    "fused_loss": True,
    "saved_activations": "fp8",
    "gradient_release": True,
    "gradient_clip": None,
    "offload_optimizer": True,
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks at inputs
@pytest.mark.parametrize("compiling", ["off", pytest.param("on", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("level", LEVELS_OF_8_BITS)
def test_a_job_trains_with_all_of_them_and_resumes_to_the_bit(
    tmp_path: Path, spec_document: dict[str, Any], level: str, compiling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    monkeypatch.setattr("octet.worker.prepare.blocks.compile_blocks", lambda model: compile_blocks(model, backend="aot_eager"))
    document = with_training(spec_document, level, steps=4, checkpoint_every=2, compile=compiling, **SAVINGS)
    recorder, summary = train(document, tmp_path)
    assert summary.memory_bytes["gradients"] == 0
    assert all(step.gradient_norm > 0 for step in recorder.of(StepReport))
    resumed, _ = train(document, tmp_path, recorder.checkpoints()[1:])
    assert resumed.losses() == recorder.losses()[2:]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks at inputs
@pytest.mark.parametrize("other", [{"compile": "on"}, {"activation_checkpointing": "full"}])
@pytest.mark.parametrize("level", ["O2", "O3-split-8bit"])
def test_compiled_and_checkpointed_blocks_train_to_the_same_bits(
    tmp_path: Path, spec_document: dict[str, Any], level: str, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    monkeypatch.setattr("octet.worker.prepare.blocks.compile_blocks", lambda model: compile_blocks(model, backend="aot_eager"))
    curves = []
    for index, savings in enumerate(({}, {"gradient_release": True, "offload_optimizer": True}, {"fused_loss": True})):
        document = with_training(spec_document, level, steps=4, gradient_clip=None, **other, **savings)
        recorder, _ = train(document, tmp_path / str(index))
        curves.append(recorder.losses())
    assert curves[0] == curves[1]
    assert curves[2] == pytest.approx(curves[0], rel=1e-3)  # the head's input has its gradient summed in another order


@pytest.mark.parametrize(
    ("training", "level", "allowed"),
    [
        ({"gradient_release": True}, "O2", "false with gradient_clip"),
        ({"gradient_release": True, "optimizer": {"name": "sgd"}}, "O2", "false with optimizer.name sgd"),
        ({"gradient_release": True, "gradient_clip": None, "micro_batch_size": 1}, "O2", "false with several micro-batches"),
        ({"gradient_release": True, "gradient_clip": None}, "fp16-amp", "false at level fp16-amp"),
        ({"fused_loss": True}, "fp16-amp", "false at level fp16-amp"),
        ({"saved_activations": "fp8", "activation_checkpointing": "full"}, "O2", "exact with activation_checkpointing"),
    ],
)
def test_what_cannot_be_combined_is_refused(
    spec_document: dict[str, Any], training: dict[str, Any], level: str, allowed: str
) -> None:
    assert allowed in refusal_of(with_training(spec_document, level, **training))


def test_ranks_heads_in_fp8_and_images_are_refused(spec_document: dict[str, Any]) -> None:
    released = with_training(spec_document, "O2", gradient_release=True, gradient_clip=None)
    assert "false on several ranks" in refusal_of(released | {"resources": {"workers": 2}})
    fused = with_training(spec_document, "O2", fused_loss=True)
    assert "convert_heads" in refusal_of(fused | {"precision": {"level": "O2", "convert_heads": True}})
    in_fp8 = with_training(spec_document, "O2", saved_activations="fp8")
    assert "zero_stage 3" in refusal_of(in_fp8 | {"parallelism": {"zero_stage": 3}})
    offloaded = with_training(spec_document, "O2", offload_optimizer=True)
    assert "zero_stage 1" in refusal_of(offloaded | {"parallelism": {"zero_stage": 1}})
    images = {"model": {"preset": "deit-s"}, "data": {"source": "images", "path": "/data/images"}}
    assert "predicts tokens" in refusal_of(spec_document | images | {"training": {"steps": 1, "fused_loss": True}})


def refusal_of(document: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as raised:
        JobSpec.model_validate(document)
    (problem,) = explain(raised.value, JobSpec)
    return f"{problem.allowed} {problem.message}"


def test_a_rank_refuses_what_it_alone_can_see() -> None:
    training = TrainingSpec.model_validate({"steps": 1, "saved_activations": "fp8"})
    with pytest.raises(InvalidConfig, match="repeats no blocks"):
        prepare_steps(nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.ones(1))]), training, torch.device("cpu"))


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [("compile", "on", "off"), ("activation_checkpointing", "selective", "none"), ("activation_checkpointing", "full", "none")],
)
def test_an_option_of_blocks_is_refused_where_there_are_none(option: str, value: str, allowed: str) -> None:
    training = TrainingSpec.model_validate({"steps": 1, option: value})
    message = (
        rf"training\.{option} is {value}, and the model repeats no blocks; allowed: {allowed}, .* Remove training\.{option}"
    )
    with pytest.raises(InvalidConfig, match=message):
        prepare_steps(nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.ones(1))]), training, torch.device("cpu"))
