"""Activations that give their amaxes to the layers around them: the same bits as without, and fewer passes over memory."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel, GemmaConfig, GemmaModel, LlamaConfig, LlamaModel, ViTConfig, ViTModel
from transformers.activations import ACT2FN

from octet.worker import initialize
from octet.worker.common.wrap import wrappers_of
from octet.worker.fp8 import linear
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.fp8.gate_forward import ActivationForward, GatedForward, known_activation
from octet.worker.fp8.handoff import Handoff, Recorded, gradient_handoff_of, handoff_of
from octet.worker.prepare import initialize as prepare
from tests.kit.accelerator import cuda_dtypes
from tests.kit.small_model import FP8_LEVELS
from tests.worker.fp8.test_handoff import DELAYED, RECIPES, Calls, gpt, gradients, llama, tokens


class Between(nn.Module):
    """Two layers with an activation. between: what happens to what it is given and returns."""

    def __init__(self, activation: nn.Module | None = None, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 16)
        self.activation, self.between = activation or nn.GELU(), between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.activation(self.between(self.up(x)))))


def ours(model: nn.Module) -> list[type]:
    """The classes of the wrappers of MLPs and activations, also within the one that enters autocast."""
    found = [wrapper for module in model.modules() for wrapper in wrappers_of(module)]
    return [type(wrapper) for wrapper in found if isinstance(wrapper, (ActivationForward, GatedForward))]


def converted(make: Callable[[], nn.Module], level: str = "O2", *, carries: bool = True, **options: Any) -> nn.Module:
    """carries: else nothing is known of activations and their gradients."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        if not carries:
            patch.setattr(prepare, "carry_activations", lambda _model: 0)
        return initialize(make(), None, level, auto_filter=False, **options)[0]


def record_no_gradients(patch: pytest.MonkeyPatch) -> None:
    """Let layers leave no handoffs for the gradients of their outputs."""
    patch.setattr(linear, "attach_gradient", lambda output, _handoff: output)


def assert_same_bits(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], level: str, batches: list[Tensor], **options: Any
) -> list[nn.Module]:
    """Also of two micro-batches that accumulate, and of what delayed scaling and samples remember."""
    models = [converted(make, level, carries=carries, **options) for carries in (True, False)]
    for batch in batches:
        found = []
        for model, carries in zip(models, (True, False), strict=True):
            with monkeypatch.context() as patch:
                if not carries:
                    record_no_gradients(patch)
                found.append([*gradients(model, batch), *gradients(model, batch)])
        assert len(found[0]) == len(found[1])
        assert all(map(torch.equal, *found))
        for model in models:
            if model.octet_report.health is not None:
                model.octet_report.health.after_step()
            for parameter in model.parameters():
                parameter.grad = None
    for one, other in zip(models[0].buffers(), models[1].buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    return models


@pytest.mark.parametrize(
    ("level", "recipe"),
    [
        ("O2", {}),
        ("te", DELAYED),
        ("O3-split", {"granularity": "row"}),
        ("O1", {"high_precision_gemms": ["grad_input"]}),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in product(FP8_LEVELS, (*RECIPES, DELAYED))),
    ],
)
@pytest.mark.parametrize(("make", "is_accelerator"), [(llama, True), (gpt, True), (gpt, False)])
def test_models_train_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], level: str, recipe: dict[str, Any], is_accelerator: bool
) -> None:
    with cuda_dtypes() if is_accelerator else nullcontext():
        models = assert_same_bits(monkeypatch, make, level, tokens(), recipe=recipe, statistics_every=2)
    assert [ours(model) for model in models] == [[GatedForward] if make is llama else [], []]


def transformers_model(kind: str) -> nn.Module:
    """A model of one layer."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    if kind == "vit":
        return ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8, hidden_dropout_prob=0.0), add_pooling_layer=False)
    if kind == "bert":
        return BertModel(BertConfig(**sizes, vocab_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    config, model = (LlamaConfig, LlamaModel) if kind == "llama" else (GemmaConfig, GemmaModel)
    return model(config(**sizes, num_key_value_heads=1, head_dim=16, vocab_size=64, use_cache=False))


class LastHidden(nn.Module):
    """Return only the hidden states of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(batch)[0]


@pytest.mark.parametrize("kind", ["vit", "bert", "llama", "gemma"])
def test_models_of_transformers_train_to_the_same_bits(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    batch = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) if kind == "vit" else tokens(1)[0]
    with cuda_dtypes():
        models = assert_same_bits(monkeypatch, lambda: LastHidden(transformers_model(kind)), "O2", [batch, batch])
    assert ours(models[0]) == [ActivationForward if kind in ("vit", "bert") else GatedForward]


def test_which_activations_are_known() -> None:
    known = {name: known_activation(ACT2FN[name]) for name in ("gelu", "gelu_pytorch_tanh", "relu", "silu", "swish")}
    assert known == {"gelu": "gelu", "gelu_pytorch_tanh": "gelu-tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
    others = ("gelu_new", "gelu_python", "gelu_python_tanh", "quick_gelu", "gelu_fast", "relu2", "mish")
    assert {known_activation(ACT2FN[name]) for name in others} == {None}


def count(make: Callable[[], nn.Module], batch: Tensor, *, carries: bool, **options: Any) -> Any:
    """The ops of one forward and backward pass, on an accelerator, by name."""
    model = converted(make, carries=carries, statistics_every=0, **options)
    with pytest.MonkeyPatch.context() as patch, cpu_as_accelerator(), Calls() as calls:
        if not carries:
            record_no_gradients(patch)
        model(batch).float().square().sum().backward()
    return calls.ops


def test_a_gate_is_one_op_each_way_in_the_place_of_five() -> None:
    found, before = (count(llama, tokens(1)[0], carries=carries) for carries in (True, False))
    assert (found["activate"], found["activate_backward"]) == (1, 1)
    assert (before["silu"] - found["silu"], before["silu_backward"] - found["silu_backward"]) == (1, 1)
    assert before["mul"] - found["mul"] == 3


def test_delayed_scaling_writes_codes_with_norms_and_gates() -> None:
    """A norm writes no codes with its first output, as no layer has taken any yet, and none once layers take no more."""
    model = converted(llama, recipe=DELAYED, statistics_every=0)
    found = []
    for step in range(4):
        if step == 3:
            model.blocks[0].attention.query.fallback = model.blocks[0].mlp.down.fallback = linear.Fallback.DEMOTED
        with cpu_as_accelerator(), Calls() as calls:
            model(tokens(1)[0]).float().square().sum().backward()
        model.octet_report.health.after_step()
        found.append(calls.ops["complete"])
    # of gradients those of gate and up, each time; at last the key takes the first norm's codes, written for the query
    assert found == [3, 5, 5, 3]


@pytest.mark.parametrize("make", [llama, gpt])
def test_layers_before_an_activation_look_for_no_amax(monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module]) -> None:
    """The activation records the amax of each gradient that it writes: llama's up and gate, gpt's up."""
    taken, take = [], Handoff.recorded

    def note(handoff: Handoff, x: Tensor, *arguments: Any, **options: Any) -> Recorded:
        recorded = take(handoff, x, *arguments, **options)
        if not handoff.is_shared:  # of a gradient
            taken.append(recorded.amax)
            assert recorded.amax is None or torch.equal(recorded.amax, x.abs().amax().float())
        return recorded

    monkeypatch.setattr(Handoff, "recorded", note)
    count(make, tokens(1)[0], carries=True)
    assert sum(amax is not None for amax in taken) == (2 if make is llama else 1)
    assert len(taken) == (7 if make is llama else 4)


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.mul_(2),
        lambda x: x * 2,
        lambda x: x.add_(1),
        lambda x: x.view_as(x),
        lambda x: x + x.detach() * 0,
        lambda x: x.flatten(0, 1).unflatten(0, x.shape[:2]) if x.dim() > 2 else x,
    ],
)
@pytest.mark.parametrize("is_accelerator", [False, True])
def test_what_has_changed_is_looked_through(
    monkeypatch: pytest.MonkeyPatch, between: Callable[[Tensor], Tensor], is_accelerator: bool
) -> None:
    batch = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(1))
    with cpu_as_accelerator() if is_accelerator else nullcontext():
        assert_same_bits(monkeypatch, lambda: Between(between=between), "O2", [batch])


class Hooked(Between):
    """hook: on the gradient of up's output. is_read_twice: that output has another reader."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None], *, is_read_twice: bool) -> None:
        super().__init__()
        self.hook, self.is_read_twice = hook, is_read_twice

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden.register_hook(self.hook)
        output = self.down(self.activation(hidden))
        return output + hidden[..., :16] if self.is_read_twice else output  # then two gradients are added up


@pytest.mark.parametrize("is_read_twice", [False, True])
@pytest.mark.parametrize("is_accelerator", [False, True])
@pytest.mark.parametrize(
    "hook", [lambda grad: grad * 3, lambda grad: grad.mul_(3), lambda grad: grad.view(-1).mul_(3).view_as(grad)]
)
def test_a_gradient_that_is_changed_is_looked_through(
    monkeypatch: pytest.MonkeyPatch, hook: Callable[[Tensor], Tensor | None], is_accelerator: bool, is_read_twice: bool
) -> None:
    batch = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))

    with cpu_as_accelerator() if is_accelerator else nullcontext():
        assert_same_bits(monkeypatch, lambda: Hooked(hook, is_read_twice=is_read_twice), "O2", [batch])


def test_modules_with_hooks_run_as_they_are() -> None:
    seen: list[Tensor] = []
    model = converted(lambda: LastHidden(transformers_model("llama")), statistics_every=0)
    mlp = model.model.layers[0].mlp
    mlp.act_fn.register_forward_hook(lambda _module, _given, output: seen.append(output))
    x = torch.randn(4, 32)
    with cpu_as_accelerator(), Calls() as calls:
        output = mlp(x)
    assert torch.equal(seen[0], nn.functional.silu(mlp.gate_proj(x).bfloat16()))
    assert not calls.ops["activate"]
    assert output.shape == (4, 32)


def test_frozen_layers_copies_and_passes_without_gradients() -> None:
    batch = torch.randn(32, 32)
    model = converted(Between, statistics_every=0)
    with cpu_as_accelerator():
        with torch.no_grad():
            expected = model(batch)
            assert gradient_handoff_of(model.up(batch)) is None
        with torch.inference_mode():
            assert torch.equal(model(batch), expected)
        hidden = model.activation(model.up(batch))
        assert handoff_of(hidden) is not None
        twin = copy.deepcopy(model)
        assert twin.activation.forward.__self__.module is twin.activation
        assert torch.equal(twin(batch), expected)
        model.up.requires_grad_(False)
        assert gradient_handoff_of(model.up(batch)) is None
        model(batch).sum().backward()
        assert model(torch.randn(0, 32)).shape == (0, 16)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("make", [llama, gpt])
def test_checkpointed_blocks_have_the_same_bits(make: Callable[[], nn.Module], use_reentrant: bool) -> None:
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for is_checkpointed in (False, True):
        mlp = converted(make, statistics_every=0).blocks[0].mlp
        given = x.clone().requires_grad_()
        with cpu_as_accelerator():
            output = checkpoint(mlp, given, use_reentrant=use_reentrant) if is_checkpointed else mlp(given)
            output.float().square().sum().backward()
        found.append([output, given.grad, *(parameter.grad + 0 for parameter in mlp.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
@pytest.mark.parametrize("make", [llama, gpt])
def test_compiled_blocks_are_one_graph_and_carry_nothing(make: Callable[[], nn.Module]) -> None:
    torch.compiler.reset()
    found = []
    for is_compiled in (False, True):
        mlp = converted(make, statistics_every=0).blocks[0].mlp
        with cpu_as_accelerator(), torch.autocast("cpu", torch.bfloat16):
            run = torch.compile(mlp, backend="eager", fullgraph=True) if is_compiled else mlp
            given = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
            run(given).float().square().sum().backward()
        found.append([given.grad, *(parameter.grad + 0 for parameter in mlp.parameters())])
    assert all(map(torch.equal, *found))
