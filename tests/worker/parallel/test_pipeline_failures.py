"""A rank of a pipeline that fails, dies or hangs in the middle of a schedule is named, as in any collective."""

import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from octet.api_schemas import FailureReason, JobSpec
from octet.worker.common.config import RankEnv, resolve
from octet.worker.mesh import Mesh
from octet.worker.train.loop import Trainer
from tests.kit.ports import free_port
from tests.kit.ranks import PRELOADED
from tests.kit.text import write_corpus
from tests.kit.training import Recorder
from tests.worker.parallel.pipeline_runs import LLAMA, document

pytestmark = pytest.mark.matrix
TIMEOUT_S, LONG_S = {"fails": 60.0, "dies": 60.0, "hangs": 15.0}, 200.0
NUM_PASSES = 6
"""Micro-batches before the last stage does what it does: in the middle of the second step."""


def misbehave(story: str) -> None:
    if story == "fails":
        raise ZeroDivisionError("the block is bad")
    if story == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(0.001)


def rank_of_a_story(rank: int, story: str, job: dict[str, Any], port: int, folder: str) -> None:
    torch.set_num_threads(1)
    num_ranks = job["resources"]["workers"]
    env = RankEnv(rank=rank, world_size=num_ranks, master_port=port)
    config = resolve(JobSpec.model_validate(job), env)
    passes = []

    def count(*_call: Any) -> None:
        passes.append(1)
        if len(passes) == NUM_PASSES:
            misbehave(story)

    try:
        with Mesh(env, torch.device("cpu"), config.layout, TIMEOUT_S[story]) as mesh:
            trainer = Trainer(config, mesh, Recorder(), Path(folder))
            if rank == num_ranks - 1:
                trainer.model.get_submodule("blocks.3").register_forward_pre_hook(count)
            trainer.run()
    except Exception as error:  # noqa: BLE001  what it is, is what is tested
        ending = [type(error).__name__, getattr(error, "reason", None), str(error)]
        Path(folder, f"{rank}.json").write_text(json.dumps(ending))


@pytest.mark.parametrize(
    ("story", "reason", "says"),
    [
        (
            "fails",
            FailureReason.WORKER_ERROR,
            r"rank 1 of 2: ZeroDivisionError: the block is bad\n\(rank 0 of 2 only followed\)",
        ),
        ("dies", FailureReason.WORKER_LOST, r"rank 1 of 2 ended without a word. rank 0: in pipeline schedule over pipeline"),
        (
            "hangs",
            FailureReason.STALLED,
            r"rank 1 of 2 takes no part, after step 1. rank 0: in pipeline schedule over pipeline(.|\n)*in misbehave\n",
        ),
    ],
)
def test_the_rank_is_named(tmp_path: Path, story: str, reason: FailureReason, says: str) -> None:
    job = document(write_corpus(tmp_path / "corpus"), LLAMA, {"level": "fp32"}, 2, pipeline=2)
    endings = endings_of(story, job, tmp_path)
    kind, found, message = endings[0]
    assert (kind, found) == ("RanksFailed", reason)
    assert re.match(says, message), message
    if story == "fails":
        assert endings[1] == endings[0]


def test_a_tensor_rank_of_a_stage_is_named(tmp_path: Path) -> None:
    """The other ranks wait for it inside a layer, or for a hidden state."""
    job = document(write_corpus(tmp_path / "corpus"), LLAMA, {"level": "fp32"}, 4, pipeline=2, tensor=2, sequence=True)
    endings = endings_of("fails", job, tmp_path)
    kind, found, message = endings[0]
    assert (kind, found) == ("RanksFailed", FailureReason.WORKER_ERROR)
    assert message.startswith("rank 3 of 4: ZeroDivisionError: the block is bad\n"), message
    assert endings == [endings[0]] * 4


def endings_of(story: str, job: dict[str, Any], folder: Path) -> list[Any]:
    """Run a job and return its ranks' errors: the first rank's alone, or all of them if the last rank fails."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    arguments, num_ranks = (story, job, free_port(), str(folder)), job["resources"]["workers"]
    processes = [context.Process(target=rank_of_a_story, args=(rank, *arguments)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    ending = range(num_ranks if story == "fails" else 1)
    for rank in ending:
        processes[rank].join(LONG_S)
    for process in processes:
        process.kill()
        process.join()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in ending]
