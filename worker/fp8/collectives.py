"""Find the arguments that a collective of torch.distributed writes; its schema does not declare them.

`c10d::allreduce_(Tensor[] tensors, …)` changes its tensors, but its schema declares no `(a!)`. A
tensor subclass that decodes its arguments for an op without a rule would therefore run the
collective on a copy and drop the result. `gradient.py` looks up here which arguments to encode
again, and waits until the collective has written them.
"""

from typing import Any

import torch

from octet.worker.kernels.torch_private import schema_of, wait_for

NAMESPACES = ("c10d", "_c10d_functional")

WRITES_FIRST_ARGUMENT = frozenset(
    (
        *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"),
        *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
        *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
        *("gather_", "scatter_", "alltoall_", "alltoall_base_"),
    )
)
WRITES_NOTHING = frozenset(("send", "barrier", "monitored_barrier_", "check_for_nan", "isend", "wait_tensor"))
# A receive may return before the data has arrived, so there is nothing to encode yet. Waiting
# inside it would deadlock two ranks that both receive first and then send.
RECEIVES = frozenset(("recv_", "recv_any_source_", "irecv", "batch_p2p_ops"))


def is_collective(func: Any) -> bool:
    """Return True if an op belongs to torch.distributed."""
    return func.namespace in NAMESPACES


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that a collective writes into.

    Raises NotImplementedError for a receive and for a collective that is not known here.
    """
    name = schema_of(func).name.split("::")[1]
    if name in RECEIVES:
        raise NotImplementedError(
            f"{name} receives into a gradient held in FP8; allowed: all collectives, and sends. Receive into "
            "torch.empty(gradient.shape) and use gradient.copy_(received) after it has arrived."
        )
    if name in WRITES_FIRST_ARGUMENT:
        return [args[0]]
    if name in WRITES_NOTHING:
        return []
    if func.namespace == "_c10d_functional":  # these declare what they write
        return [
            args[place] if place < len(args) else kwargs.get(argument.name)
            for place, argument in enumerate(schema_of(func).arguments)
            if argument.is_write
        ]
    raise NotImplementedError(
        f"{func} got a gradient held in FP8, and what this op writes is not known; allowed: all_reduce, broadcast, "
        "reduce, all_gather, reduce_scatter, all_to_all, gather, scatter, their coalesced forms, and send. Use "
        "octet.parallelize, or run it on values = gradient.dequantize() and call gradient.copy_(values)."
    )


def wait(result: Any) -> None:
    """Wait until a collective has written: on CUDA the current stream waits, and the host goes on."""
    for part in result if isinstance(result, tuple | list) else (result,):
        if isinstance(part, torch.ScriptObject):
            torch.distributed.Work.unbox(part).wait()
        elif isinstance(part, torch.Tensor):
            wait_for(part)
        elif isinstance(part, list):
            wait(part)
