"""Each private name of torch that the worker uses exists in the installed torch, and does what the worker needs of it."""

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from octet.worker.kernels import torch_private as private

WORKER = Path(private.__file__).resolve().parents[1]
ATTRIBUTES = ("_version", "_cdata", "_schema", "_make_wrapper_subclass", "_post_accumulate_grad_hooks")
"""Private attributes of tensors, storages and ops."""


class Subclass(Tensor):
    """A tensor of ones that is nowhere in memory."""

    __torch_function__ = private.disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, *shape: int) -> "Subclass":
        made: Subclass = private.make_wrapper_subclass(cls, shape, dtype=torch.float32)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        decoded = private.tree_map(lambda leaf: torch.ones(leaf.shape) if isinstance(leaf, cls) else leaf, args)
        return func(*decoded, **(kwargs or {}))


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def make_wrapper_subclass() -> None:
    assert Subclass(2, 3).shape == (2, 3)
    assert float((Subclass(2, 3) + 1).sum()) == 12


def parameters() -> None:
    one, other = Subclass(2), nn.Parameter(torch.ones(2))
    assert not private.is_parameter(one)
    private.mark_as_parameter(one)
    assert private.is_parameter(one)
    assert private.is_parameter(other)


def restore_hooks() -> None:
    parameter, calls = nn.Parameter(torch.ones(2)), []
    parameter.register_post_accumulate_grad_hook(calls.append)
    torch.utils.swap_tensors(parameter, nn.Parameter(torch.zeros(2)))
    parameter.sum().backward()
    assert not calls  # else torch keeps them itself
    private.restore_hooks(parameter)
    parameter.sum().backward()
    assert calls == [parameter]


def correct_aliasing() -> None:
    tensor = torch.ones(4)
    view = private.correct_aliasing(torch.ops.aten.view.default, (tensor, [2, 2]), {}, torch.ones(2, 2))
    assert view.shape == (2, 2)


def raise_for_raw_pointers() -> None:
    tensor = Subclass(2)
    assert tensor.data_ptr() == 0
    private.raise_for_raw_pointers(tensor)
    with pytest.raises(RuntimeError, match="data pointer"):
        tensor.data_ptr()


def schema_of() -> None:
    schema = private.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.name == "aten::add_"
    assert [argument.is_write for argument in schema.arguments] == [True, False, False]
    assert schema.is_mutable


def let_foreach_take() -> None:
    from torch.utils._foreach_utils import _has_foreach_support

    assert not _has_foreach_support([Subclass(2)], torch.device("cpu"))
    for _ in range(2):
        private.let_foreach_take(Subclass)
    assert _has_foreach_support([Subclass(2)], torch.device("cpu"))
    assert private._foreach_supported_types.count(Subclass) == 1
    private._foreach_supported_types.remove(Subclass)


def foreach() -> None:
    tensors, found = [torch.ones(4), torch.full((4,), 2.0)], torch.zeros(1)
    private.foreach_mul_(tensors, torch.tensor(2.0))
    assert [float(norm) for norm in private.foreach_norm(tensors, 2.0)] == [4.0, 8.0]
    private.foreach_copy_(tensors, [torch.ones(4), torch.full((4,), torch.inf)])
    private.foreach_unscale_(tensors, found, torch.tensor(0.5))
    assert (float(tensors[0][0]), float(found)) == (0.5, 1.0)


def scaled_mm() -> None:
    a, b, one = torch.ones(16, 32).to(torch.float8_e4m3fn), torch.ones(16, 32).to(torch.float8_e4m3fn), torch.tensor(1.0)
    product = private.scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=False)
    assert float(product[0, 0]) == 32


def in_shape() -> None:
    leaf = torch.ones(4, requires_grad=True)
    for tensor in (leaf * 2, (leaf * 2).detach()):
        for is_own in (False, True):
            reshaped = private.in_shape(tensor, (2, 2), is_own=is_own)
            reshaped.add_(1)
            assert not reshaped._is_view()
            assert (reshaped is tensor) == (is_own and not tensor.requires_grad)


def num_modes() -> None:
    before = private.num_dispatch_modes(), private.num_function_modes()
    with Nothing(), torch.device("cpu"):
        assert (private.num_dispatch_modes(), private.num_function_modes()) == (before[0] + 1, before[1] + 1)


def transforms() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(private.present_transform() is not None)
        return x.sum()

    torch.func.grad(look)(torch.ones(2))
    look(torch.ones(2))
    assert seen == [True, False]


def backward_pass() -> None:
    seen = []
    leaf = torch.ones(2, requires_grad=True)
    product = leaf * 2
    product.register_hook(lambda _gradient: seen.append(private.backward_pass()))
    product.sum().backward()
    assert private.backward_pass() == -1
    assert seen[0] >= 0


def call_after_backward() -> None:
    seen = []
    leaf = torch.ones(2, requires_grad=True)
    product = leaf * 2
    product.register_hook(lambda _gradient: private.call_after_backward(lambda: seen.append(leaf.grad is not None)))
    product.sum().backward()
    assert seen == [True]


def version_of() -> None:
    tensor = torch.ones(2)
    before = private.version_of(tensor)
    tensor[:1].add_(1)
    assert private.version_of(tensor) == before + 1


def base_of() -> None:
    """A base is not kept alive by parts that `detach` returns, so a flat copy that nobody keeps is not one."""
    tensor = torch.ones(4)
    part = tensor[1:3]
    assert private.base_of(part) is tensor
    assert private.base_of(part.detach()) is private.base_of(tensor) is None


def key_of_storage() -> None:
    tensor = torch.ones(4)
    keys = [private.key_of_storage(each.untyped_storage()) for each in (tensor, tensor[2:], tensor.clone())]
    assert keys[0] == keys[1] != keys[2]


def hooks_after_accumulation() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert private.hooks_after_accumulation(parameter) == []
    parameter.register_post_accumulate_grad_hook(hook := lambda _parameter: None)
    assert private.hooks_after_accumulation(parameter) == [hook]


def optimizer_hooks() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    assert all(getattr(optimizer, name) == {} for name in private.OPTIMIZER_HOOKS)
    optimizer.register_step_post_hook(lambda *_arguments: None)
    assert len(getattr(optimizer, private.STEP_HOOKS[1])) == 1


def of_an_optimizers_class() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], fused=True)
    assert set(private.OF_AN_OPTIMIZERS_CLASS) <= vars(optimizer).keys()


def scheduler() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    assert not private.counts_steps(optimizer.step)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert private.counts_steps(optimizer.step)
    private.count_step(optimizer)
    assert vars(optimizer)["_opt_called"] is True

    def step() -> None:
        pass

    private.mark_as_counting(step)
    assert private.counts_steps(step)


def leave_the_compiler_unloaded() -> None:
    """In a process of its own: this one may have loaded the compiler."""
    code = (
        "import sys, torch; from octet.worker.kernels.torch_private import leave_the_compiler_unloaded as leave; leave(); "
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]); optimizer.zero_grad(); optimizer.state_dict(); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def trees() -> None:
    assert private.tree_leaves([1, (2, {"a": 3})]) == [1, 2, 3]
    assert private.tree_map_only(int, lambda number: number + 1, [1, ("a", 2)]) == [2, ("a", 3)]


def is_traceable_wrapper_subclass() -> None:
    assert not private.is_traceable_wrapper_subclass(torch.ones(2))


def compiler() -> None:
    """A graph that a partitioner of ours cuts runs; the compiler counts it, and what it took."""
    cut, differentiated, static = [], [], []

    def partition(joint: Any, joint_inputs: Any, **options: Any) -> Any:
        cut.append(joint)
        indices = options["static_lifetime_input_indices"]
        found = private.inputs_with_gradient(joint.graph), private.static_inputs(joint.graph, indices)
        for kept, nodes in zip((differentiated, static), found, strict=True):
            kept.extend(tuple(node.meta["val"].shape) for node in nodes)
        assert any(isinstance(node.target, private.OpOverload) for node in joint.graph.nodes)
        return private.torchs_partition()(joint, joint_inputs, **options)

    before = private.compiler_counters()["stats"]["unique_graphs"], private.compile_time_s()
    breaks = dict(private.compiler_counters()["graph_break"])  # of other tests
    frozen, leaf = TwoTensor(torch.ones(3, 4), torch.ones(3, 4)), torch.nn.Parameter(torch.ones(4))
    run = torch.compile(lambda: (leaf * frozen).sin(), backend=private.eager_backend(private.uncompiled, partition))
    run().sum().backward()
    assert leaf.grad is not None
    assert len(cut) == 1
    assert differentiated == static == [(4,)]
    assert private.compiler_counters()["stats"]["unique_graphs"] == before[0] + 1
    assert private.compile_time_s() > before[1]
    assert private.compiler_counters()["graph_break"] == breaks


def checkpointed_side_effects() -> None:
    """A checkpointed function that changes a list is compiled as one graph, and changes it once."""
    import torch._dynamo.config as settings

    seen: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return (x * 2).sin()

    before, breaks = settings.skip_fwd_side_effects_in_bwd_under_checkpoint, dict(private.compiler_counters()["graph_break"])
    private.compile_what_forward_passes_remember()
    try:
        run = torch.compile(lambda x: checkpoint(forward, x, use_reentrant=False), backend="aot_eager")
        run(torch.ones(4, requires_grad=True)).sum().backward()
    finally:
        settings.skip_fwd_side_effects_in_bwd_under_checkpoint = before
    assert seen == [1]
    assert private.compiler_counters()["graph_break"] == breaks


def never_compiled() -> None:
    """torch hands over neither the function's frame nor that of what it calls."""
    found: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        found.append(1)
        return graph

    def inner(x: Tensor) -> Tensor:
        return x + 1

    def outer(x: Tensor) -> Tensor:
        return inner(x) * 2

    assert torch.equal(torch.compile(outer, backend=backend)(torch.ones(2)), torch.full((2,), 4.0))
    assert found == [1]
    torch._dynamo.reset()
    private.never_compiled(outer)
    assert torch.equal(torch.compile(outer, backend=backend)(torch.ones(2)), torch.full((2,), 4.0))
    assert found == [1]


def inductor() -> None:
    partitioner = private.inductor_partitioner(lambda *_arguments, **_options: "cut", (__file__,))
    assert partitioner("joint", []) == "cut"
    assert partitioner.uuid()
    assert hasattr(private.inductor_config(), "custom_partitioner_fn")
    assert hasattr(private.inductor_config(), "deterministic") or hasattr(private.inductor_config(), "max_autotune")


def flight_recorder_dumps() -> None:
    """torch 2.11 has them with NCCL alone; since 2.12 every build has."""
    is_newer = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 12)
    assert private.flight_recorder_dumps() or not (is_newer or torch.distributed.is_nccl_available())


def wait_for() -> None:
    private.wait_for(torch.ones(2))


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        *(make_wrapper_subclass, parameters, restore_hooks, correct_aliasing, raise_for_raw_pointers, schema_of),
        *(let_foreach_take, is_traceable_wrapper_subclass, trees),
        *(foreach, scaled_mm, in_shape),
        *(num_modes, transforms, backward_pass, call_after_backward),
        *(version_of, base_of, key_of_storage, hooks_after_accumulation),
        *(compiler, checkpointed_side_effects, never_compiled, inductor, flight_recorder_dumps, wait_for),
        *(optimizer_hooks, of_an_optimizers_class, scheduler, leave_the_compiler_unloaded),
    )
}


@pytest.mark.parametrize("name", CHECKS)
def test_torch_has_what_is_used(name: str) -> None:
    CHECKS[name]()


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # Inductor, when it is imported
def test_graphs_of_inductor_call_a_function_in_the_place_of_an_op() -> None:
    from torch._inductor.utils import fresh_cache

    ops = torch.library.Library("octet_in_graphs", "DEF")
    ops.define("twice(Tensor x) -> Tensor")
    ops.impl("twice", lambda x: x * 2, "CPU")
    torch.library.register_fake("octet_in_graphs::twice", torch.empty_like, lib=ops)
    op = torch.ops.octet_in_graphs.twice
    op.thrice = lambda x: x * 3
    private.write_in_graphs(op.default, "torch.ops.octet_in_graphs.twice.thrice")
    assert torch.equal(op(torch.ones(2)), torch.full((2,), 2.0))
    with fresh_cache():
        assert torch.equal(torch.compile(lambda x: op(x))(torch.ones(2)), torch.full((2,), 3.0))


def names_of(tree: ast.AST) -> list[str]:
    """Return the private names of torch that a module's code has: imported, or by attribute."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            modules = [alias.name for alias in node.names] + ([node.module] if isinstance(node, ast.ImportFrom) else [])
            found += [name for name in modules if name and name.startswith("torch.") and "._" in name]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            written = ast.unparse(node)
            if (written.startswith("torch.") and not written.startswith("torch.ops.")) or node.attr in ATTRIBUTES:
                found.append(written)
    return found


def test_no_other_module_names_one() -> None:
    """Only `planning` does: its fake device stands for torch's own, and no rank imports it."""
    found = {}
    for path in WORKER.rglob("*.py"):
        if (
            path.name != "torch_private.py"
            and path.parent.name != "planning"
            and (names := names_of(ast.parse(path.read_text())))
        ):
            found[str(path.relative_to(WORKER))] = names
    assert found == {}
