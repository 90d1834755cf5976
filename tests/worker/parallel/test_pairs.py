"""Pairs of strategies on four real ranks (gloo): each family at each level and ZeRO stage trains as one process does.

`pair_runs.PAIRS` is the table. A default run takes one case of it, on context and sequence ranks; `make test-parallel` all.
Pipelines with tensor ranks are jobs, and have a file of their own (`test_pipeline_and_tensor.py`).
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from octet.api_schemas import StartedReport
from octet.worker import checkpoint
from octet.worker.checkpoint.resume import resume
from tests.kit.text import write_corpus
from tests.worker.parallel.compare import (
    CASES,
    check_gradients,
    check_jobs,
    check_resumed,
    check_training,
    chosen_cases,
    found_by_ranks,
)
from tests.worker.parallel.context_runs import check_own_loop, of_documents
from tests.worker.parallel.job_runs import checkpoint_ref
from tests.worker.parallel.pair_runs import NUM_RANKS, NUM_WORLDS, PAIRS, Pair, work
from tests.worker.parallel.tensor_runs import LOSS_TOLERANCE, MICRO_BATCHES, Result, batch_of, make, make_network

pytestmark = [pytest.mark.slow, pytest.mark.system]
FindPair = Callable[[str], list[Result]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> FindPair:
    """Return a function that gives each rank's results for a pair.

    The ranks run the selected cases. If tests of the matrix are selected, they run everything else, too.
    """
    finds_all = any(item.path == request.path and item.get_closest_marker("matrix") for item in request.session.items)
    chosen = chosen_cases(request, test_ranks_train_as_one_process_does, ("pair", "family", "level", "stage"))
    found: dict[str, list[Result]] = {}

    def find(name: str) -> list[Result]:
        if name not in found:
            folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
            if finds_all:
                write_corpus(folder / "corpus")
            wanted = name, [tuple(case) for pair, *case in chosen if pair == name], finds_all
            found[name] = found_by_ranks(work, NUM_RANKS, folder, wanted, num_worlds=NUM_WORLDS)
        return found[name]

    return find


def rows(of: Callable[[Pair], Iterable[Any]]) -> list[Any]:
    """Return each pair of the table with each value that it has; the fast pair's belong to the default run."""
    return [
        pytest.param(name, value, marks=() if pair.fast else pytest.mark.matrix)
        for name, pair in PAIRS.items()
        for value in of(pair)
    ]


def having(has: Callable[[Pair], bool]) -> list[Any]:
    """Return the pairs of the table for which it is True."""
    return [pytest.param(name, marks=pytest.mark.matrix) for name, pair in PAIRS.items() if has(pair)]


def _cases() -> list[Any]:
    return [
        pytest.param(name, *case, marks=() if case in pair.fast else pytest.mark.matrix)
        for name, pair in PAIRS.items()
        for case in CASES
    ]


@pytest.mark.parametrize(("pair", "family", "level", "stage"), _cases())
def test_ranks_train_as_one_process_does(results: FindPair, pair: str, family: str, level: str, stage: int) -> None:
    """Ranks of a tensor group have one loss, of their tokens; scales of weights and whole parameters are alike everywhere.

    Measured with context and data ranks, at most: losses 4e-8 in fp32, 1e-4 in bf16, 2e-4 in FP8; norms 1e-7, 8e-4 and 4e-3.
    """
    ranks = [result[family, level, stage] for result in results(pair)]
    check_training(ranks, family, level, PAIRS[pair].layout.data)
    if PAIRS[pair].tensor:
        assert ranks[0]["losses"] == ranks[1]["losses"] != ranks[2]["losses"] == ranks[3]["losses"]


@pytest.mark.parametrize(("pair", "family"), rows(lambda pair: pair.gradients_of))
def test_gradients_are_those_of_one_process(results: FindPair, pair: str, family: str) -> None:
    """Ranks of one sample read rows with several documents, and have different numbers of targets."""
    documents = PAIRS[pair].batch()
    batches = [documents] if documents else [batch_of(share, 0, 0) for share in range(PAIRS[pair].layout.data)]
    for result in results(pair):
        check_gradients(result["gradients"][family], family, batches)


@pytest.mark.matrix
@pytest.mark.parametrize(("pair", "family"), rows(lambda pair: pair.four))
def test_gradients_on_four_ranks_of_one_degree_are_those_of_one_process(results: FindPair, pair: str, family: str) -> None:
    """Some context ranks have no target at all."""
    for result in results(pair):
        check_gradients(result["four"][family], family, [PAIRS[pair].batch() or batch_of(0, 0, 0)])


@pytest.mark.parametrize(("pair", "level"), rows(lambda pair: pair.converted))
def test_shards_put_together_are_the_converted_model(results: FindPair, pair: str, level: str) -> None:
    for result in results(pair):
        assert all(result["converted"][level].values())
        assert len(result["converted"][level]) == 3 * 4


@pytest.mark.parametrize(("pair", "stage"), rows(lambda pair: pair.poisoned))
def test_a_nan_in_one_shard_makes_all_ranks_skip(results: FindPair, pair: str, stage: int) -> None:
    assert [result["poisoned"][stage] for result in results(pair)] == [{"skipped": 1, "kept": True}] * NUM_RANKS


@pytest.mark.parametrize(("pair", "case"), rows(lambda pair: pair.resumed))
def test_a_checkpoint_of_shards_resumes_to_the_bit(results: FindPair, pair: str, case: tuple[str, int]) -> None:
    for result in results(pair):
        check_resumed(result["resumed"][case])


@pytest.mark.matrix
@pytest.mark.parametrize("case", PAIRS["tensor data"].resumed)
def test_a_checkpoint_of_shards_is_read_by_one_process(results: FindPair, case: tuple[str, int]) -> None:
    ranks = results("tensor data")
    model, optimizer = make("gpt", case[0])
    folder = ranks[0]["folder"] / f"{case[0]} {case[1]}"
    state = checkpoint.load(folder, checkpoint_ref(folder))
    resume(model, optimizer, state["model"], state["optimizer"])
    parts = [
        float(model.loss(batch_of(share, 1, part)).loss.detach()) / MICRO_BATCHES
        for share in (0, 1)
        for part in range(MICRO_BATCHES)
    ]
    losses = [result["resumed"][case]["losses"][0][0] for result in ranks]
    assert sum(parts) / 2 == pytest.approx(sum(losses) / NUM_RANKS, rel=LOSS_TOLERANCE["fp8"])


@pytest.mark.parametrize("pair", having(lambda pair: pair.evaluated))
def test_an_evaluation_counts_all_targets_of_the_whole_vocabulary(results: FindPair, pair: str) -> None:
    with torch.no_grad():
        losses = make_network("llama").eval().loss(of_documents())
    expected = [float(losses.loss), float(losses.metrics["token_accuracy"]), losses.num_targets]
    for result in results(pair):
        assert result["evaluated"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("pair", having(lambda pair: pair.draws))
def test_each_rank_rounds_its_gradients_by_numbers_of_its_own(results: FindPair, pair: str) -> None:
    """Shards of a weight are consecutive in its random stream, the same on both context ranks."""
    draws = [result["draws"] for result in results(pair)]
    assert sorted(found["gradient"] for found in draws) == [(rank, NUM_RANKS) for rank in range(NUM_RANKS)]
    shards = [found["shard"] for found in draws]
    assert shards[:2] == shards[2:]
    assert shards[0].stop == shards[1].start


@pytest.mark.parametrize("pair", having(lambda pair: pair.own_loop))
def test_somebodys_own_loop_combines_the_degrees(results: FindPair, pair: str) -> None:
    check_own_loop([result["own loop"] for result in results(pair)])


@pytest.mark.parametrize("pair", having(lambda pair: pair.jobs))
def test_a_job_trains_and_resumes(results: FindPair, pair: str) -> None:
    """In the same layout to the bit; on one rank the curve continues. Its blocks are computed again in the backward pass."""
    first, alone = check_jobs(results(pair)[0])
    assert first.of(StartedReport)[0].num_parameters == alone.of(StartedReport)[0].num_parameters
