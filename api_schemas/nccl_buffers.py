"""The memory that NCCL takes besides tensors, counted by communicator.

NCCL's all-to-all is a send and a receipt for each peer. Every channel between two GPUs of a node has buffers of its own, 10 MiB
where it arrives and 2 MiB where it leaves, however large the tensors are (NCCL 2.29.7, `src/transport/p2p.cc`). On 8 H100 it
takes 32 channels for each peer, and the first all-to-all took 3.28 GB (NCCL issue 1685). Between nodes all peers share buffers.
"""

from octet.api_schemas.layout import AxisName, Layout, ParallelismSpec

FIRST_BYTES = 1_060_000_000
"""NCCL with its part of CUDA's context in that issue, before the first all-to-all."""
CHANNEL_BYTES = 14_700_000
"""A channel's buffers for one peer: 3.28 GB for 7 peers at 32 channels."""
NUM_CHANNELS = 32
NUM_EXCHANGE_CHANNELS = 8
"""Channels of the communicator on which gradients are exchanged; a power of two, as NCCL rounds it up."""
NODE = 8
"""GPUs of a node, at most."""


def nccl_bytes(layout: Layout, parallelism: ParallelismSpec) -> int:
    """Return at most what NCCL takes on a rank: each communicator's rings, and the channels to peers on the rank's node.

    Exchanges of gradients have few channels. Those of tokens, keys and values have all, because a pass waits for them.
    """
    if layout.num_ranks == 1:
        return 0
    names: list[AxisName] = ["pipeline", "data", "context", "tensor", "stage"]
    names += ["replicas"] if layout.context > 1 else []
    names += ["expert", "expert_replicas"] if layout.expert > 1 else []
    num_replicas = layout.data * layout.context
    num_rings = sum(1 < len(layout.group(name, 0)) < layout.num_ranks for name in names)
    num_rings += parallelism.zero_stage == 3 and num_replicas > 1  # weights are gathered on a communicator of their own
    sending = layout.context, layout.tensor if parallelism.sequence else 1, min(layout.pipeline, 3), layout.expert
    num_channels = num_rings * NUM_CHANNELS  # a ring has one peer on either side
    num_channels += NUM_CHANNELS * sum(min(degree, NODE) - 1 for degree in sending)
    exchanging = num_replicas, num_replicas // layout.expert if layout.expert > 1 else 1
    num_channels += NUM_EXCHANGE_CHANNELS * sum(min(degree, NODE) - 1 for degree in exchanging)
    return FIRST_BYTES + num_channels * CHANNEL_BYTES
