"""Ranks of one tensor group share a node: what the supervisor reserves, and what it says of nodes that are too small."""

import socket
from typing import Any

import pytest

from octet.api_schemas import FailureReason, PoolConfig
from octet.worker.rank.supervisor import RankFailed, bundles_of, check_room, hold_port

POOL = PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=6)
GPUS = POOL.model_copy(update={"name": "h100", "accelerator": "cuda"})


def node(slots: int, label: str = "cpu", *, is_alive: bool = True) -> dict[str, Any]:
    """A node as `ray.nodes` lists it."""
    return {"Alive": is_alive, "Labels": {"octet-pool": label}, "Resources": {POOL.slot_resource: slots}}


def test_a_bundle_holds_the_ranks_of_one_tensor_group() -> None:
    assert bundles_of(POOL, 4, 1) == [{"octet_slot_cpu": 1.0}] * 4
    assert bundles_of(POOL, 4, 2) == [{"octet_slot_cpu": 2.0}] * 2
    assert bundles_of(GPUS, 8, 8) == [{"octet_slot_h100": 8.0, "GPU": 8.0}]


def test_tensor_groups_that_the_nodes_have_no_slots_for_are_refused_with_what_there_is() -> None:
    check_room(POOL, 4, 4, [node(2), node(4)])
    with pytest.raises(RankFailed, match="have 2 slots, room for 0 of 1 groups") as refused:
        check_room(POOL, 4, 4, [node(2), node(8, "other"), node(8, is_alive=False)])
    assert refused.value.reason is FailureReason.LAUNCH_FAILED
    with pytest.raises(RankFailed, match="have no slots, room for 0 of 2 groups"):
        check_room(POOL, 4, 2, [])


def test_slots_that_straddle_nodes_are_room_for_no_group() -> None:
    check_room(POOL, 4, 2, [node(3), node(3)])
    with pytest.raises(RankFailed, match="have 3, 3 slots, room for 2 of 3 groups"):
        check_room(POOL, 6, 2, [node(3), node(3)])


def test_ranks_whose_node_has_gone_are_given_back() -> None:
    """So that an elastic job goes on with fewer ranks, and does not wait for the node until its start times out."""
    with pytest.raises(RankFailed, match="have 2 slots, room for 2 of 4 ranks: nodes have gone"):
        check_room(POOL, 4, 1, [node(2), node(2, is_alive=False)])


def test_the_port_where_ranks_meet_is_kept_for_the_first_of_them() -> None:
    with hold_port("127.0.0.1") as holder:
        address = holder.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with socket.create_server(address) as server, socket.create_connection(address):
            server.accept()[0].close()
