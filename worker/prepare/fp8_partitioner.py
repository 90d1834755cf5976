"""Activations of compiled blocks, kept in FP8: the counterpart of `saved_activations.py` in graphs of torch.compile.

A compiled block decides itself what its backward pass reads: torch's partitioner cuts the joint graph of both passes where the
least bytes cross. What crosses and is an activation then leaves the forward graph as E4M3 codes with a scale for each row, by
the same kernel as in eager blocks, and the backward graph begins with codes times scale, which the compiler joins with what
reads them. Torch calls this extension point a custom partitioner (`torch._inductor.config.custom_partitioner_fn`).
"""

import operator
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from octet.worker.kernels.formats import E4M3
from octet.worker.kernels.scales import ScaleKind
from octet.worker.kernels.torch_private import (
    OpOverload,
    eager_backend,
    inductor_partitioner,
    schema_of,
    torchs_partition,
    uncompiled,
)

MIN_ROW_ELEMENTS = 16
"""A row has a scale of 4 bytes."""

WIDE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
aten = torch.ops.aten
_SAME_VALUES = {aten.detach.default, aten.alias.default}
Graphs = tuple[fx.GraphModule, fx.GraphModule]


def partitioned_in_fp8(backend: str) -> dict[str, Any]:
    """Return the arguments of torch.compile for a block that keeps its activations in FP8: backend and options.

    Raises ValueError for a backend without an option for the partitioner.
    """
    if backend == "inductor":
        return {"backend": backend, "options": {"custom_partitioner_fn": _inductors()}}
    if backend == "aot_eager":
        return {"backend": eager_backend(uncompiled, partition)}
    raise ValueError(
        f"activations in FP8 got the backend {backend!r} for compiled blocks; allowed: inductor, aot_eager, which let us say "
        "what the backward pass is given. Use one of these, or do not call keep_activations_in_fp8."
    )


@cache
def _inductors() -> Any:
    """Return the partitioner as Inductor takes it, made once: Inductor compares it with that of an earlier graph."""
    return inductor_partitioner(partition, (__file__,))


def partition(
    joint: fx.GraphModule,
    joint_inputs: Sequence[object],
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None = None,
    **options: Any,
) -> Graphs:
    """Cut a joint graph as torch does, and let activations cross in FP8. Returns the forward and the backward graph.

    num_fwd_outputs: results of the forward pass. static_lifetime_input_indices: the inputs that are parameters and buffers.
    """
    static = set(static_lifetime_input_indices or ())
    inputs = [node.name for node in joint.graph.find_nodes(op="placeholder") if "tangents" not in node.name]
    changing = {name for index, name in enumerate(inputs) if index not in static}
    gradients = _results(joint)[num_fwd_outputs:]
    differentiated = {name for name, gradient in zip(inputs, gradients, strict=True) if gradient is not None}
    options = {"compiler": "inductor", "static_lifetime_input_indices": static_lifetime_input_indices, **options}
    forward, backward = torchs_partition()(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)
    depends, is_differentiated = _reached_from(forward.graph, changing), _reached_from(forward.graph, differentiated)
    received = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    results = _results(forward)
    kept: list[Any] = results[:num_fwd_outputs]
    for node in results[num_fwd_outputs:]:
        if node in depends and node in is_differentiated and received[node.name].users and _is_activation(node):
            parts = _quantized(node)
            _dequantize(received[node.name], parts)
            kept.extend(parts)
        else:
            kept.append(node)
    output = forward.graph.output_node()
    output.args = (tuple(kept),)
    output.meta.pop("desc", None)  # it describes each result
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()
    return forward, backward


def _results(module: fx.GraphModule) -> list[Any]:
    results: Any = module.graph.output_node().args[0]
    return list(results)


def has_long_rows(saved: Tensor) -> bool:
    """Return whether a tensor is wide, and its rows are long enough for a scale each."""
    if saved.dtype not in WIDE_DTYPES or saved.dim() < 2 or 0 in saved.stride():
        return False
    return saved.shape[order_in_memory(saved)[-1]] >= MIN_ROW_ELEMENTS


def order_in_memory(saved: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor from the outermost in memory to the one whose elements are neighbours."""
    strides = saved.stride()
    return tuple(sorted(range(saved.dim()), key=lambda dim: -strides[dim]))


def _reached_from(graph: fx.Graph, inputs: Iterable[str]) -> set[fx.Node]:
    """The nodes of a graph that depend on one of the inputs with these names."""
    names = set(inputs)
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if (node.op == "placeholder" and node.name in names) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _is_activation(node: fx.Node) -> bool:
    """Return whether a saved tensor is kept in FP8, by the rule of `saved_activations.py`: long rows, and no statistic."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and has_long_rows(value) and not _is_statistic(node)


def _is_statistic(node: fx.Node) -> bool:
    """Return whether a node is a further result of an op, such as attention's log-sum-exp, or a view of one."""
    while node.op == "call_function" and (node.target in _SAME_VALUES or _is_view(node) or node.target is operator.getitem):
        source: Any = node.args[0]
        if node.target is operator.getitem and not _is_view(source) and node.args[1] != 0:
            return len(schema_of(source.target).returns) > 1  # a list of parts is one result
        node = source
    return False


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view


def _quantized(saved: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Quantize a saved activation in the forward graph, as soon as it is there. Returns its codes and scale."""
    graph = saved.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first) if saved.op == "placeholder" else graph.inserting_after(saved):
        rows = _call(graph, aten.permute.default, saved, list(order_in_memory(saved.meta["val"])))
    with graph.inserting_after(rows):
        quantized = _call(graph, torch.ops.octet.quantize.default, rows, E4M3.dtype, ScaleKind.ROW.value, 0, None)
    with graph.inserting_after(quantized):
        codes = _call(graph, operator.getitem, quantized, 0)
    with graph.inserting_after(codes):
        return codes, _call(graph, operator.getitem, quantized, 1)


def _dequantize(received: fx.Node, kept: tuple[fx.Node, fx.Node]) -> None:
    """Let the backward graph take codes and scale in the place of an activation, and decode them before its first reader."""
    graph, value = received.graph, received.meta["val"]
    marks = {key: mark for key, mark in received.meta.items() if key == "saved_tensor_with_no_vc_check"}
    with graph.inserting_before(received):
        codes, dequant_scale = (graph.placeholder(f"{received.name}_{part}") for part in ("codes", "dequant_scale"))
    for placeholder, part in zip((codes, dequant_scale), kept, strict=True):
        placeholder.meta = {"val": part.meta["val"], **marks}
    order = {node: index for index, node in enumerate(graph.nodes)}
    with graph.inserting_before(min(received.users, key=order.__getitem__)):
        wide = _call(graph, torch.ops.prims.convert_element_type.default, codes, torch.float32)
        wide = _call(graph, aten.mul.Tensor, wide, dequant_scale)
        if value.dtype != torch.float32:
            wide = _call(graph, torch.ops.prims.convert_element_type.default, wide, value.dtype)
        dims = order_in_memory(value)
        values = _call(graph, aten.permute.default, wide, sorted(range(len(dims)), key=dims.__getitem__))
    received.replace_all_uses_with(values)
    graph.erase_node(received)


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """Add a call to a graph, with the shapes that the compiler needs of its result."""
    node = graph.call_function(target, args)
    given = [argument.meta["val"] if isinstance(argument, fx.Node) else argument for argument in args]
    fake_mode = next((value.fake_mode for value in given if hasattr(value, "fake_mode")), None)
    if fake_mode is None:  # a result of an op with several
        node.meta["val"] = target(*given)
    else:
        with fake_mode:
            node.meta["val"] = target(*given)
    return node
