"""Norms that return what carries codes: the same bits as without, fewer passes, and nothing is taken that has changed."""

import copy
import io
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from octet.api_schemas import GPTSizes
from octet.api_schemas.models.llama import LlamaSizes
from octet.worker import initialize
from octet.worker.fp8.accelerator import cpu_as_accelerator
from octet.worker.fp8.handoff import Handoff, handoff_of
from octet.worker.fp8.norm_forward import NormForward
from octet.worker.models.gpt import GPT
from octet.worker.models.llama import Llama
from octet.worker.prepare import initialize as prepare
from tests.kit.accelerator import cuda_dtypes
from tests.kit.small_model import FP8_LEVELS

SIZES = {"hidden_size": 32, "num_layers": 1, "vocab_size": 64, "max_sequence_length": 16}
DELAYED: dict[str, Any] = {"scaling": "delayed", "amax_history_length": 2}
RECIPES: list[dict[str, Any]] = [
    {},
    {"granularity": "row"},
    {"granularity": "block"},
    {"high_precision_gemms": ["grad_weight"]},
]


def llama() -> Llama:
    sizes = {
        **SIZES,
        "num_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "rope_theta": 1e4,
        "tie_embeddings": False,
    }
    return Llama(LlamaSizes.model_validate(sizes))


def gpt() -> GPT:
    return GPT(GPTSizes.model_validate({**SIZES, "num_heads": 2}))


class Shared(nn.Module):
    """A norm with two layers after it. between: what happens to the norm's output before each layer."""

    def __init__(
        self, norm: Callable[[int], nn.Module] = nn.LayerNorm, between: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        super().__init__()
        self.norm, self.one, self.other, self.between = norm(64), nn.Linear(64, 32), nn.Linear(64, 32), between

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.one(self.between(x)) + self.other(self.between(x))


def converted(model: nn.Module, level: str = "O2", *, carries: bool = True, **options: Any) -> nn.Module:
    """carries: else as it was before norms returned what carries codes."""
    with pytest.MonkeyPatch.context() as patch:
        if not carries:
            patch.setattr(prepare, "carry_norms", lambda _model: 0)
        return initialize(model, None, level, **options)[0]


def forward_of(module: nn.Module) -> object:
    """Return the object that replaced a module's forward, or None."""
    return getattr(vars(module).get("forward"), "__self__", None)


def gradients(model: nn.Module, batch: Tensor) -> list[Tensor]:
    """The output, and the gradients of the parameters; those of a layer in FP8 as values."""
    output = model(batch)
    output.float().square().sum().backward()
    return [output, *(tensor.grad + 0 for tensor in model.parameters() if tensor.grad is not None)]


def assert_same_bits(
    make: Callable[[], nn.Module], level: str, batches: list[Tensor], *, rtol: float = 0.0, atol: float = 0.0, **options: Any
) -> None:
    """rtol, atol: of gradients; outputs have the same bits in either case."""
    models = []
    for carries in (True, False):
        torch.manual_seed(0)
        models.append(converted(make(), level, carries=carries, **options))
    carrying = [any(isinstance(forward_of(part), NormForward) for part in model.modules()) for model in models]
    assert carrying == [True, False]
    for batch in batches:
        found = [gradients(model, batch) for model in models]
        assert len(found[0]) == len(found[1])
        assert torch.equal(found[0][0], found[1][0])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)
        for model in models:
            if model.octet_report.health is not None:
                model.octet_report.health.after_step()
            for parameter in model.parameters():
                parameter.grad = None
    for one, other in zip(models[0].buffers(), models[1].buffers(), strict=True):  # histories and samples
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)


def tokens(count: int = 3) -> list[Tensor]:
    return [torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step)) for step in range(count)]


@pytest.mark.parametrize(
    ("level", "recipe"),
    [
        ("O2", {}),
        ("te", DELAYED),
        ("O3-split", {"granularity": "row"}),
        ("O1", {"high_precision_gemms": ["output"]}),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in product(FP8_LEVELS, (*RECIPES, DELAYED))),
    ],
)
@pytest.mark.parametrize(
    ("make", "is_accelerator"), [(llama, False), (gpt, True), pytest.param(gpt, False, marks=pytest.mark.matrix)]
)
def test_models_train_to_the_same_bits(
    make: Callable[[], nn.Module], level: str, recipe: dict[str, Any], is_accelerator: bool
) -> None:
    """On an accelerator the norm is our op, whose twin has torch's bits, forward and backward."""
    with cuda_dtypes() if is_accelerator else nullcontext():
        assert_same_bits(make, level, tokens(), recipe=recipe, statistics_every=2)


def test_a_residual_stream_adds_the_gradient_of_an_rms_norm_at_once() -> None:
    """On a CPU torch's RMSNorm is many ops. Two add to its input's gradient one after the other, which rounds differently."""
    with cuda_dtypes():
        assert_same_bits(llama, "O2", tokens(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, lambda size: nn.RMSNorm(size, eps=1e-5), LlamaRMSNorm])
@pytest.mark.parametrize("norms", ["fp32", "bf16"])
def test_every_norm_gives_the_same_bits(norm: Callable[[int], nn.Module], norms: str) -> None:
    batches = [torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(step)) for step in range(2)]
    with cuda_dtypes():
        assert_same_bits(lambda: Shared(norm), "O2", batches, norms=norms)


class Calls(TorchDispatchMode):
    """Counts the ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = Counter[str]()
        self.num_quantized_inputs = 0
        """Inputs that `linear_output` gets as values, and quantizes itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[func.overloadpacket.__name__] += 1
        if func is torch.ops.octet.linear_output.default:
            self.num_quantized_inputs += args[1] is None  # it has no scale
        return func(*args, **(kwargs or {}))


def test_layers_after_a_norm_quantize_once_and_keep_one_copy() -> None:
    """Query, key and value, gate and up: 2 quantized inputs in the place of 5, and of the amaxes the norm has found 2."""
    found, kept, quantized = [], [], []
    for carries in (True, False):
        model, saved = converted(llama(), carries=carries, statistics_every=0), {}

        def note(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            if tensor.dtype == torch.float8_e4m3fn and tensor.numel() == 32 * 32:
                saved[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with (
            cpu_as_accelerator(),
            torch.autocast("cpu", torch.bfloat16),
            Calls() as calls,
            saved_tensors_hooks(note, lambda x: x),
        ):
            output = model(tokens()[0])
        found.append(calls.ops)
        quantized.append(calls.num_quantized_inputs)
        kept.append(sum(saved.values()))
        del output
    assert quantized == [4, 7]  # also the inputs of attention's output and of down
    assert [ops["normalize"] for ops in found] == [2, 0]
    assert kept[1] - kept[0] == 3 * 32 * 32  # 1 byte of codes for each of 32 features of 32 tokens, 3 times


@pytest.mark.parametrize(
    "between", [lambda x: x.mul_(2), lambda x: x * 2, lambda x: x.view_as(x), lambda x: x.to(torch.float64).float()]
)
@pytest.mark.parametrize("is_accelerator", [False, True])
def test_what_has_changed_is_quantized_again(between: Callable[[Tensor], Tensor], is_accelerator: bool) -> None:
    batches = [torch.randn(40, 64, generator=torch.Generator().manual_seed(1))]
    with cpu_as_accelerator() if is_accelerator else torch.autocast("cpu", enabled=False):
        assert_same_bits(lambda: Shared(between=between), "O2", batches)


def test_hooks_see_values_and_may_change_them() -> None:
    def double(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return output * 2

    def negate(_module: nn.Module, _args: object, output: Tensor) -> None:
        output.neg_()

    def make() -> nn.Module:
        model = Shared()
        model.norm.register_forward_hook(double)
        model.norm.register_forward_hook(negate)
        return model

    assert_same_bits(make, "O2", [torch.randn(40, 64)])


def test_frozen_layers_and_passes_without_gradients() -> None:
    def make() -> nn.Module:
        model = Shared()
        model.one.requires_grad_(False)  # wants no codes for a weight gradient, the other does
        return model

    batch = torch.randn(40, 64)
    assert_same_bits(make, "O2", [batch])
    model = converted(Shared(), statistics_every=0)
    with torch.no_grad():
        expected = model(batch)
    with torch.inference_mode():
        assert torch.equal(model(batch), expected)
        assert handoff_of(model.norm(batch)) is None
    assert torch.equal(checkpoint(model, batch.requires_grad_(), use_reentrant=False), expected)
    assert model(torch.randn(0, 64)).shape == (0, 32)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
@pytest.mark.parametrize("recipe", [{}, pytest.param(DELAYED, marks=pytest.mark.matrix)])
def test_a_compiled_block_shares_codes_in_one_graph(recipe: dict[str, Any]) -> None:
    torch.compiler.reset()
    batch, found = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(1)), []
    calls: list[str] = []

    def count(module: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        calls.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    for is_compiled in (False, True):
        mlp, norm = (part := converted(llama(), recipe=recipe, statistics_every=0).blocks[0]).mlp, part.mlp_norm

        def run(x: Tensor, block: Any = part) -> Tensor:
            return block.mlp(block.mlp_norm(x))

        forward = torch.compile(run, backend=count, fullgraph=True) if is_compiled else run
        forward(batch.clone().requires_grad_()).square().sum().backward()
        found.append([tensor.grad + 0 for tensor in (*norm.parameters(), *mlp.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert sum("quantize_operand" in call for call in calls) <= 2  # the norm's output once, the activation's


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_module_that_we_do_not_know_carries_nothing() -> None:
    torch.compiler.reset()
    batch = torch.randn(40, 64)
    eager, compiled = (converted(Shared(between=lambda x: x.mul_(2)), statistics_every=0) for _ in range(2))
    compiled.load_state_dict(eager.state_dict())
    assert torch.equal(torch.compile(compiled, backend="eager", fullgraph=True)(batch), eager(batch))


def test_copies_files_and_state_dicts_know_nothing_of_it() -> None:
    model = converted(Shared(), statistics_every=0)
    assert [name for name in model.state_dict() if "norm" in name] == ["norm.weight", "norm.bias"]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.norm.weight.mul_(2)
    assert isinstance(forward := twin.norm.forward.__self__, NormForward)
    assert forward.norm is twin.norm
    batch = torch.randn(40, 64)
    assert not torch.equal(twin(batch), model(batch))
    output = model.norm(batch)
    assert isinstance(output.octet_handoff, Handoff)
    file = io.BytesIO()
    torch.save(output, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded, output)
    assert handoff_of(loaded) is None
