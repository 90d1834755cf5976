"""A sum over ranks inside of a compiled graph: one op, which runs the collective of eager code."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from octet.worker.common.config import RankEnv
from octet.worker.mesh import AxisInBlocks, Mesh
from octet.worker.parallel.tensor_layers import sum_of_shards, to_shards
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks


class Divided(nn.Module):
    def __init__(self, axis: AxisInBlocks) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, hidden: Tensor) -> Tensor:
        return sum_of_shards(to_shards(hidden.t(), self.axis).square(), self.axis) + 1


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    with Mesh(RankEnv(rank=rank, world_size=2, master_port=port), torch.device("cpu")) as mesh:
        found = []
        for is_compiled in (False, True):
            module = Divided(AxisInBlocks(mesh.world))
            if is_compiled:
                module.compile(backend="aot_eager", fullgraph=True, dynamic=False)
            hidden = torch.arange(6.0).view(2, 3).add(rank).requires_grad_()
            output = module(hidden)
            output.sum().backward()
            found.append((output.detach(), hidden.grad, dict(mesh.world.sent_bytes), mesh.world.waits.num_started["world"]))
            mesh.world.sent_bytes.clear()
        torch.library.opcheck(torch.ops.octet.sum_over.default, (torch.ones(2, 3).t(), AxisInBlocks(mesh.world).key))
    torch.save(found, Path(folder, f"{rank}.pt"))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo itself
def test_a_graph_runs_the_collective_of_eager_code(tmp_path: Path) -> None:
    run_ranks(work, (free_port(), str(tmp_path)), 2)
    numbers = torch.arange(6.0).view(2, 3)
    output, gradient = (numbers**2 + (numbers + 1) ** 2).t() + 1, 2 * numbers + 2 * (numbers + 1)
    for rank in range(2):
        eager, compiled = torch.load(tmp_path / f"{rank}.pt")
        for found in (eager, compiled):
            assert torch.equal(found[0], output)
            assert torch.equal(found[1], gradient)
            assert found[2] == {("sum", "float32"): 2 * 6 * 4}
        assert (eager[3], compiled[3]) == (2, 4)


def test_an_axis_keeps_its_key() -> None:
    with Mesh(RankEnv(), torch.device("cpu")) as mesh, Mesh(RankEnv(), torch.device("cpu")) as other:
        keys = [AxisInBlocks(axis).key for axis in (mesh.tensor, mesh.tensor, other.tensor)]
    assert keys[0] == keys[1] != keys[2]
