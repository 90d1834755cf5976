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

from api_schemas import FailureReason, JobSpec
from tests.ranks import PRELOADED, free_port
from tests.text import write_corpus
from tests.worker.parallel.pipeline_runs import LLAMA, document
from tests.worker.test_train import Recorder
from worker.config import RankEnv, resolve
from worker.mesh import Mesh
from worker.train import Trainer

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
    env = RankEnv(rank=rank, world_size=2, master_port=port)
    config = resolve(JobSpec.model_validate(job), env)
    passes = []

    def count(*_call: Any) -> None:
        passes.append(1)
        if len(passes) == NUM_PASSES:
            misbehave(story)

    try:
        with Mesh(env, torch.device("cpu"), config.layout, TIMEOUT_S[story]) as mesh:
            trainer = Trainer(config, mesh, Recorder(), Path(folder))
            if rank == 1:
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
    multiprocessing.set_forkserver_preload(PRELOADED)
    context = multiprocessing.get_context("forkserver")
    arguments = (story, job, free_port(), str(tmp_path))
    processes = [context.Process(target=rank_of_a_story, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    processes[0].join(LONG_S)
    if story == "fails":
        processes[1].join(LONG_S)
    for process in processes:
        process.kill()
        process.join()
    kind, found, message = json.loads((tmp_path / "0.json").read_text())
    assert (kind, found) == ("RanksFailed", reason)
    assert re.match(says, message), message
    if story == "fails":
        assert json.loads((tmp_path / "1.json").read_text()) == [kind, found, message]
