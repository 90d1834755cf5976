"""A job of two ranks through the service has the losses of the library's loop on two ranks, exactly."""

import json
from pathlib import Path

import pytest
import torch

from octet.api_schemas import JobState
from tests.e2e.octet_server import Server, losses
from tests.kit.ranks import run_ranks
from tests.kit.text import write_corpus
from tests.worker.parallel.zoo_runs import NUM_RANKS, NUM_STEPS, Case, both, job

CASE = Case("ZeRO 1", "O3")


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    found = both(CASE, f"{folder}/corpus", rank, Path(folder))
    assert found is not None
    if rank == 0:
        Path(folder, "losses.json").write_text(json.dumps(found[0].losses))


@pytest.mark.system
def test_the_service_trains_as_the_library_does(server: Server, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", num_files=2)
    run_ranks(work, (str(tmp_path),), NUM_RANKS)
    expected = json.loads((tmp_path / "losses.json").read_text())
    finished = server.finish(server.client.submit(job(CASE, str(corpus))).id)
    assert finished.state is JobState.SUCCEEDED, finished
    curve = losses(server, finished)
    assert [step for step, _, _ in curve] == list(range(1, NUM_STEPS + 1))
    assert [loss for _, loss, _ in curve] == expected
