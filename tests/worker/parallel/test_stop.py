"""Ranks stop together after a checkpoint, at the same step, although only one of them has heard of it yet."""

from functools import partial
from pathlib import Path

import pytest
import torch

from octet.api_schemas import JobSpec
from octet.worker.checkpoint import complete_in
from octet.worker.common.config import RankEnv, resolve
from octet.worker.common.errors import Cancelled, LeaseLost, Stopped
from octet.worker.mesh import Mesh
from octet.worker.train.loop import Trainer
from tests.golden.record import document
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks, saved_by_ranks
from tests.kit.text import write_corpus
from tests.kit.training import Recorder

STEPS, STOPPED_AT = 6, 3


def run(spec: JobSpec, rank: int, port: int, folder: Path, recorder: Recorder) -> str:
    """Train on one rank of two. Returns the word for how it ended."""
    config = resolve(spec, RankEnv(rank=rank, world_size=2, master_port=port))
    with Mesh(config.env, torch.device("cpu"), config.layout) as mesh:
        try:
            Trainer(config, mesh, recorder, folder).run(complete_in(folder / "checkpoints"))
        except Stopped as stop:
            return type(stop).__name__
    return "done"


def work(rank: int, ports: list[int], folder: str) -> None:
    torch.set_num_threads(1)
    root = Path(folder)
    job = document({"level": "O3-split"}, root / "corpus", 2)
    training = job["training"] | {"steps": STEPS, "micro_batch_size": 1, "checkpoint_every": 0, "schedule": {}}
    spec = JobSpec.model_validate(job | {"parallelism": {"zero_stage": 1}, "training": training})
    saves = partial(Cancelled, saves=True)
    whole = Recorder()
    found = {"whole": (run(spec, rank, ports[0], root / "whole", whole), whole)}
    heard = Recorder(STOPPED_AT if rank == 1 else None, saves)
    found["paused"] = (run(spec, rank, ports[1], root / "paused", heard), heard)
    resumed = Recorder()
    found["resumed"] = (run(spec, rank, ports[2], root / "paused", resumed), resumed)
    # Rank 0 may write nothing more, so a stop that rank 1 would save for is without a checkpoint.
    refused = Recorder(STOPPED_AT, LeaseLost if rank == 0 else saves)
    found["refused"] = (run(spec, rank, ports[3], root / "refused", refused), refused)
    by_time = Recorder()
    timed = spec.training.model_copy(update={"checkpoint_every_minutes": 1e-9})
    found["by_time"] = (run(spec.model_copy(update={"training": timed}), rank, ports[4], root / "timed", by_time), by_time)
    torch.save(found, root / f"{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, Recorder]]]:
    folder = tmp_path_factory.mktemp("stop")
    write_corpus(folder / "corpus")
    run_ranks(work, ([free_port() for _ in range(5)], str(folder)), 2)
    found = saved_by_ranks(folder, 2)
    assert [saved.step for saved in complete_in(folder / "paused" / "checkpoints")] == [STEPS, STOPPED_AT]
    assert complete_in(folder / "refused" / "checkpoints") == ()
    return found


def test_both_ranks_save_and_stop_at_the_step_where_one_has_heard(ranks: list[dict[str, tuple[str, Recorder]]]) -> None:
    assert [rank["paused"][0] for rank in ranks] == ["Cancelled", "Cancelled"]
    assert [saved.step for saved in ranks[0]["paused"][1].checkpoints()] == [STOPPED_AT]


def test_the_losses_are_those_of_a_run_that_nobody_stopped(ranks: list[dict[str, tuple[str, Recorder]]]) -> None:
    losses = {name: recorder.losses() for name, (_, recorder) in ranks[0].items()}
    assert len(losses["whole"]) == STEPS
    assert losses["paused"] + losses["resumed"] == losses["whole"]


def test_no_rank_saves_where_one_may_not_write(ranks: list[dict[str, tuple[str, Recorder]]]) -> None:
    assert [rank["refused"][0] for rank in ranks] == ["LeaseLost", "Cancelled"]
    assert ranks[0]["refused"][1].checkpoints() == ()


def test_ranks_agree_on_the_step_at_which_it_is_time_for_a_checkpoint(ranks: list[dict[str, tuple[str, Recorder]]]) -> None:
    how, recorder = ranks[0]["by_time"]
    assert how == "done"
    assert [saved.step for saved in reversed(recorder.checkpoints())] == list(range(1, STEPS + 1))
