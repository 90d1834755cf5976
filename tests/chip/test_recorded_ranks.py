"""Two ranks that replay their steps, collectives among them: what they do as ranks that launch, and faults that are found.

`test_steps.py::test_two_ranks` compares their bits with a CPU's at every level.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from octet.api_schemas import EventReport, JobSpec
from octet.worker.checkpoint import complete_in
from octet.worker.common.config import RankEnv, resolve
from octet.worker.common.errors import RanksFailed
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.mesh import Mesh
from octet.worker.train.loop import Trainer
from tests.chip.lies import chip_of
from tests.chip.nccl import check_order, communicators
from tests.chip.test_steps import GPU, Trained, job_of_two, train
from tests.chip.timelines import Fault
from tests.golden import record
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks, saved_by_ranks
from tests.kit.training import Recorder

Plant = Callable[[Trainer], None]


def launch_on_rank_1(trainer: Trainer) -> None:
    if trainer.mesh.world.rank == 1:
        trainer.job.graph.recorder = None


def keep_the_first_learning_rate(trainer: Trainer) -> None:
    optimizer: Any = trainer.optimizer
    optimizer.send_hyperparameters = lambda: None


def publish_without_residuals(trainer: Trainer) -> None:
    """Replay it, although layers were demoted since the step began."""
    graph: Any = trainer.job.graph
    publish = graph.publish

    def publish_as_ever(parallel_publish: Callable[[], None]) -> None:
        graph._fallbacks = graph._present_fallbacks()
        publish(parallel_publish)

    graph.publish = publish_as_ever


def stand_still_on_rank_1(trainer: Trainer) -> None:
    """In the seventh step, which others replay."""
    graph = trainer.job.graph
    begin_step = graph.begin_step

    def begin() -> None:
        begin_step()
        if trainer.mesh.world.rank == 1 and trainer.progress.step == 6:
            time.sleep(20)

    graph.begin_step = begin  # type: ignore[method-assign]


def train_rank(rank: int, port: int, folder: str, arguments: dict[str, Any]) -> None:
    """arguments: of `train`."""
    env = RankEnv(rank=rank, world_size=2, master_port=port)
    try:
        found: Any = tuple(train(folder=Path(folder), env=env, **arguments))
    except RanksFailed as error:
        found = str(error)
    torch.save(found, Path(folder, f"{rank}.pt"))


def train_two(
    document: dict[str, Any],
    folder: Path,
    *,
    num_steps: int = 7,
    on_chip: bool = True,
    plant: Plant | None = None,
    limit_s: float = 300.0,
    fails: bool = False,
) -> list[Any]:
    """Return what two ranks trained; if `fails`, the messages with which they failed."""
    options = {"num_steps": num_steps, "on_chip": on_chip, "plant": plant, "timeout_s": limit_s}
    run_ranks(train_rank, (free_port(), str(folder), {"document": document, **options}), 2)
    found = saved_by_ranks(folder, 2)
    assert [isinstance(each, str) for each in found] == [fails, fails], found
    return [Trained(*each) if isinstance(each, tuple) else each for each in found]


@pytest.mark.system
def test_a_rank_that_records_alone_is_found(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    found = train_two(job_of_two(spec_document, "O2", "data"), tmp_path, plant=launch_on_rank_1)
    with pytest.raises(Fault, match=r"recorded otherwise on another rank: .*\{0: \d+, 1: None\}"):
        check_order([rank.launched for rank in found])


@pytest.mark.matrix
def test_a_learning_rate_that_a_recording_keeps_is_found(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = job_of_two(spec_document, "O2", "ZeRO 1")
    planted, sound = (train_two(document, tmp_path, plant=plant) for plant in (keep_the_first_learning_rate, None))
    assert planted[0].numbers[:5] == sound[0].numbers[:5]
    assert planted[0].state != sound[0].state


@pytest.mark.matrix
def test_layers_are_demoted_as_in_launched_steps(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    """After a recorded step. The ranks put the residuals of these layers together before the next one."""
    document = job_of_two(spec_document, "O3-split", "ZeRO 1")
    document["precision"] |= {"demotion": {"patience": 1, "min_sqnr_db": 27.0}}
    found, expected = (train_two(document, tmp_path, num_steps=12, on_chip=on_chip) for on_chip in (True, False))
    assert [(rank.numbers, rank.state) for rank in found] == [(rank.numbers, rank.state) for rank in expected]
    check_order([rank.launched for rank in found])
    planted = train_two(document, tmp_path, num_steps=12, plant=publish_without_residuals, fails=True)
    assert "use after free: the replay of new_zeros" in planted[0]


@pytest.mark.system
def test_a_rank_that_others_wait_for_in_a_replay_is_named(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = job_of_two(spec_document, "O2", "data")
    messages = train_two(document, tmp_path, plant=stand_still_on_rank_1, limit_s=10.0, fails=True)
    assert messages[0] == messages[1]
    assert "rank 1 of 2 takes no part, after step 6. rank 0: in replay of the further pass with its exchange" in messages[0]


def run_rank(rank: int, ports: list[int], document: dict[str, Any], folder: str) -> None:
    """Train to the last step, and again from the checkpoint before it."""
    torch.set_num_threads(1)
    states, events = [], []
    for port in ports:
        config = resolve(JobSpec.model_validate(document), RankEnv(rank=rank, world_size=2, master_port=port))
        with ExitStack() as stack:
            chip = stack.enter_context(chip_of())
            stack.enter_context(communicators(chip))
            mesh, recorder = stack.enter_context(Mesh(config.env, GPU, config.layout)), Recorder()
            trainer = Trainer(config, mesh, recorder, Path(folder))
            trainer.run(tuple(ref for ref in complete_in(Path(folder, "checkpoints")) if ref.step < 10))
            model = exact_state_dict(trainer.model)
            states.append(record.digest([tensor.cpu() for tensor in model.values()]))
            events.append([event.message for event in recorder.of(EventReport) if event.type == "training.graphed"])
    torch.save((states, events), Path(folder, f"{rank}.pt"))


@pytest.mark.system
def test_a_resumed_run_is_recorded_and_has_the_bits_of_one_that_went_through(
    tmp_path: Path, spec_document: dict[str, Any]
) -> None:
    document = job_of_two(spec_document, "O2", "ZeRO 1")
    document["training"] |= {"steps": 10, "checkpoint_every": 5, "eval_batches": 1}
    run_ranks(run_rank, ([free_port(), free_port()], document, str(tmp_path)), 2)
    for states, _ in (ranks := saved_by_ranks(tmp_path, 2)):
        assert states[0] == states[1]
    assert [len(events) for events in ranks[0][1]] == [2, 2]
