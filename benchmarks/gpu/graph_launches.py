"""Count what compiled blocks launch on a GPU, without one: Inductor's passes and fusion run, and nothing is generated.

    python -m benchmarks.gpu.graph_launches [--families gpt llama] [--levels te O2 delayed] [--saved-activations fp8]

Inductor is told that the CPU is a Hopper GPU, for which it writes Triton, and decides what to join as it does there. Each
kernel that it would write counts as one launch, and so does each op of torch that it calls; of our own ops each Triton kernel
counts. Bytes are counted as by `launches.py`. Compiled graphs return tensors with arbitrary content.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dynamo.utils import detect_fake_mode
from torch._inductor import compile_fx, config, scheduler, utils
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes import post_grad
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from triton import knobs

from benchmarks.gpu import fake_gpu
from benchmarks.gpu.launches import CASES, HIDDEN, TOKENS, Launches, block_of, count
from worker import kernels
from worker.fp8.accelerator import cpu_as_accelerator
from worker.kernels.cuda import gemm
from worker.saved_in_graphs import partitioned_in_fp8

HOPPER = DeviceProperties(
    type="cpu", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
)  # fmt: skip
FAMILIES = ("gpt", "llama")
LEVELS = {"delayed" if recipe else level: (level, recipe) for level, recipe in CASES}


class GraphCounter:
    """A backend of torch.compile whose graphs, each time that they are called, count what they would launch."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.launches, self.options = Launches(), options

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with _as_gpu(), config.patch(self.options):
            return compile_fx.compile_fx(module, inputs, inner_compile=self._compile)

    def add(self, launches: Iterable[tuple[str, int]]) -> None:
        """Count launches, of which each is told by its name and the bytes of activations that it moves."""
        for name, num_bytes in launches:
            self.launches.by_name[name] += 1
            self.launches.num_bytes += num_bytes

    def _compile(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        is_inference: bool = False,
        is_backward: bool = False,
        **_options: Any,
    ) -> Callable[[list[Any]], list[Any]]:
        fake_mode = detect_fake_mode(inputs)
        assert fake_mode is not None
        with ExitStack() as stack:
            for context in (_as_gpu(), V.set_fake_mode(fake_mode), V.set_debug_handler(DebugContext())):
                stack.enter_context(context)
            compile_fx.record_original_output_strides(module)
            compile_fx._recursive_post_grad_passes(module, is_inference=is_inference)
            results = [_meta(part) for part in module.graph.find_nodes(op="output")[0].args[0]]
            graph = GraphLowering(module, example_inputs=inputs, is_inference=is_inference, is_backward=is_backward)
            for context in (V.set_graph_handler(graph), V.set_extern_kernel_nodes([])):
                stack.enter_context(context)
            graph.run(*inputs)
            graph._update_scheduler()
            found = [launch for node in graph.scheduler.nodes for launch in _launches_of(node, graph, fake_mode)]

        def run(arguments: list[Any]) -> list[Any]:
            arguments.clear()
            self.add(found)
            return [_empty_like(part) if isinstance(part, Tensor) else part for part in results]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


@contextmanager
def _as_gpu() -> Iterator[None]:
    """Inside, Inductor takes the CPU for a Hopper GPU."""
    with config.patch(cpu_backend="triton"), ExitStack() as stack:
        for owner, name, replacement in (
            (utils, "GPU_TYPES", [*utils.GPU_TYPES, "cpu"]),
            (DeviceProperties, "create", lambda _device: HOPPER),
            (scheduler.Scheduler, "create_backend", lambda made, _device: TritonScheduling(made)),
            (post_grad, "move_constructors_to_gpu", lambda _graph: None),  # it asks for the one GPU that is there
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def _launches_of(node: Any, graph: GraphLowering, fake_mode: Any) -> list[tuple[str, int]]:
    """The names of the launches of a node of the schedule, and the bytes of activations that each moves."""
    if isinstance(node, scheduler.NopKernelSchedulerNode) or isinstance(getattr(node, "node", None), MultiOutput):
        return []
    if isinstance(node, scheduler.ExternKernelSchedulerNode):
        origins = [origin for origin in node.node.get_origins() if origin.target is node.node.op_overload]
        return _launches_of_op(origins[-1], fake_mode)
    moved = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    return [("kernel", sum(size for name, size in moved.items() if graph.get_numel(name) >= TOKENS * HIDDEN))]


def _launches_of_op(origin: fx.Node, fake_mode: Any) -> list[tuple[str, int]]:
    """The same of an op that the graph calls: one of torch's, or one of ours, whose host code runs on fake tensors."""
    args, options = tree_map_only(fx.Node, _meta, (origin.args, origin.kwargs))
    return _count(lambda: origin.target(*args, **options), fake_mode)  # type: ignore[operator]


def _count(work: Callable[[], Any], fake_mode: Any) -> list[tuple[str, int]]:
    """The launches of what is called with fake tensors."""
    found: list[tuple[str, int]] = []
    note = mock.patch.object(Launches, "_count", lambda launches, name, given: found.append((name, launches.bytes_of(given))))
    with note, fake_mode, mock.patch.object(Tensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata):
        count(work)
    return found


def _meta(node: Any) -> Any:
    return node.meta["val"] if isinstance(node, fx.Node) else node


def _empty_like(result: Tensor) -> Tensor:
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="cpu")


def compiled_block(family: str, level: str, recipe: dict[str, object], saved_activations: str = "exact") -> Launches:
    """Count the second forward and backward pass of one compiled block of a GPT or a Llama; its residual stream is fp32."""
    options = partitioned_in_fp8("inductor")["options"] if saved_activations == "fp8" else {}
    if knobs.runtime.interpret:
        raise RuntimeError("Triton is set to interpret kernels, but here kernels must not run. Unset TRITON_INTERPRET.")
    fake_gpu.device()  # our ops run as on a device
    torch.compiler.reset()
    with cpu_as_accelerator(), mock.patch.object(gemm, "platform", return_value=(fake_gpu.HOPPER, fake_gpu.CUDA_VERSION)):
        model, given = block_of(family, level, recipe)
        model.compile(dynamic=False, backend=(counter := GraphCounter(options)), fullgraph=True)
        gradient = torch.empty_like(given[0])
        model(*given).backward(gradient)
        for tensor in (given[0], *model.parameters()):
            tensor.grad = None
        counter.launches = Launches()
        with mock.patch.object(kernels, "quantize_gradient", partial(_quantize_gradient, counter)):
            model(*given).backward(gradient)
    return counter.launches


def _quantize_gradient(counter: GraphCounter, gradient: Tensor, *how: Any, run: Any = kernels.quantize_gradient) -> Any:
    """What the hook of a parameter calls, outside of the graph."""
    with FakeTensorMode() as fake_mode:
        launches = _count(lambda: run(torch.empty(gradient.shape, dtype=gradient.dtype), *how), fake_mode)
    counter.add(launches)
    return run(gradient, *how)


def main() -> None:
    """Print the counts of each family at each level."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=[*LEVELS], help="delayed: O2 with delayed scaling")
    parser.add_argument("--saved-activations", choices=("exact", "fp8"), default="exact", help="what a block keeps")
    options = parser.parse_args()
    for family, name in product(options.families, options.levels):
        level, recipe = LEVELS[name]
        found = compiled_block(family, level, recipe, options.saved_activations)
        moved = f"{found.by_name.total()} launches, {found.num_bytes / 1e9:.3f} GB of activations"
        sys.stdout.write(f"compiled block of {family}, {level} {recipe or ''}: {moved}\n  {dict(found.by_name)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
