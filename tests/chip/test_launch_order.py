"""ZeRO 3 on NCCL: gathers of weights and exchanges of gradients have communicators of their own, and one order on all ranks.

Which parameters get a gradient depends on each rank's own data here, as in a network that skips parts of its blocks.
"""

import random
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from octet.api_schemas import Layout
from octet.worker import initialize
from octet.worker.common.config import RankEnv
from octet.worker.common.errors import RanksFailed
from octet.worker.mesh import Mesh
from octet.worker.parallel.loop import ParallelLoop
from octet.worker.parallel.sharded_blocks import ShardedBlocks
from tests.chip.lies import chip_of
from tests.chip.nccl import Launched, check_order, communicators
from tests.chip.timelines import Fault
from tests.golden.record import digest
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks, saved_by_ranks

GPU = torch.device("cuda", 0)
SEEDS = range(4)
PARTS = "norm", "up", "side", "down"


class Block(nn.Module):
    """Parts of it are left out in some passes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.side, self.down = nn.LayerNorm(16), *(nn.Linear(16, 16) for _ in range(3))
        self.left_out: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        for name in PARTS:
            if name not in self.left_out:
                x = x + self.get_submodule(name)(x)
        return x


class Net(nn.Module):
    """Blocks between a first and a last layer, which are not divided."""

    def __init__(self, order: list[int]) -> None:
        """order: of the blocks in a pass. One that is named twice computes twice."""
        super().__init__()
        self.first, self.last, self.order = nn.Linear(16, 16), nn.Linear(16, 16), order
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.last(x)


def train(rank: int, seed: int, mesh: Mesh, order: list[int], zero_stage: int = 3) -> str:
    """Take three steps of two micro-batches. Returns a digest of the weights."""
    draw = random.Random(10 * seed + rank)
    torch.manual_seed(0)
    model = Net(order).to(GPU)
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), "O2", statistics_every=0)
    loop = ParallelLoop(model, optimizer, mesh, zero_stage=zero_stage, max_elements=64)  # a bucket for each parameter
    for step in range(3):
        for is_last in (False, True):
            for block in model.blocks:
                block.left_out = {name for name in PARTS[:-1] if draw.random() < 0.3}  # no rank skips a block
            with loop.no_sync(not is_last):
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + rank)).pin_memory()
                model(x.to(GPU, non_blocking=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest([tensor.cpu() for tensor in model.state_dict().values()])


def run(rank: int, port: int, folder: str, seed: int, order: list[int], is_planted: bool) -> None:
    """Save what this rank has launched. is_planted: exchanges wait for gradients, whatever the other ranks have."""
    torch.set_num_threads(1)
    weights = ""
    with ExitStack() as stack:
        chip = stack.enter_context(chip_of())
        launched = stack.enter_context(communicators(chip)).launched
        if is_planted:
            stack.enter_context(suppress(RanksFailed))  # no rank can go on
            stack.enter_context(mock.patch.object(ShardedBlocks, "_is_done", return_value=False))
        env = RankEnv(rank=rank, world_size=2, master_port=port)
        mesh = stack.enter_context(Mesh(env, GPU, Layout(2), timeout_s=2 if is_planted else 300))
        weights = train(rank, seed, mesh, order)
        of_stage_3 = list(launched)
        assert train(rank, seed, mesh, order, zero_stage=2) == weights
    torch.save((launched if is_planted else of_stage_3, weights), Path(folder, f"{rank}.pt"))


def launched_by_ranks(folder: Path, seed: int, order: list[int], *, is_planted: bool = False) -> list[list[Launched]]:
    run_ranks(run, (free_port(), str(folder), seed, order, is_planted), 2)
    found = saved_by_ranks(folder, 2)
    assert found[0][1] == found[1][1]
    assert is_planted == (not found[0][1])
    return [launched for launched, _ in found]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 1, 0, 2, 3, 2]], ids=["once", "repeated"])
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.matrix if seed else pytest.mark.system) for seed in SEEDS]
)
def test_ranks_with_other_gradients_launch_in_one_order(tmp_path: Path, seed: int, order: list[int]) -> None:
    launched = launched_by_ranks(tmp_path, seed, order)
    check_order(launched)
    kinds = {(entry.kind.partition("_into")[0], entry.communicator) for entry in launched[0]}
    assert len({communicator for _, communicator in kinds}) == 3, kinds  # of the ranks, of gathers, and of exchanges


@pytest.mark.system
def test_another_order_is_found(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="communicators in another order"):
        check_order(launched_by_ranks(tmp_path, 0, [0, 1, 2, 3], is_planted=True))
