"""The examples of Accelerate, Fabric and Lightning, on one rank and on two: a state continues as the run itself would have.

Two ranks are matrix tests; one runs in `make test`. The data of the examples repeat in each epoch.
"""

import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.docs.blocks import ROOT
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks

CHECKED = ("bf16-amp", "te", "O1", "O2", "O3", "O3-split", "O2-8bit")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own warnings


def with_accelerate(level: str, folder: Path, _num_ranks: int) -> list[list[float]]:
    """Return the losses of a run, and those of one that continues after its first epoch."""
    from accelerate.state import AcceleratorState, GradientState

    train = runpy.run_path(str(ROOT / "examples/accelerate/train.py"))["train"]
    found = []
    for num_done in (0, 1):
        found.append([float(loss) for loss in train(level, 2, str(folder), num_done)])
        AcceleratorState._reset_state(not dist.is_initialized())
        GradientState._reset_state()
    whole, rest = found
    return [whole, whole[: len(rest)] + rest]


def with_fabric(level: str, folder: Path, _num_ranks: int) -> list[list[float]]:
    train = runpy.run_path(str(ROOT / "examples/fabric/train.py"))["train"]
    first = train(level, 4, str(folder / "fabric"))
    return [train(level, 8), first + train(level, 4, None, str(folder / "fabric"))]


def with_lightning(level: str, folder: Path, num_ranks: int) -> list[list[float]]:
    train = runpy.run_path(str(ROOT / "examples/lightning/train.py"))["train"]
    first = train(level, 1, num_ranks, folder, None)
    return [train(level, 2, num_ranks, folder, None), first + train(level, 2, num_ranks, folder, str(folder / "epoch=0.ckpt"))]


EXAMPLES = {"accelerate": with_accelerate, "fabric": with_fabric, "lightning": with_lightning}


def assert_continues(found: list[list[float]]) -> None:
    whole, in_parts = found
    assert whole[-1] < 0.9 * whole[0]
    assert in_parts == whole


def cases() -> list[Any]:
    return [
        pytest.param(name, level, marks=() if (name, level) == ("fabric", "O3") else pytest.mark.matrix)
        for name in EXAMPLES
        for level in CHECKED
    ]


@pytest.mark.parametrize(("name", "level"), cases())
def test_a_state_continues_on_one_rank(name: str, level: str, tmp_path: Path) -> None:
    assert_continues(EXAMPLES[name](level, tmp_path, 1))


def run_each(rank: int, port: int, name: str, folder: str) -> None:
    names: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    names |= {"MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "examples", "ACCELERATE_USE_CPU": "true"}
    os.environ.update({key: str(value) for key, value in names.items()})
    torch.set_num_threads(1)
    found = {}
    for level in CHECKED:
        (Path(folder) / level).mkdir(exist_ok=True)
        found[level] = EXAMPLES[name](level, Path(folder) / level, 2)
    torch.save(found, f"{folder}/{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.matrix
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_state_continues_on_two_ranks(name: str, tmp_path: Path) -> None:
    run_ranks(run_each, (free_port(), name, str(tmp_path)), 2)
    for rank in range(2):
        for found in torch.load(tmp_path / f"{rank}.pt").values():
            assert_continues(found)
