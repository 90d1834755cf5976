"""One rank of four is killed at random moments, while checkpoints are written too: the job resumes, and every loss is the same.

The ranks run `octet.worker.rank.main` as under torchrun. A seed, which is logged, draws who is killed and when.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import random
import re
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from octet.worker.rank.main import main
from tests.kit.ports import free_port
from tests.kit.ranks import PRELOADED

NUM_RANKS, EVERY, MOST_STEPS_OF_A_LIFE = 4, 3, 6
START_S = 120.0
SEED = 20_261_122

logger = logging.getLogger(__name__)


def rank_of_a_life(rank: int, port: int, folder: str) -> None:
    """One rank's process. Its log is a file."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    with Path(folder, f"log_{port}_{rank}").open("w", buffering=1) as sys.stderr:
        sys.exit(main([str(Path(folder, "job.json")), "--job-dir", str(Path(folder, "run")), "--resume"]))


class Life:
    """The ranks from a start to a death or to the end of the job."""

    def __init__(self, folder: Path) -> None:
        self.began = time.time()
        port = free_port()
        multiprocessing.set_forkserver_preload(PRELOADED)
        context = multiprocessing.get_context("forkserver")
        self.processes: list[BaseProcess] = [
            context.Process(target=rank_of_a_life, args=(rank, port, str(folder))) for rank in range(NUM_RANKS)
        ]
        for process in self.processes:
            process.start()
        self.folder, self.log = folder, folder / f"log_{port}_0"

    def losses(self) -> list[tuple[int, str]]:
        """The losses that were reported, by step, to the last digit."""
        text = self.log.read_text() if self.log.exists() else ""
        return [(int(step), loss) for step, loss in re.findall(r"step step=(\d+) loss=(\S+) ", text)]

    def is_writing(self) -> bool:
        """Return True while these ranks write a checkpoint. Leftovers of an earlier life do not count."""
        for path in (self.folder / "run" / "checkpoints").glob(".unfinished_*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime > self.began:
                    return True
        return False

    def has_written(self) -> bool:
        """Return True if there is a whole checkpoint, of this life or an earlier one."""
        return any(not path.name.startswith(".") for path in (self.folder / "run" / "checkpoints").glob("*"))

    def wait_for(self, num_steps: int, *, writing: bool) -> None:
        """Wait until so many steps were reported, and until a checkpoint is being written, or else until there is a whole one.

        Without the latter no life might go on from another: on a loaded machine one can be killed before it has written any.
        """
        until = time.monotonic() + START_S
        while len(self.losses()) < num_steps or not (self.is_writing() if writing else self.has_written()):
            assert time.monotonic() < until, self.log.read_text()[-3000:]
            assert all(process.is_alive() for process in self.processes), self.log.read_text()[-3000:]
            time.sleep(0.001)

    def end(self) -> list[int | None]:
        """Wait for all ranks. Returns their exit codes."""
        for process in self.processes:
            process.join(START_S)
        return [process.exitcode for process in self.processes]

    def kill(self, rank: int) -> None:
        """Kill a rank; then the others, as a supervisor does, which does not wait here for what they say."""
        for process in (self.processes[rank], *self.processes):
            process.kill()
        self.end()


def undisturbed(folder: Path, document: dict[str, Any]) -> dict[int, str]:
    """The loss of every step of a run that goes through."""
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(document))
    life = Life(folder)
    assert life.end() == [0] * NUM_RANKS, life.log.read_text()[-3000:]
    return dict(life.losses())


@pytest.mark.system
@pytest.mark.parametrize(
    ("num_kills", "parallelism"),
    [
        (3, {"zero_stage": 1}),
        pytest.param(20, {"zero_stage": 1}, marks=pytest.mark.matrix),
        pytest.param(5, {"zero_stage": 1, "pipeline": 2}, marks=pytest.mark.matrix),
    ],
)
def test_the_losses_of_a_killed_job_are_those_of_one_that_goes_through(
    num_kills: int,
    parallelism: dict[str, int],
    tmp_path: Path,
    spec_document: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger=__name__)
    num_steps = num_kills * MOST_STEPS_OF_A_LIFE + 2 * EVERY
    training = {"steps": num_steps, "global_batch_size": 8, "checkpoint_every": EVERY}
    model = spec_document["model"]
    if "pipeline" in parallelism:
        training["micro_batch_size"], model = 1, model | {"num_layers": 2}
    document = spec_document | {
        "model": model,
        "precision": {"level": "O3"},
        "training": spec_document["training"] | training,
        "parallelism": parallelism,
        "resources": {"workers": NUM_RANKS},
    }
    expected = undisturbed(tmp_path / "whole", document)
    assert list(expected) == list(range(1, num_steps + 1))
    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(document))
    draws = random.Random(SEED)
    logger.info("seed %d", SEED)
    num_writing = 0
    for kill in range(num_kills):
        life = Life(folder)
        rank, step, delay_s = draws.randrange(NUM_RANKS), draws.randrange(MOST_STEPS_OF_A_LIFE), draws.uniform(0, 0.05)
        wants_writing = kill % 2 == 0
        life.wait_for(step, writing=wants_writing)
        time.sleep(0.0 if wants_writing else delay_s)
        was_writing = life.is_writing()
        life.kill(rank)
        found = life.losses()
        assert found == [(step, expected[step]) for step, _ in found]
        num_writing += was_writing
        under_way = ", a checkpoint under way" if was_writing else ""
        logger.info("kill %d: rank %d after steps %s%s", kill, rank, [step for step, _ in found], under_way)
    last = Life(folder)
    assert last.end() == [0] * NUM_RANKS, last.log.read_text()[-3000:]
    found = last.losses()
    assert found == [(step, expected[step]) for step in range(found[0][0], num_steps + 1)]
    assert found[0][0] > 1, "no life has gone on from another"
    assert num_writing >= num_kills // 4
