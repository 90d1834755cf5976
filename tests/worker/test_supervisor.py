"""Ranks of one tensor group share a node: what the supervisor reserves, on a cluster of two nodes too."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from api_schemas import FailureReason, PoolConfig
from worker.supervisor import RankFailed, bundles_of, check_room, reserve

POOL = PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=6)
GPUS = POOL.model_copy(update={"name": "h100", "accelerator": "cuda"})
LONG_S = 60


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


@pytest.mark.system
def test_two_nodes_of_three_slots_get_one_tensor_group_of_two_each(tmp_path: Path) -> None:
    """Packed rank by rank, the first node would have the first three ranks, and the second group be apart."""
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.placement_group import placement_group_table

    options: dict[str, Any] = {"num_cpus": 1, "resources": {POOL.slot_resource: 3}, "labels": {"octet-pool": "cpu"}}
    head = options | {"include_dashboard": False, "temp_dir": str(tmp_path / "ray")}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**options)
        ray.init(address=cluster.address, log_to_driver=False)
        nodes_of_ranks = {}
        for num_together in (1, 2):
            group = reserve(POOL, 4, num_together)
            assert group.wait(LONG_S)
            table: dict[str, Any] = placement_group_table(group)
            homes = table["bundles_to_node_id"]
            nodes_of_ranks[num_together] = [homes[rank // num_together] for rank in range(4)]
            ray.util.remove_placement_group(group)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert sorted(Counter(nodes_of_ranks[1]).values()) == [1, 3]
    first, second, third, fourth = nodes_of_ranks[2]
    assert first == second != third == fourth
