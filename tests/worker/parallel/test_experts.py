"""Two ranks train a mixture as one process does, bit for bit: data parallel and at every stage of ZeRO.

Each rank has other tokens, so an expert may have some on one rank and none on the other.
"""

import pytest
import torch
from torch import Tensor, nn

from octet.worker.common.config import RankEnv
from octet.worker.fp8.experts import has_experts
from octet.worker.mesh import Mesh
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks, saved_by_ranks
from tests.worker.parallel.reference import STEPS, Result, parallel_on, reference, state_of, step_on_ranks

pytestmark = pytest.mark.system

NUM_RANKS, NUM_EXPERTS = 2, 24
CASES = [("O2", stage) for stage in range(4)] + [("O3", 3), ("O3-split", 1), ("te", 2)]


class Block(nn.Module):
    """A norm and a mixture of transformers: a router, and 24 experts, one for each of 24 tokens."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

        sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "num_experts": NUM_EXPERTS, "num_experts_per_tok": 1}
        self.norm = nn.LayerNorm(32)
        self.mixture = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes, experts_implementation="eager"))
        for parameter in self.mixture.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.mixture(self.norm(x).unsqueeze(0))
        return x + hidden.squeeze(0)


class Mixture(nn.Module):
    """Two blocks between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(32, 32), nn.Linear(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x)
        return output


def trained(mesh: Mesh, level: str, stage: int) -> Result:
    parallel = parallel_on(mesh.data, level, stage, Mixture)
    assert has_experts(parallel.model)
    losses = []
    for step in range(STEPS):
        losses.append(step_on_ranks(parallel, step))
        parallel.optimizer.zero_grad()
    return {"losses": losses, "state": state_of(parallel.model, parallel.optimizer)}


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    with Mesh(RankEnv(rank=rank, world_size=NUM_RANKS, master_port=port), torch.device("cpu")) as mesh:
        torch.save({case: trained(mesh, *case) for case in CASES}, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, int], Result]]:
    folder = tmp_path_factory.mktemp("experts")
    run_ranks(work, (free_port(), str(folder)), NUM_RANKS)
    return saved_by_ranks(folder, NUM_RANKS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_train_a_mixture_as_one_process(ranks: list[dict[tuple[str, int], Result]], case: tuple[str, int]) -> None:
    torch.set_num_threads(1)
    expected = reference(*case, NUM_RANKS, Mixture)
    assert [rank[case]["losses"] for rank in ranks] == expected["losses"]
    assert {rank[case]["state"] for rank in ranks} == {expected["state"]}


def test_the_ranks_tokens_miss_some_experts() -> None:
    """The other tests cover an expert with tokens on one rank alone, and one without any."""
    torch.manual_seed(0)
    block = Mixture().blocks[0]
    assert isinstance(block, Block)
    used = []
    for rank in range(NUM_RANKS):
        tokens = torch.randn(24, 32, generator=torch.Generator().manual_seed(1000 * rank))
        used.append(set(block.mixture.gate(block.norm(tokens))[2].flatten().tolist()))
    assert used[0] != used[1]
    assert used[0] | used[1] != set(range(NUM_EXPERTS))
