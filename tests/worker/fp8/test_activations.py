"""A layer that takes over the activation before it: the same numbers, and what waits for the backward pass is less."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octet.api_schemas import GPTSizes
from octet.worker import initialize
from octet.worker.fp8.fallback import Fallback
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.sequence import take_over_activations
from octet.worker.fp8.weight import tensors_in_memory
from octet.worker.models.gpt import GPT

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU, "gelu-tanh": lambda: nn.GELU(approximate="tanh"), "relu": nn.ReLU, "silu": nn.SiLU,
}  # fmt: skip
RECIPES = [
    {}, {"granularity": "row"}, {"granularity": "block"}, {"scaling": "delayed", "amax_history_length": 2},
    {"high_precision_gemms": ["grad_weight"]}, {"high_precision_gemms": ["output", "grad_weight"]},
]  # fmt: skip


class Apart(nn.Module):
    """The same layers, but nothing says that only the second sees what the activation returns."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def network(make: Callable[[], nn.Module], *, apart: bool, level: str = "O2", **options: object) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 128), make(), nn.Linear(128, 64))
    return initialize(Apart(layers) if apart else layers, None, level, **options)[0]


def second(model: nn.Module) -> Float8Linear:
    return [layer for layer in model.modules() if isinstance(layer, Float8Linear)][1]


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and the parameters."""
    x = x.clone().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    return [output, *(tensor.grad for tensor in (x, *model.parameters()) if tensor.grad is not None)]


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(torch.equal(one + 0, other + 0) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("make", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_every_activation_gives_the_same_bits(make: Callable[[], nn.Module]) -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    together, apart = (network(make, apart=apart) for apart in (False, True))
    assert second(together).activation is not None
    assert second(apart).activation is None
    assert same(gradients(together, x), gradients(apart, x))


@pytest.mark.parametrize("level", ["te", "O2", "O3-split"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_every_recipe_gives_the_same_bits(recipe: dict[str, object], level: str) -> None:
    models = [network(nn.GELU, apart=apart, level=level, recipe=recipe) for apart in (False, True)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    for step in range(3):  # a delayed scale is of past steps from the third on
        x = torch.randn(200, 64, generator=torch.Generator().manual_seed(step)) * 2**step
        assert same(*(gradients(model, x) for model in models))
        for model, optimizer in zip(models, optimizers, strict=True):
            if hasattr(model, "octet_steps"):
                model.octet_steps.after_step()
            optimizer.zero_grad()


@pytest.mark.parametrize("level", ["te", "O2"])
def test_a_layer_that_falls_back_to_bf16_still_applies_it(level: str) -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    models = [network(nn.GELU, apart=apart, level=level) for apart in (False, True)]
    for model in models:
        second(model).fallback = Fallback.DEMOTED
    assert same(*(gradients(model, x) for model in models))


class Passes(TorchDispatchMode):
    """Notes the ops that read or write a tensor of activations, and the bytes of those tensors; views are free.

    What `complete` reads only while a window fills counts none.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape, self.ops, self.num_bytes = sorted(shape), Counter[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = args[:1] if func is torch.ops.octet.complete.default else (args, kwargs)
        given = {id(part): part for part in tree_leaves(read) if isinstance(part, Tensor)}
        made = [part for part in tree_leaves(result) if isinstance(part, Tensor)]
        moved = [part for part in (*given.values(), *made) if sorted(part.shape) == self.shape]
        reshapes = func in (torch.ops.aten._unsafe_view.default, torch.ops.aten.resize_.default)
        if moved and not func.is_view and not reshapes:
            self.ops[func.overloadpacket.__name__] += 1
            self.num_bytes += sum(part.nbytes for part in moved)
        return result


def test_the_activation_is_a_part_of_the_pass_that_quantizes() -> None:
    """At a delayed scale: no pass writes its values, none reads them, and none looks for an amax in the backward pass.

    The pass that computes the gradient of its input writes the codes of that gradient.
    """
    recipe = {"scaling": "delayed", "amax_history_length": 1}
    found = []
    for apart in (False, True):
        model = network(nn.GELU, apart=apart, recipe=recipe, statistics_every=0)
        for step in range(2):
            x = torch.randn(200, 64, generator=torch.Generator().manual_seed(step))
            with Passes((200, 128)) as passes:
                gradients(model, x)
            model.octet_report.health.after_step()
        found.append(passes)
    together, separate = found
    names = ("quantize_delayed", "complete", "gelu")
    assert [separate.ops[name] for name in names] == [2, 0, 1]
    assert [together.ops[name] for name in names] == [1, 1, 0]  # the former activates and quantizes the other layer's input
    assert together.ops["compute_amax"] == separate.ops["compute_amax"] == 0
    assert together.ops.total() == separate.ops.total() - 1
    # Forward 4 + 1 in the place of 4 + 4, 4 + 2. Backward 4 of the activation's input in the place of 1 of its codes; and
    # 1, 1 + 1 for codes of the gradient in the place of 4 + 2.
    assert separate.num_bytes - together.num_bytes == 200 * 128 * (14 - 5 - 3 + 3)


def test_nothing_but_the_activations_input_waits_for_the_backward_pass() -> None:
    """In FP32 here: 4 bytes for each of 128 features, where the codes would be one more."""
    kept = []
    for apart in (False, True):
        model, saved = network(nn.GELU, apart=apart), {}
        parameters = {tensor.data_ptr() for tensor in tensors_in_memory(model)}

        def note(tensor: Tensor, saved: dict[int, int] = saved, parameters: set[int] = parameters) -> Tensor:
            if tensor.data_ptr() not in parameters and tensor.numel() >= 200 * 64:
                saved[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            output = model(torch.randn(200, 64))
        kept.append(sum(saved.values()))
        del output
    assert kept == [200 * (64 + 4 * 128), 200 * (64 + 4 * 128 + 128)]


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
@pytest.mark.parametrize("level", ["O2", pytest.param("te", marks=pytest.mark.matrix)])
def test_a_compiler_does_not_keep_what_is_made_again(level: str) -> None:
    """Inductor's partitioner moves to the forward pass what it can, and keeps the result: here it cannot."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    torch.compiler.reset()
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    eager, model = gradients(network(nn.GELU, apart=False, level=level), x), network(nn.GELU, apart=False, level=level)
    graphs: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
    assert same(eager, gradients(torch.compile(model, backend=backend, fullgraph=True), x))
    kept = [node.meta["val"] for node in graphs[1].nodes if node.op == "placeholder"]
    assert [value.dtype for value in kept if tuple(value.shape) in ((200, 128), (128, 200))] == [torch.float32]
    assert torch.ops.octet.linear_gradients.default in [node.target for node in graphs[1].nodes]  # which makes it again


def test_only_what_no_one_else_sees_is_taken_over() -> None:
    shared = nn.GELU()
    hooked = nn.GELU()
    hooked.register_forward_hook(lambda *_: None)
    for activation in (nn.ReLU(inplace=True), nn.Tanh(), hooked, nn.Dropout(0.5)):
        model, _ = initialize(nn.Sequential(nn.Linear(64, 64), activation, nn.Linear(64, 64)), None, "O2")
        assert model[1] is activation
        assert second(model).activation is None
    model, _ = initialize(nn.Sequential(shared, nn.Linear(64, 64), shared, nn.Linear(64, 64)), None, "O2")
    assert [layer.activation for layer in model if isinstance(layer, Float8Linear)] == [None, None]


def test_the_gpts_mlp_is_such_a_place_and_its_state_is_named_as_before() -> None:
    gpt = GPT(GPTSizes(hidden_size=32, num_layers=1, num_heads=2, vocab_size=64, max_sequence_length=16))
    before = list(gpt.state_dict())
    model, _ = initialize(gpt, None, "O2")
    assert model.get_submodule("blocks.0.mlp.down").activation == "gelu-tanh"
    assert set(before) == set(model.state_dict())
    take_over_activations(model)  # a second time changes nothing
    assert model.get_submodule("blocks.0.mlp.down").activation == "gelu-tanh"
