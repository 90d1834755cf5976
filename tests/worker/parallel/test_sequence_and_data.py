"""Sequence parallelism with two data ranks (gloo): each family at each level and ZeRO stage, a job, and four tensor ranks."""

import pytest
import torch

from api_schemas import Layout
from tests.text import write_corpus
from tests.worker.parallel.compare import CASES, check_gradients, check_jobs, check_training, chosen_cases, found_by_ranks
from tests.worker.parallel.job_runs import jobs
from tests.worker.parallel.tensor_runs import Case, Result, batch_of, gradients, trained
from worker.config import RankEnv
from worker.mesh import Mesh
from worker.parallel.axes import Axes

pytestmark = [pytest.mark.slow, pytest.mark.matrix]
NUM_RANKS = 4


def work(rank: int, ports: list[int], folder: str, cases: list[Case]) -> None:
    torch.set_num_threads(1)
    found: Result = {"jobs": jobs(rank, ports[:2], folder, tensor=2, sequence=True)}
    with Mesh(RankEnv(rank=rank, world_size=4, master_port=ports[2]), torch.device("cpu"), Layout(4, tensor=2)) as mesh:
        found |= {case: trained(Axes.of_mesh(mesh), *case, sequence=True) for case in cases}
        found["of 4"] = gradients(Axes.of_layout(Layout(4, tensor=4), rank, mesh.device), "gpt", sequence=True)
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Result]:
    """What each rank found, for the selected cases."""
    folder = tmp_path_factory.mktemp("sequence")
    write_corpus(folder / "corpus")
    cases = chosen_cases(request, test_ranks_train_as_one_process_does)
    return found_by_ranks(work, NUM_RANKS, folder, cases, num_worlds=3)


@pytest.mark.parametrize(("family", "level", "stage"), CASES)
def test_ranks_train_as_one_process_does(results: list[Result], family: str, level: str, stage: int) -> None:
    check_training([result[family, level, stage] for result in results], family, level, 2)


def test_gradients_on_four_tensor_ranks_are_those_of_one_process(results: list[Result]) -> None:
    check_gradients(results[0]["of 4"], "gpt", [batch_of(0, 0, 0)])


def test_a_job_trains_and_resumes_with_and_without_it(results: list[Result]) -> None:
    """To the bit in the same layout; on one rank the curve continues. Its blocks are computed again in the backward pass."""
    check_jobs(results[0])
