"""Activations of compiled blocks, kept in FP8: the counterpart of `saved_activations.py` in graphs of torch.compile.

A compiled block has one joint graph of both passes, in which the backward ops read what autograd saves in an eager block. Each
activation among these values becomes E4M3 codes with a scale for each row, by the same kernel and the same rule as in eager
blocks; the backward pass reads codes times scale. Then torch cuts the graph where the least bytes cross, which are the codes.
So gradients have the bits of eager blocks, wherever the cut lies (with the backend aot_eager; Inductor rounds in other places).
Torch calls this extension point a custom partitioner (`torch._inductor.config.custom_partitioner_fn`).
"""

import operator
from collections.abc import Collection, Sequence
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
    inputs_with_gradient,
    schema_of,
    static_inputs,
    torchs_partition,
    uncompiled,
)

MIN_ROW_ELEMENTS = 16
"""A row has a scale of 4 bytes."""

WIDE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
aten = torch.ops.aten
_SAME_VALUES = {aten.detach.default, aten.alias.default}
_VIEWS_OF_WEIGHTS = _SAME_VALUES | {
    *(aten.t.default, aten.transpose.int, aten.view.default, aten.permute.default),
    *(aten._to_copy.default, torch.ops.prims.convert_element_type.default),
}
"""The same as in `saved_activations.py`, which names their nodes of autograd."""
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
    """Let activations cross a joint graph in FP8, and cut it as torch does. Returns the forward and the backward graph.

    num_fwd_outputs: results of the forward pass. static_lifetime_input_indices: of inputs that are parameters and buffers.
    """
    _round_what_crosses(joint, static_lifetime_input_indices or ())
    options = {"compiler": "inductor", "static_lifetime_input_indices": static_lifetime_input_indices, **options}
    graphs: Graphs = torchs_partition()(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)
    return graphs


def _round_what_crosses(joint: fx.GraphModule, static: Collection[int]) -> None:
    """Let the backward pass of a joint graph read each activation that autograd saves as codes times scale.

    The rest of the graph is exact, so whatever torch keeps, or computes again, has the values that it has in eager blocks.
    static: the indices of inputs that are parameters and buffers.
    """
    parameters = static_inputs(joint.graph, static)
    is_differentiated = _reached_from(joint.graph, inputs_with_gradient(joint.graph))
    nodes = list(joint.graph.nodes)
    last = max(index for index, node in enumerate(nodes) if node.meta.get("partitioner_tag") == "is_forward")
    place_in_backward = {node: index for index, node in enumerate(nodes[last + 1 :]) if node.op != "output"}
    for node in nodes[: last + 1]:
        users = sorted((user for user in node.users if user in place_in_backward), key=place_in_backward.__getitem__)
        if users and node in is_differentiated and not _is_of_parameter(node, parameters) and _is_activation(node):
            values = _dequantized(users[0], node, _quantized(node))
            for user in users:
                user.replace_input_with(node, values)
    joint.graph.lint()
    joint.recompile()


def has_long_rows(saved: Tensor) -> bool:
    """Return whether a tensor is wide, and its rows are long enough for a scale each."""
    if saved.dtype not in WIDE_DTYPES or saved.dim() < 2 or 0 in saved.stride():
        return False
    return saved.shape[order_in_memory(saved)[-1]] >= MIN_ROW_ELEMENTS


def order_in_memory(saved: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor from the outermost in memory to the one whose elements are neighbours."""
    strides = saved.stride()
    return tuple(sorted(range(saved.dim()), key=lambda dim: -strides[dim]))


def _reached_from(graph: fx.Graph, inputs: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes of a graph that depend on one of these inputs, and the inputs."""
    found = set(inputs)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _is_of_parameter(node: fx.Node, parameters: set[fx.Node]) -> bool:
    """Return True if a node is a parameter, viewed or cast."""
    while node not in parameters and node.target in _VIEWS_OF_WEIGHTS:
        node = node.all_input_nodes[0]
    return node in parameters


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


def _dequantized(first_reader: fx.Node, saved: fx.Node, kept: tuple[fx.Node, fx.Node]) -> fx.Node:
    """Decode an activation in the backward pass, before its first reader. kept: its codes and scale."""
    graph, value = saved.graph, saved.meta["val"]
    with graph.inserting_before(first_reader):
        values = _call(graph, torch.ops.prims.convert_element_type.default, kept[0], torch.float32)
        nodes = [values, values := _call(graph, aten.mul.Tensor, values, kept[1])]
        if value.dtype != torch.float32:
            nodes.append(values := _call(graph, torch.ops.prims.convert_element_type.default, values, value.dtype))
        dims = order_in_memory(value)
        nodes.append(values := _call(graph, aten.permute.default, values, sorted(range(len(dims)), key=dims.__getitem__)))
    for node in nodes:
        node.meta["partitioner_tag"] = "must_be_in_backward"
    return values


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
