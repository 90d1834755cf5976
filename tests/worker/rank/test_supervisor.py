"""Ranks of one tensor group share a node: what the supervisor reserves, and what it says of nodes that are too small."""

import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octet.api_schemas import FailureReason, FinishedReport, PoolConfig
from octet.worker.common.config import RankEnv
from octet.worker.rank.main import is_reported
from octet.worker.rank.supervisor import (
    RankFailed,
    RankNode,
    bundles_of,
    check_room,
    describe_lost,
    hold_port,
    ranks_of_lost_nodes,
)

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


NODE_IDS = ("a" * 56, "b" * 56, "c" * 56)


@given(st.lists(st.sampled_from(NODE_IDS), min_size=1, max_size=8), st.dictionaries(st.sampled_from(NODE_IDS), st.booleans()))
def test_ranks_are_lost_with_the_nodes_that_ray_holds_for_dead_or_does_not_list(
    ids: list[str], is_alive: dict[str, bool]
) -> None:
    ranks = [RankNode(node_id, "192.0.2.1", 1, {}, 1) for node_id in ids]
    listed = [{"NodeID": node_id, "Alive": alive} for node_id, alive in is_alive.items()]
    assert ranks_of_lost_nodes(ranks, listed) == [rank for rank, node_id in enumerate(ids) if not is_alive.get(node_id, False)]


def test_a_lost_node_is_named_once_with_all_of_its_ranks() -> None:
    ranks = [RankNode(node_id, f"192.0.2.{node_id[0]}", 1, {}, 1) for node_id in ("1" * 56, "1" * 56, "2" * 56, "2" * 56)]
    assert describe_lost([2, 3], ranks) == "lost from the cluster: 192.0.2.2 (22222222), with ranks 2, 3 of 4"
    assert describe_lost([1], ranks) == "lost from the cluster: 192.0.2.1 (11111111), with rank 1 of 4"


@pytest.mark.parametrize(
    ("outcome", "reason", "rank", "num_nodes", "reports"),
    [
        ("succeeded", None, 0, 2, True),
        ("succeeded", None, 1, 2, False),
        ("failed", FailureReason.DIVERGED, 1, 2, True),
        ("failed", FailureReason.WORKER_LOST, 0, 1, True),
        ("failed", FailureReason.WORKER_LOST, 0, 2, False),
    ],
)
def test_ranks_on_several_nodes_leave_it_to_the_supervisor_why_others_are_gone(
    outcome: Any, reason: FailureReason | None, rank: int, num_nodes: int, reports: bool
) -> None:
    env = RankEnv(rank=rank, world_size=2, num_nodes=num_nodes)
    assert is_reported(FinishedReport(outcome=outcome, reason=reason), env) is reports
