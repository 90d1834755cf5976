"""Collectives over the axes of a mesh of real ranks (gloo): the ranks of each axis, the results, the counted bytes."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from octet.api_schemas import Layout
from octet.api_schemas.nccl_buffers import NUM_EXCHANGE_CHANNELS
from octet.worker.common.config import RankEnv
from octet.worker.mesh import Axis, Mesh, axes, bound_exchange, twin_of
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks

LAYOUT = Layout(4, tensor=2)  # ranks (0, 1) and (2, 3) share layers, (0, 2) and (1, 3) average gradients


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    env = RankEnv(rank=rank, world_size=4, master_port=port)
    with Mesh(env, torch.device("cpu"), LAYOUT) as mesh:
        own = torch.full((3,), float(rank))
        codes = torch.arange(8, dtype=torch.float32).add(10 * rank).to(torch.float8_e4m3fn).view(2, 4)
        found = {
            "sizes": [mesh.world.size, mesh.pipeline.size, mesh.data.size, mesh.tensor.size, mesh.stage.size],
            "sums": [mesh.world.sum(rank)[0], mesh.data.sum(rank)[0], mesh.tensor.sum(rank)[0], mesh.stage.sum(rank)[0]],
            "max": mesh.data.max_(torch.tensor([float(rank), torch.nan if rank == 3 else 0.0])),
            "gathered": mesh.tensor.start_gather(own).wait(),
            "exchanged": mesh.data.start_exchange(codes).wait().float(),
            "broadcast": mesh.data.broadcast_(own.clone()),
            "roles": [mesh.reports, mesh.owns_loss],
            "sent": dict(mesh.sent_bytes),
        }
        into = torch.zeros(2, 3, 2, dtype=torch.bfloat16)
        share = torch.arange(6.0).add(10 * rank).view(2, 3).t().bfloat16()  # not contiguous
        with mock.patch.object(dist, "all_gather", side_effect=AssertionError("a list of views")):
            pending = mesh.tensor.start_gather(share, into)
        found |= {"is_into": pending.wait() is into, "share": share, "into": into}
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("mesh")
    run_ranks(work, (free_port(), str(folder)), 4)
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


def test_axes_have_the_ranks_of_the_layout(results: list[dict[str, object]]) -> None:
    assert [result["sizes"] for result in results] == [[4, 1, 2, 2, 4]] * 4
    assert [result["sums"] for result in results] == [[6, 2, 1, 6], [6, 4, 1, 6], [6, 2, 5, 6], [6, 4, 5, 6]]


def test_nan_wins_a_maximum_on_every_rank(results: list[dict[str, object]]) -> None:
    assert [result["max"].tolist() for result in results] == [[2, 0], [3, torch.inf], [2, 0], [3, torch.inf]]  # type: ignore[attr-defined]


def test_tensors_arrive_by_rank(results: list[dict[str, object]]) -> None:
    assert torch.equal(results[3]["gathered"], torch.tensor([[2.0] * 3, [3.0] * 3]))  # type: ignore[arg-type]
    wide = [torch.arange(8, dtype=torch.float32).add(10 * rank).view(2, 4) for rank in range(4)]
    sent = [values.to(torch.float8_e4m3fn).float() for values in wide]
    assert torch.equal(results[2]["exchanged"], torch.stack((sent[0][1], sent[2][1])))  # type: ignore[arg-type]
    assert [result["broadcast"][0].item() for result in results] == [0, 1, 0, 1]  # type: ignore[index]


def test_a_gather_writes_one_tensor(results: list[dict[str, object]]) -> None:
    """NCCL gathers a list of views into memory of its own, and copies."""
    assert all(result["is_into"] for result in results)
    for first in (0, 2):
        shares = torch.stack([result["share"] for result in results[first : first + 2]])  # type: ignore[misc]
        for result in results[first : first + 2]:
            assert torch.equal(result["into"], shares)  # type: ignore[arg-type]


def test_one_rank_reports_and_one_of_each_tensor_group_owns_the_loss(results: list[dict[str, object]]) -> None:
    assert [result["roles"] for result in results] == [[True, True], [False, False], [False, True], [False, False]]


def test_bytes_are_counted_by_the_dtype_that_they_mean(results: list[dict[str, object]]) -> None:
    """Each of two ranks sends half of an exchange, its own share of a gather, a maximum twice; rank 0 sends the broadcast."""
    sums = {("sum", "float64"): 2 * 12 + 2 * 8}  # one number on each axis: two axes have 4 ranks, two have 2
    common = {("exchange", "float8_e4m3fn"): 4, ("gather", "float32"): 12, ("max", "float32"): 8, **sums}
    assert results[2]["sent"] == common
    assert results[0]["sent"] == common | {("broadcast", "float32"): 12}


def test_a_mesh_of_one_needs_no_group(tmp_path: Path) -> None:
    with Mesh(RankEnv(), torch.device("cpu")) as mesh:
        values = torch.tensor([1.0, torch.nan])
        assert mesh.data.sum(2.0, 3.0) == [2.0, 3.0]
        assert mesh.data.start_gather(values).wait().shape == (1, 2)
        assert mesh.data.start_exchange(values.view(1, 2)).wait().data_ptr() == values.data_ptr()
        assert mesh.stage.max_(values).tolist() == [1.0, torch.inf]
        assert mesh.reports
        assert mesh.owns_loss
        assert not mesh.sent_bytes


def test_nccl_connects_every_group_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch connects groups at once if the default group has a device, and otherwise in their first collective."""
    for variable in ("TORCH_NCCL_TRACE_BUFFER_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "lo" if variable.endswith("IFNAME") else "0")  # the mesh would set them for good
    for variable in ("NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_GRAPH_REGISTER"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    device = torch.device("cuda", 1)
    for backend, where, expected in (("nccl", device, device), ("gloo", torch.device("cpu"), None)):
        mesh = Mesh(RankEnv(world_size=2, master_port=free_port()), where)
        with (
            mock.patch.object(torch.distributed, "TCPStore"),
            mock.patch.object(dist, "init_process_group", side_effect=InterruptedError) as made,
            pytest.raises(InterruptedError),
        ):
            mesh.__enter__()
        assert made.call_args.args == (backend,)
        assert made.call_args.kwargs["device_id"] == expected
        assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"  # the order of the host's launches, on the device
        assert os.environ["NCCL_GRAPH_REGISTER"] == "0"


def test_groups_wait_as_long_as_the_world() -> None:
    """torch gives a group its own default, whatever the world has."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    try:
        group: Any = twin_of(Axis("data", 2, 0, torch.device("cpu"))).group
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
    finally:
        dist.destroy_process_group()


def test_gradients_are_exchanged_over_few_channels_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's buffers grow with the channels between two GPUs. gloo has none, and exchanges where it gathers."""
    options = mock.Mock()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", mock.Mock(Options=mock.Mock(return_value=options)), raising=False)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _group: [0, 2])
    made = mock.Mock(return_value="bounded")
    monkeypatch.setattr(dist, "new_group", made)
    monkeypatch.setattr(axes, "timeout_of_world", lambda: timedelta(seconds=7))
    for backend, expected in (("gloo", None), ("nccl", "bounded")):
        monkeypatch.setattr(dist, "get_backend", lambda _group, backend=backend: backend)
        axis = Axis("replicas", 2, 0, torch.device("cpu"))
        bound_exchange(axis)
        bound_exchange(axis)
        assert axis.exchange_group == expected
    made.assert_called_once_with(
        [0, 2], backend="nccl", pg_options=options, use_local_synchronization=True, timeout=timedelta(seconds=7)
    )
    assert options.config.max_ctas == NUM_EXCHANGE_CHANNELS
    monkeypatch.setattr(dist, "all_to_all_single", sent := mock.Mock())
    axis.start_exchange(torch.zeros(2, 4))
    assert sent.call_args.kwargs["group"] == "bounded"
