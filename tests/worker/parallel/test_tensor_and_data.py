"""Two tensor ranks with two data ranks (gloo): each family at each level and ZeRO stage, jobs, and four tensor ranks."""

import pytest

from api_schemas import StartedReport
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
from tests.worker.parallel.job_runs import checkpoint_ref
from tests.worker.parallel.tensor_runs import LOSS_TOLERANCE, MICRO_BATCHES, Result, batch_of, make, work
from worker import checkpoint
from worker.resume import resume

pytestmark = [pytest.mark.slow, pytest.mark.matrix]
NUM_RANKS = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Result]:
    """What each rank found, for the selected cases."""
    folder = tmp_path_factory.mktemp("tensor")
    write_corpus(folder / "corpus")
    cases = chosen_cases(request, test_ranks_train_as_one_process_does)
    return found_by_ranks(work, NUM_RANKS, folder, cases, num_worlds=3)


@pytest.mark.parametrize(("family", "level", "stage"), CASES)
def test_ranks_train_as_one_process_does(results: list[Result], family: str, level: str, stage: int) -> None:
    """Alike stay losses of the ranks of one tensor group; scales of weights, and replicated parameters, of all ranks."""
    ranks = [result[family, level, stage] for result in results]
    check_training(ranks, family, level, 2)
    assert ranks[0]["losses"] == ranks[1]["losses"] != ranks[2]["losses"] == ranks[3]["losses"]


@pytest.mark.parametrize("name", ["gpt", "llama", "of 4"])
def test_gradients_are_those_of_one_process(results: list[Result], name: str) -> None:
    """On two tensor ranks with two data ranks, and on four tensor ranks."""
    if name == "of 4":
        check_gradients(results[0]["of 4"], "gpt", [batch_of(0, 0, 0)])
    else:
        check_gradients(results[0]["gradients"][name], name, [batch_of(share, 0, 0) for share in (0, 1)])


@pytest.mark.parametrize("level", ["O3", "O3-split"])
def test_shards_put_together_are_the_converted_model(results: list[Result], level: str) -> None:
    for result in results:
        assert all(result["converted"][level].values())
        assert len(result["converted"][level]) == 3 * 4


def test_a_nan_in_one_shard_makes_all_ranks_skip(results: list[Result]) -> None:
    assert [result["poisoned"] for result in results] == [[{"skipped": 1, "kept": True}] * 2] * NUM_RANKS


@pytest.mark.parametrize("case", [("O3", 1), ("O3-split", 0)])
def test_a_checkpoint_of_shards_resumes_to_the_bit(results: list[Result], case: tuple[str, int]) -> None:
    for result in results:
        check_resumed(result["resumed"][case])


@pytest.mark.parametrize("case", [("O3", 1), ("O3-split", 0)])
def test_a_checkpoint_of_shards_is_read_by_one_process(results: list[Result], case: tuple[str, int]) -> None:
    model, optimizer = make("gpt", case[0])
    state = checkpoint.load(
        results[0]["folder"] / f"{case[0]} {case[1]}", checkpoint_ref(results[0]["folder"] / f"{case[0]} {case[1]}")
    )
    resume(model, optimizer, state["model"], state["optimizer"])
    parts = [
        float(model.loss(batch_of(share, 1, part)).loss.detach()) / MICRO_BATCHES
        for share in (0, 1)
        for part in range(MICRO_BATCHES)
    ]
    losses = [result["resumed"][case]["losses"][0][0] for result in results]
    assert sum(parts) / 2 == pytest.approx(sum(losses) / NUM_RANKS, rel=LOSS_TOLERANCE["fp8"])


def test_a_job_trains_and_resumes(results: list[Result]) -> None:
    """From its checkpoint at the same degree to the bit; on one rank the curve continues."""
    first, alone = check_jobs(results[0])
    assert first.of(StartedReport)[0].num_parameters == alone.of(StartedReport)[0].num_parameters
