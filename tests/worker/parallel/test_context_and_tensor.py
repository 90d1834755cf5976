"""Two context ranks of two tensor ranks each (gloo), with and without `sequence`: one process's losses, and each pitfall.

Gradients are means over the context ranks, tensor ranks add up activations, and all four agree on amaxes and norms.
"""

from typing import Any

import pytest
import torch

from tests.text import write_corpus
from tests.worker.parallel.compare import (
    CASES,
    check_gradients,
    check_jobs,
    check_resumed,
    check_training,
    chosen_cases,
    found_by_ranks,
)
from tests.worker.parallel.context_runs import check_own_loop, of_documents, with_tensor
from tests.worker.parallel.tensor_runs import Result, make_network

pytestmark = pytest.mark.slow
NUM_RANKS = 4
FAST = [("gpt", "O3", 1, True)]


def _cases() -> list[Any]:
    cases = [(*case, sequence) for case in CASES for sequence in (False, True)]
    return [pytest.param(*case, marks=() if case in FAST else pytest.mark.matrix) for case in cases]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Result]:
    """What each rank found, for the selected cases; all else where tests of the matrix are among them."""
    folder = tmp_path_factory.mktemp("both")
    if any(item.path == request.path and item.get_closest_marker("matrix") for item in request.session.items):
        write_corpus(folder / "corpus")
    cases = chosen_cases(request, test_ranks_train_as_one_process_does, ("family", "level", "stage", "sequence"))
    return found_by_ranks(with_tensor, NUM_RANKS, folder, cases, num_worlds=4)


@pytest.mark.parametrize(("family", "level", "stage", "sequence"), _cases())
def test_ranks_train_as_one_process_does(results: list[Result], family: str, level: str, stage: int, sequence: bool) -> None:
    """Ranks of a tensor group have one loss, of their tokens."""
    ranks = [result[family, level, stage, sequence] for result in results]
    check_training(ranks, family, level, 1)
    assert ranks[0]["losses"] == ranks[1]["losses"] != ranks[2]["losses"] == ranks[3]["losses"]


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_gradients_are_those_of_one_process(results: list[Result], sequence: bool) -> None:
    """Of rows with several documents, on ranks with different numbers of targets."""
    for result in results:
        check_gradients(result["llama", sequence], "llama", [of_documents()])


@pytest.mark.matrix
def test_a_checkpoint_resumes_to_the_bit(results: list[Result]) -> None:
    for result in results:
        check_resumed(result["resumed"])


@pytest.mark.matrix
def test_an_evaluation_counts_all_targets_of_the_whole_vocabulary(results: list[Result]) -> None:
    with torch.no_grad():
        losses = make_network("llama").eval().loss(of_documents())
    expected = [float(losses.loss), float(losses.metrics["token_accuracy"]), losses.num_targets]
    for result in results:
        assert result["evaluated"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.matrix
def test_each_rank_rounds_its_gradients_by_numbers_of_its_own(results: list[Result]) -> None:
    """And shards of a weight are consecutive in its random stream, the same on both context ranks."""
    assert sorted(result["draws"]["gradient"] for result in results) == [(rank, NUM_RANKS) for rank in range(NUM_RANKS)]
    shards = [result["draws"]["shard"] for result in results]
    assert shards[:2] == shards[2:]
    assert shards[0].stop == shards[1].start


@pytest.mark.matrix
def test_a_nan_in_one_shard_makes_all_ranks_skip(results: list[Result]) -> None:
    assert [result["poisoned"] for result in results] == [{"skipped": 1, "kept": True}] * NUM_RANKS


@pytest.mark.matrix
def test_somebodys_own_loop_combines_the_degrees(results: list[Result]) -> None:
    check_own_loop([result["own"] for result in results])


@pytest.mark.matrix
def test_a_job_trains_and_resumes(results: list[Result]) -> None:
    """With `sequence`, in the same layout to the bit; on one rank the curve continues."""
    check_jobs(results[0])
