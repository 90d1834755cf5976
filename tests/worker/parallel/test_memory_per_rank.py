"""Bytes per parameter of converted layers on one of N ranks, counted from live storage when a rank holds most.

At ZeRO 1 a rank holds whole weights and, between micro-batches, whole gradients; masters, residuals and states are divided.
At ZeRO 3 all of it is. Fake ranks (torch's "fake" backend) stand for up to eight, with real tensors that nobody fills; real
ranks (gloo) show that what is counted on fake ones is what real ones hold.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from octet.worker import initialize, memory_report, parallelize
from octet.worker.kernels.torch_private import leave_the_compiler_unloaded
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks

WIDTH, NUM_LAYERS = 256, 4
NUM_WEIGHTS = NUM_LAYERS * WIDTH * WIDTH
LARGEST = {
    ("O3", 1): (1.05 + 1.05, 5.1),
    ("O3-split", 1): (2.1, 4.1),
    ("O3", 3): (0.0, 7.2),
    ("O3-split", 3): (0.0, 6.2),
}
"""Bytes per parameter by level and ZeRO stage: what each rank holds, and what N ranks divide."""
Held = dict[str, int]


def held(level: str, zero_stage: int) -> Held:
    """Return the bytes of converted layers on a rank of the default process group, in its second step, when states exist.

    At stage 1 they are counted before the last of two backward passes; at stage 3 after the only one, as owners accumulate.
    """
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(NUM_LAYERS)))
    leave_the_compiler_unloaded()
    options: dict[str, Any] = {"convert_heads": True, "statistics_every": 0, "auto_filter": False}
    model, optimizer = initialize(blocks, torch.optim.AdamW(blocks.parameters(), lr=1e-3), level, **options)
    assert optimizer is not None
    parallel = parallelize(model, optimizer, zero_stage=zero_stage)
    x = torch.randn(8, WIDTH)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with parallel.no_sync(zero_stage == 1):
        model(x).square().mean().backward()
    return memory_report(model, optimizer, converted_only=True)


def on_fake_ranks(level: str, zero_stage: int, num_ranks: int) -> Held:
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        return held(level, zero_stage)
    finally:
        dist.destroy_process_group()


def per_parameter(found: Held) -> float:
    return sum(found.values()) / NUM_WEIGHTS


def limit(level: str, zero_stage: int, num_ranks: int) -> float:
    whole, divided = LARGEST[level, zero_stage]
    return whole + divided / num_ranks


@pytest.mark.parametrize(
    ("level", "zero_stage", "num_ranks"),
    [
        pytest.param(*case, num_ranks, marks=() if num_ranks in (2, 8) else pytest.mark.matrix)
        for case in LARGEST
        for num_ranks in range(2, 9)
    ],
)
def test_a_rank_holds_its_share(level: str, zero_stage: int, num_ranks: int) -> None:
    found = on_fake_ranks(level, zero_stage, num_ranks)
    assert 0.94 * limit(level, zero_stage, num_ranks) <= per_parameter(found) <= limit(level, zero_stage, num_ranks)
    if zero_stage == 1:
        assert found["weights"] == found["gradients"] == NUM_WEIGHTS


def on_real_ranks(rank: int, port: int, num_ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    found = {f"{level} {stage}": held(level, stage) for level, stage in LARGEST}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.matrix
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_real_ranks_hold_what_is_counted_on_fake_ones(num_ranks: int, tmp_path: Path) -> None:
    run_ranks(on_real_ranks, (free_port(), num_ranks, str(tmp_path)), num_ranks)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    for level, stage in LARGEST:
        assert ranks[0][f"{level} {stage}"] == on_fake_ranks(level, stage, num_ranks)
        assert max(per_parameter(rank[f"{level} {stage}"]) for rank in ranks) <= limit(level, stage, num_ranks)
