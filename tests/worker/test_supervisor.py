"""Ranks of one tensor group share a node: what the supervisor reserves, and what it says of nodes that are too small."""

from typing import Any

import pytest

from api_schemas import FailureReason, PoolConfig
from worker.supervisor import RankFailed, bundles_of, check_room

POOL = PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=6)
GPUS = POOL.model_copy(update={"name": "h100", "accelerator": "cuda"})


def node(slots: int, label: str = "cpu", *, is_alive: bool = True) -> dict[str, Any]:
    """A node as `ray.nodes` lists it."""
    return {"Alive": is_alive, "Labels": {"octet-pool": label}, "Resources": {POOL.slot_resource: slots}}


def test_a_bundle_holds_the_ranks_of_one_tensor_group() -> None:
    assert bundles_of(POOL, 4, 1) == [{"octet_slot_cpu": 1.0}] * 4
    assert bundles_of(POOL, 4, 2) == [{"octet_slot_cpu": 2.0}] * 2
    assert bundles_of(GPUS, 8, 8) == [{"octet_slot_h100": 8.0, "GPU": 8.0}]


def test_a_tensor_group_that_no_node_has_slots_for_is_refused_with_the_largest_node() -> None:
    check_room(POOL, 4, [node(2), node(4)])
    with pytest.raises(RankFailed, match="the largest node of pool cpu has 2 slots") as refused:
        check_room(POOL, 4, [node(2), node(8, "other"), node(8, is_alive=False)])
    assert refused.value.reason is FailureReason.LAUNCH_FAILED
    with pytest.raises(RankFailed, match="has 0 slots"):
        check_room(POOL, 2, [])
