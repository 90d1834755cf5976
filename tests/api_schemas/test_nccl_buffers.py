"""NCCL's memory is counted by communicator, and its channels as the published case shows."""

from typing import Any

import pytest

from octet.api_schemas.layout import Layout, ParallelismSpec
from octet.api_schemas.nccl_buffers import CHANNEL_BYTES, FIRST_BYTES, NUM_CHANNELS, NUM_EXCHANGE_CHANNELS, nccl_bytes

RING = NUM_CHANNELS * CHANNEL_BYTES


def taken(num_ranks: int, **parallelism: Any) -> int:
    spec = ParallelismSpec.model_validate(parallelism)
    return nccl_bytes(Layout(num_ranks, **spec.degrees), spec) - FIRST_BYTES


def test_a_channel_is_as_large_as_the_published_case_shows() -> None:
    assert pytest.approx(4.34e9, rel=0.01) == FIRST_BYTES + 7 * NUM_CHANNELS * CHANNEL_BYTES


def test_an_exchange_of_gradients_takes_a_quarter_of_it_on_a_node_of_eight() -> None:
    assert taken(8) == 7 * NUM_EXCHANGE_CHANNELS * CHANNEL_BYTES == 7 * RING // 4
    assert taken(2) == taken(8) // 7
    assert taken(4096) == taken(8), "between nodes the peers share buffers"
    assert taken(1) == -FIRST_BYTES, "a rank alone takes nothing"


@pytest.mark.parametrize(
    ("num_ranks", "parallelism", "num_rings", "num_peers", "num_replicas"),
    [
        (8, {"zero_stage": 3}, 1, 0, 8),
        (2, {"tensor": 2}, 0, 0, 1),
        (2, {"tensor": 2, "sequence": True}, 0, 1, 1),
        (8, {"tensor": 4, "sequence": True}, 2, 3, 2),
        (8, {"context": 4}, 2, 3, 8),
        (8, {"expert": 4}, 2, 3, 8 + 1),
        (8, {"expert": 8}, 0, 7, 8),
        (4, {"pipeline": 4}, 0, 2, 1),
        (16, {"pipeline": 2, "tensor": 4}, 4, 1, 2),
    ],
    ids=str,
)
def test_each_communicator_counts_once(
    num_ranks: int, parallelism: dict[str, Any], num_rings: int, num_peers: int, num_replicas: int
) -> None:
    """num_replicas: that exchange gradients; two that hold the same experts count as one more.

    Rings of what is smaller than the world; sends to all peers of sequence, context and experts, to both neighbours of a
    pipeline.
    """
    exchanged = (num_replicas - 1) * NUM_EXCHANGE_CHANNELS * CHANNEL_BYTES
    assert taken(num_ranks, **parallelism) == (num_rings + num_peers) * RING + exchanged
