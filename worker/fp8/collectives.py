"""Run a collective of torch.distributed on arguments that hold codes, and encode what it has written.

`c10d::allreduce_(Tensor[] tensors, …)` changes its tensors, but its schema declares no `(a!)`. A
tensor subclass that decodes its arguments for an op without a rule would therefore run the
collective on a copy and drop the result. So the arguments that an op writes are a table here. A
collective that is not in it is refused by name.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octet.worker.kernels.torch_private import schema_of, tree_leaves, tree_map, tree_map_only, wait_for

NAMESPACES = ("c10d", "_c10d_functional", "symm_mem")

WRITES_FIRST_ARGUMENT = frozenset(
    (
        *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"),
        *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
        *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
        *("gather_", "scatter_", "alltoall_", "alltoall_base_"),
        *("all_reduce_", "all_reduce_coalesced_"),
    )
)
WRITES_OUT = frozenset(("all_gather_into_tensor_out", "reduce_scatter_tensor_out"))
WRITES_NOTHING = frozenset(
    (
        *("send", "barrier", "monitored_barrier_", "check_for_nan", "isend", "wait_tensor", "broadcast"),
        *("all_reduce", "all_reduce_coalesced", "all_gather_into_tensor", "all_gather_into_tensor_coalesced"),
        *("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_to_all_single"),
    )
)
# A receive may return before the data has arrived, so there is nothing to encode yet. Waiting
# inside it would deadlock two ranks that both receive first and then send.
RECEIVES = frozenset(("recv_", "recv_any_source_", "irecv", "batch_p2p_ops"))
KNOWN = WRITES_FIRST_ARGUMENT | WRITES_OUT | WRITES_NOTHING | RECEIVES
"""Names of ops without their namespace: c10d and _c10d_functional use none in two meanings."""

Decode = Callable[[Any], Any]
Encode = Callable[[Any], None]


def is_collective(func: Any) -> bool:
    """Return True if an op belongs to torch.distributed."""
    return func.namespace in NAMESPACES


def run_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], decode: Decode, encode: Encode) -> Any:
    """Run a collective on values, wait until it has written, and encode again what it has written.

    decode: returns the values of an argument that holds codes, and any other argument itself. It is
    called once for each argument. encode: stores the values, which `decode` has returned and the
    collective has changed, in such an argument. A result that is values of an argument becomes that
    argument. A handle of `async_op=True` is complete when it is returned; on CUDA the stream has
    waited and not the host.
    Raises NotImplementedError for a receive and for a collective that is not known here.
    """
    written = tree_leaves(written_by(func, args, kwargs))
    decoded: dict[int, tuple[Any, Any]] = {}
    """Arguments that hold codes, by id, with their values."""

    def values_of(argument: Any) -> Any:
        if id(argument) not in decoded:
            values = decode(argument)
            if values is argument:
                return argument
            decoded[id(argument)] = argument, values
        return decoded[id(argument)][1]

    result = func(*tree_map(values_of, args), **tree_map(values_of, kwargs))
    encoded = {id(argument): argument for argument in written if id(argument) in decoded}
    if encoded:
        _wait(result)
    for argument in encoded.values():
        encode(argument)
    origins = {id(values): argument for argument, values in decoded.values()}
    return tree_map_only(Tensor, lambda tensor: origins.get(id(tensor), tensor), result)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that a collective writes into.

    Raises NotImplementedError for a receive and for a collective that is not known here.
    """
    name = schema_of(func).name.split("::")[1]
    if name in RECEIVES:
        raise NotImplementedError(
            f"{name} receives into a tensor held in FP8; allowed: all collectives, and sends. Receive into "
            "received = torch.empty(tensor.shape) and use tensor.copy_(received) after it has arrived."
        )
    if func.namespace == "symm_mem" or name not in KNOWN:
        raise NotImplementedError(
            f"{func} got a tensor held in FP8, and what this op writes is not known; allowed: all_reduce, broadcast, "
            "reduce, all_gather, reduce_scatter, all_to_all, gather, scatter, their coalesced and functional forms, and "
            "send. Use octet.parallelize, or run it on values = tensor + 0, which is plain, and use tensor.copy_(values)."
        )
    if name in WRITES_OUT:
        return [kwargs["out"]]
    return [args[0]] if name in WRITES_FIRST_ARGUMENT else []


def _wait(result: Any) -> None:
    """Wait until a collective has written: on CUDA the current stream waits, and the host goes on."""
    for part in result if isinstance(result, tuple | list) else (result,):
        if isinstance(part, torch.ScriptObject):
            torch.distributed.Work.unbox(part).wait()
        elif isinstance(part, Tensor):
            wait_for(part)
        elif isinstance(part, list):
            _wait(part)
