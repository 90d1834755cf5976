"""Every name of torch that has a leading underscore, or a place that torch may change, and why each is used.

No other module of the worker names one; `tests/worker/kernels/test_torch_private.py` exercises each on the installed
torch. It stands in `kernels`, which everything else may import and which imports torch alone. Not listed: methods that torch
documents for subclasses to override (`nn.Module._load_from_state_dict`), and a module's dictionaries (`_parameters`,
`_buffers`, `_modules`).
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._dynamo import eval_frame
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = [
    "is_traceable_wrapper_subclass",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]
# `is_traceable_wrapper_subclass`: memory reports walk through the parts of anybody's subclasses. The functions on trees: an
# op's arguments are nested lists, and `__torch_dispatch__` has to find the tensors in them.

# Subclasses ----------------------------------------------------------------------------------------------------------------

# A subclass whose ops are all handled in `__torch_dispatch__` skips the detour through Python that `__torch_function__` is.
disabled_torch_function = torch._C._disabled_torch_function_impl

# torch's one constructor of a tensor that has a shape and a dtype but no memory of its own.
make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass


def raise_for_raw_pointers(tensor: Tensor) -> None:
    """Make whoever asks for the address of values that are not in memory raise, instead of reading from address 0.

    torch dispatches no op whose lists of lists alone hold a subclass, such as `dist.scatter` of FP8 gradients: what it calls in
    C++ would send from that address.
    """
    torch._C._set_throw_on_mutable_data_ptr(tensor)


def is_traced(tensor: Tensor) -> bool:
    """Return True for a tensor of a graph that torch.compile, or AOTAutograd, makes."""
    return isinstance(tensor, FunctionalTensor) or (isinstance(tensor, FakeTensor) and TracingContext.try_get() is not None)


def never_compiled(function: Any) -> Any:
    """Have torch.compile leave a function alone, and what it calls; `torch.compiler.disable` loads the compiler to do so."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


# What a subclass returns from a view op: autograd and compiled graphs then know which memory it shows.
correct_aliasing: Callable[..., Any] = return_and_correct_aliasing


def is_parameter(tensor: Tensor) -> bool:
    """Return True if a tensor is a parameter; a subclass is marked by an attribute, as `nn.Parameter` does it."""
    return isinstance(tensor, torch.nn.Parameter)


def mark_as_parameter(tensor: Tensor) -> None:
    """Let a tensor of a subclass count as a parameter, as `nn.Parameter(tensor)` would, without an alias."""
    tensor._is_param = True


def swap_tensors(tensor: Tensor, other: Tensor) -> None:
    """Let two Python tensors exchange what they are, as `torch.utils.swap_tensors`, also where weak references exist.

    Fake tensors and caches keep those to the Python object, which stays. Raises RuntimeError if an autograd graph refers
    to one.
    """
    for each in (tensor, other):
        if each._use_count() > 1:
            raise RuntimeError("an autograd graph refers to it")
    for name in ("__class__", "__dict__"):
        mine, theirs = getattr(tensor, name), getattr(other, name)
        setattr(tensor, name, theirs)
        setattr(other, name, mine)
    torch._C._swap_tensor_impl(tensor, other)


def restore_hooks(tensor: Tensor) -> None:
    """Let autograd call a tensor's hooks again, after `swap_tensors`: the Python object has kept them, autograd has not."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(tensor, name, None):
            setattr(tensor, name, hooks)


def schema_of(op: Any) -> Any:
    """Return the schema of an op: its name, and which of its arguments it writes."""
    return op._schema


def let_foreach_take(kind: type[Tensor]) -> None:
    """Register a subclass with torch's optimizers and clipping, which then pass a list of them to one foreach op.

    Without it they call an op per tensor, as they do for any subclass that they do not know.
    """
    if kind not in _foreach_supported_types:
        _foreach_supported_types.append(kind)


# Ops -----------------------------------------------------------------------------------------------------------------------

# Foreach ops: one launch for a list of tensors. torch's optimizers are made of them, but their names are private.
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm

# What GradScaler.unscale_ calls.
foreach_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_

# cuBLASLt's FP8 product, by tensor or by row. `torch.nn.functional.scaled_mm` of newer versions is slower to call.
scaled_mm: Callable[..., Tensor] = torch._scaled_mm


def in_shape(tensor: Tensor, shape: tuple[int, ...], *, is_own: bool = False) -> Tensor:
    """Return a contiguous tensor in another shape, and no view of it: autograd then lets others change it in place.

    is_own: nothing else holds the tensor. Where autograd does not follow it, it is then changed
    itself, by a third of the host's time of a new one.
    """
    if not is_own or torch.compiler.is_compiling() or tensor.requires_grad:
        reshaped: Tensor = torch.ops.aten._unsafe_view(tensor, shape)
        return reshaped
    return tensor.resize_(shape)


# Who looks -----------------------------------------------------------------------------------------------------------------

# How many modes (such as fake tensors or a profiler of ours) see each op: an op called past the dispatcher would be missed.
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack

# The functorch transform that runs, or None.
present_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack

# The number of the backward pass that runs, -1 outside of one.
backward_pass: Callable[[], int] = torch._C._current_graph_task_id


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs has ended; torch's own data parallelism does so by the same queue."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def set_version(tensor: Tensor, version: int) -> None:
    """Set a tensor's count of changes back, where what autograd has saved of it is there again: see `version_of`."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place, by which autograd knows that a saved one is still what it was."""
    return tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a tensor is a view of, whose memory who assigns the view to `data` may want to share."""
    return tensor._base


def key_of_storage(storage: Any) -> int:
    """Return a number that two storages share if they are the same memory. An address would not do: fake tensors have none."""
    key: int = storage._cdata  # not int(…), which Dynamo cannot trace
    return key


def hooks_after_accumulation(parameter: Tensor) -> list[Callable[[Tensor], None]]:
    """Return the hooks that autograd calls after it has accumulated a parameter's gradient.

    Compiled graphs deliver a gradient beside autograd's accumulation, and have to call them.
    """
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


# Optimizers ----------------------------------------------------------------------------------------------------------------

OPTIMIZER_HOOKS = tuple(
    f"_optimizer_{kind}_hooks"
    for kind in ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
)
"""Attributes with a user's hooks, which an optimizer that becomes one of ours keeps."""
STEP_HOOKS = OPTIMIZER_HOOKS[:2]
"""By these a converted model follows the steps; torch's pickling of an optimizer drops them."""
OF_AN_OPTIMIZERS_CLASS = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""Attributes by which torch's fused optimizers change what GradScaler and `add_param_group` do."""


def counts_steps(step: Any) -> bool:
    """Return whether a scheduler has wrapped an optimizer's `step`, to warn where it was stepped first."""
    return hasattr(step, "_wrapped_by_lr_sched")


def mark_as_counting(step: Any) -> None:
    """Make schedulers take a function for a `step` that they have wrapped."""
    step._wrapped_by_lr_sched = True


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Record that an optimizer was stepped, as the wrapper of a scheduler does."""
    optimizer._opt_called = True


def leave_the_compiler_unloaded() -> None:
    """Let four methods of torch's optimizers run as they are in this process. For a rank: it compiles no optimizer.

    torch wraps them with `torch._disable_dynamo`, so that a compiler leaves them alone. The wrapper loads `torch._dynamo` at
    the first call, sympy and FSDP with it, which takes as long as the rest of a rank's start, and keeps what it gets as an
    attribute of the method. If a torch keeps it under another name, this has no effect, and the compiler is loaded.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None and not hasattr(method, "__dynamo_disable"):
            setattr(method, "__dynamo_disable", method)  # no name mangling, and mypy knows no such attribute


# Compiler ------------------------------------------------------------------------------------------------------------------
# Each import stands in a function: the compiler takes a second to load, and only a run that compiles needs it.

OpOverload = torch._ops.OpOverload
"""The class of an op in a graph of torch.fx."""


def compiler_counters() -> Any:
    """Return the compiler's counts: `stats.unique_graphs`, and `graph_break` by reason. No public function has them."""
    from torch._dynamo.utils import counters

    return counters


def compile_what_forward_passes_remember() -> None:
    """Let this process compile checkpointed functions that change an object of Python's, without doing so again backward.

    The compiler refuses them otherwise, and runs such a block op by op.
    """
    import torch._dynamo.config as settings

    settings.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def compile_time_s() -> float:
    """Return the seconds that this process has spent in the compiler."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent()["total_wall_time"])


def eager_backend(compile_graph: Callable[..., Any], partition: Callable[..., Any]) -> Any:
    """Return a backend that runs graphs as `compile_graph` returns them, cut into two passes by `partition`."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph, partition_fn=partition)


def uncompiled(graph: Any, _inputs: Sequence[object]) -> Any:
    """Return a graph as it is, in the calling convention of a compiled one."""
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(graph)


def inductor_partitioner(partition: Callable[..., Any], files: tuple[str, ...]) -> Any:
    """Return a partitioner as Inductor's `custom_partitioner_fn` takes it. files: of its code, by which Inductor caches."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Sequence[object], **options: Any) -> Any:
            return partition(gm, joint_inputs, **options)

        def uuid(self) -> Any:
            return get_hash_for_files(files)

    return Partitioner()


def torchs_partition() -> Callable[..., Any]:
    """Return the function that torch.compile cuts a joint graph with: a minimal cut, by bytes that are kept."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition


def inputs_with_gradient(joint: fx.Graph) -> set[fx.Node]:
    """Return the inputs of a joint graph that it returns gradients of; of a subclass, all tensors that it consists of."""
    of = {_whole(result.grad_of) for result in map(_whole, joint.output_node().meta["desc"]) if hasattr(result, "grad_of")}
    return {node for node in joint.find_nodes(op="placeholder") if _whole(node.meta["desc"]) in of}


def static_inputs(joint: fx.Graph, indices: Collection[int]) -> set[fx.Node]:
    """Return the inputs of a joint graph that are parameters and buffers, or parts of one that is a subclass.

    indices: as a partitioner is given them. They count a subclass once, whose tensors are an input each.
    """
    inputs = joint.find_nodes(op="placeholder")
    return {node for node in inputs if getattr(_whole(node.meta["desc"]), "idx", None) in indices}


def _whole(description: Any) -> Any:
    """Return the description of a graph's input or result, or of the subclass that it is a part of."""
    while hasattr(description, "base"):
        description = description.base
    return description


def inductor_config() -> Any:
    """Return Inductor's options; a deterministic run switches off what it measures."""
    from torch._inductor import config

    return config


def write_in_graphs(op: Any, function: str) -> None:
    """Let the code of Inductor's graphs call a function in the place of an op. function: as that code names it.

    In a torch whose Inductor has no such table, graphs go on calling the op.
    """
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
    except ImportError:
        return

    def write(node: Any, write_line: Callable[[str], None]) -> None:
        arguments = ", ".join([*node.codegen_args(), *node.codegen_kwargs()])
        write_line(f"{node.get_name()} = {function}({arguments})")

    CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.{op}"] = CustomCodegen(python=write)


# Communication -------------------------------------------------------------------------------------------------------------


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank holds, and any other tensor itself.

    By its attribute: a DTensor's class takes a second to load, and `to_local()` returns an alias.
    """
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def set_local(dtensor: Tensor, local: Tensor) -> None:
    """Let a DTensor hold another tensor as this rank's part. FSDP2 itself does so where it pads a shard again."""
    dtensor._local_tensor = local


def first_of_local(dtensor: Any) -> tuple[int, ...]:
    """Return the indices of the first element that this rank holds of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(dtensor.shape, dtensor.device_mesh, dtensor.placements)
    return tuple(offset)


def keeping_versions(tensors: tuple[Tensor, ...]) -> AbstractContextManager[None]:
    """Return a context in which autograd does not count changes: what was freed is there again, as FSDP2 gathers it."""
    context: AbstractContextManager[None] = torch.autograd._unsafe_preserve_version_counter(tensors)
    return context


def flight_recorder_dumps() -> list[Callable[[bool, bool], str | bytes]]:
    """Return the functions that write the ring of recorded collectives as JSON: with NCCL, and in all builds since 2.12."""
    module: Any = getattr(torch._C, "_distributed_c10d", None)
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    return [getattr(module, name) for name in names if hasattr(module, name)]


def timeout_of_world() -> timedelta | None:
    """Return how long collectives of the default process group wait. None for torch's fake backend, which never waits."""
    world: Any = torch.distributed.group.WORLD
    options = world._get_backend(world._device_types[0]).options
    return None if options is None else options._timeout


def wait_for(tensor: Tensor) -> None:
    """Wait until a functional collective has written a tensor: `wait_tensor` of the functional collectives is its only name."""
    torch.ops._c10d_functional.wait_tensor(tensor)


def set_allocator(settings: str) -> None:
    """Set the allocator of the accelerator, in the words of PYTORCH_ALLOC_CONF. Before the device holds memory."""
    torch._C._accelerator_setAllocatorSettings(settings)
