"""A backward pass that an exception ends, as Ctrl-C in a notebook does: after `zero_grad` training goes on, bit for bit."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from octet.worker import initialize, parallelize, release_gradients
from octet.worker.mesh import Axes
from octet.worker.parallel.loop import ParallelLoop
from tests.golden.record import digest
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks, saved_by_ranks

pytestmark = pytest.mark.system

STAGES = (0, 1, 2, 3)
CASES = [
    pytest.param(stage, level, accumulates, marks=() if accumulates == (stage in (0, 3)) else pytest.mark.matrix)
    for stage in STAGES
    for level, accumulates in (("O2", False), ("O3-split", True))
]
"""Each stage at one of the two levels; the rest is in the matrix."""
Result = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 80), nn.Linear(80, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Each gradient arrives as soon as its layer's backward pass is over, so that buckets are exchanged in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Interrupt(Exception):
    """Stands for KeyboardInterrupt and for memory that is out."""


def make(level: str) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), level, statistics_every=0)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))


def interrupt(model: Any, rank: int, index: int) -> None:
    """Raise in the middle of a backward pass, when the gradient of a block's output is complete."""

    def raise_in_backward(_gradient: Tensor) -> None:
        raise Interrupt

    def watch(_block: nn.Module, _inputs: Any, output: Tensor) -> None:
        output.register_hook(raise_in_backward)

    handle = model.blocks[index].register_forward_hook(watch)
    with pytest.raises(Interrupt):
        model(batch(99, rank)).square().mean().backward()
    handle.remove()


def step(model: Any, optimizer: Any, parallel: ParallelLoop, number: int, rank: int, *, accumulates: bool) -> float:
    if accumulates:
        with parallel.no_sync():
            model(batch(number, rank) + 1).square().mean().backward()
    loss = model(batch(number, rank)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train(rank: int, stage: int, level: str, *, accumulates: bool, is_interrupted: bool) -> Result:
    model, optimizer = make(level)
    axes = Axes.of_group(torch.device("cpu"))
    parallel = ParallelLoop(model, optimizer, axes, zero_stage=stage, max_elements=64)  # a bucket for each parameter
    losses = []
    for number in range(3):
        if is_interrupted and number:
            # Where whole blocks are gathered, ranks gather alike only if they stop at the same place.
            interrupt(model, rank, 1 if stage == 3 else 2 - 2 * rank)
            optimizer.zero_grad()
        losses.append(step(model, optimizer, parallel, number, rank, accumulates=accumulates))
    assert len(parallel.gradients.buckets) > 9
    return {"losses": losses, "state": digest({"model": model.state_dict(), "optimizer": optimizer.state_dict()})}


def is_freed(rank: int, stage: int) -> bool:
    model, optimizer = make("O2")
    parallel = parallelize(model, optimizer, zero_stage=stage)
    step(model, optimizer, parallel, 0, rank, accumulates=False)
    alive = [weakref.ref(each) for each in (model, optimizer, parallel, *model.parameters())]
    del model, optimizer, parallel
    gc.collect()
    return all(each() is None for each in alive)


def without_its_parallel(rank: int) -> str:
    model, optimizer = make("O2")
    parallelize(model, optimizer)
    del optimizer
    gc.collect()
    with pytest.raises(RuntimeError, match="what parallelize returned was deleted") as error:
        model(batch(0, rank)).square().mean().backward()
    return str(error.value)


def work(rank: int, port: int, folder: str, cases: list[tuple[int, str, bool]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found: Result = {}
    for stage, level, accumulates in cases:
        for is_interrupted in (False, True):
            found[stage, level, is_interrupted] = train(
                rank, stage, level, accumulates=accumulates, is_interrupted=is_interrupted
            )
    found["freed"] = [is_freed(rank, stage) for stage in STAGES]
    found["refusal"] = without_its_parallel(rank)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Result]:
    """Return each rank's results for the selected stages and levels."""
    folder = tmp_path_factory.mktemp("ranks")
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen = [
        item.callspec.params for item in tests if item.function is test_training_goes_on_after_a_backward_pass_that_raised
    ]
    cases = [(params["stage"], params["level"], params["accumulates"]) for params in chosen]
    run_ranks(work, (free_port(), str(folder), cases), 2)
    return saved_by_ranks(folder, 2)


@pytest.mark.parametrize(("stage", "level", "accumulates"), CASES)
def test_training_goes_on_after_a_backward_pass_that_raised(
    ranks: list[Result], stage: int, level: str, accumulates: bool
) -> None:
    for found in ranks:
        assert found[stage, level, True] == found[stage, level, False]


def test_a_parallel_model_is_freed(ranks: list[Result]) -> None:
    assert ranks[0]["freed"] == ranks[1]["freed"] == [True] * len(STAGES)


def test_gradients_of_a_model_whose_parallel_was_deleted_are_refused(ranks: list[Result]) -> None:
    assert all("Keep one of them" in found["refusal"] for found in ranks)


@pytest.mark.parametrize("level", ["O2", "te"])
def test_one_rank_goes_on_after_a_backward_pass_that_raised(level: str) -> None:
    found = []
    for is_interrupted in (False, True):
        model, optimizer = make(level)
        parallel = parallelize(model, optimizer)
        if is_interrupted and level != "te":  # te remembers the amaxes of all forward passes
            interrupt(model, 0, 1)
            optimizer.zero_grad()
        losses = [step(model, optimizer, parallel, number, 0, accumulates=False) for number in range(2)]
        if is_interrupted and level == "te":
            interrupt(model, 0, 1)
            optimizer.zero_grad()
            assert step(model, optimizer, parallel, 2, 0, accumulates=False) < 10 * losses[0]
        found.append(losses)
    assert found[0] == found[1]


def test_released_gradients_go_on_after_a_backward_pass_that_raised() -> None:
    model, optimizer = make("O2")
    release = release_gradients(model, optimizer)
    interrupt(model, 0, 1)
    assert release.stepped
    optimizer.zero_grad()
    model(batch(0, 0)).square().mean().backward()
    optimizer.step()
    alive = [weakref.ref(each) for each in (model, optimizer, *model.parameters())]
    del model, optimizer, release
    gc.collect()
    assert all(each() is None for each in alive)
