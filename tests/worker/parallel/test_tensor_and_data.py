"""Two tensor ranks with two data ranks (gloo): each family at each level and ZeRO stage, jobs, and four tensor ranks."""

import pytest
import torch

from api_schemas import EvaluationReport, StartedReport
from api_schemas.levels import LEVELS
from tests.ranks import free_port, run_ranks
from tests.text import write_corpus
from tests.worker.parallel.tensor_runs import (
    GRADIENT_ERROR,
    LOSS_TOLERANCE,
    MICRO_BATCHES,
    NORM_TOLERANCE,
    Result,
    batch_of,
    checkpoint_ref,
    job,
    make,
    reference,
    run_job,
    work,
)
from worker import checkpoint
from worker.config import RankEnv
from worker.resume import resume

pytestmark = [pytest.mark.slow, pytest.mark.matrix]
DIVIDED_LEVELS = [name for name, level in LEVELS.items() if not level.loss_scaling and level.engine == "octet"]
STAGES = {"gpt": (0, 1, 2, 3), "llama": (0, 3)}
CASES = [(family, level, stage) for family, stages in STAGES.items() for level in DIVIDED_LEVELS for stage in stages]
NUM_RANKS = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Result]:
    """What each rank found, for the selected cases."""
    folder = tmp_path_factory.mktemp("tensor")
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen = [item.callspec.params for item in tests if item.function is test_ranks_train_as_one_process_does]
    cases = sorted({(params["family"], params["level"], params["stage"]) for params in chosen})
    write_corpus(folder / "corpus")
    run_ranks(work, ([free_port() for _ in range(3)], str(folder), cases), NUM_RANKS)
    found: list[Result] = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]
    return [result | {"folder": folder} for result in found]


@pytest.mark.parametrize(("family", "level", "stage"), CASES)
def test_ranks_train_as_one_process_does(results: list[Result], family: str, level: str, stage: int) -> None:
    ranks = [result[family, level, stage] for result in results]
    losses, norms = reference(family, level, 2)
    gemm = LEVELS[level].gemm
    means = [sum(of_ranks) / NUM_RANKS for of_ranks in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert means == pytest.approx(losses, rel=LOSS_TOLERANCE[gemm])
    assert ranks[0]["norms"] == pytest.approx(norms, rel=NORM_TOLERANCE[gemm])
    assert all(rank["norms"] == ranks[0]["norms"] for rank in ranks)


@pytest.mark.parametrize(("family", "level", "stage"), CASES)
def test_what_ranks_have_alike_stays_alike(results: list[Result], family: str, level: str, stage: int) -> None:
    """Losses of the ranks of one tensor group; scales of weights, and replicated parameters, of all ranks."""
    ranks = [result[family, level, stage] for result in results]
    assert ranks[0]["losses"] == ranks[1]["losses"] != ranks[2]["losses"] == ranks[3]["losses"]
    for rank in ranks[1:]:
        for kind in ("scales", "whole"):
            assert rank[kind].keys() == ranks[0][kind].keys()
            assert all(torch.equal(value, ranks[0][kind][name]) for name, value in rank[kind].items())


@pytest.mark.parametrize("name", ["gpt", "llama", "of 4"])
def test_gradients_are_those_of_one_process(results: list[Result], name: str) -> None:
    """On two tensor ranks with two data ranks, and on four tensor ranks."""
    model, _ = make("gpt" if name == "of 4" else name, "fp32")
    shares = 1 if name == "of 4" else 2
    for share in range(shares):
        (model.loss(batch_of(share, 0, 0)).loss / shares).backward()
    found = results[0]["of 4"] if name == "of 4" else results[0]["gradients"][name]
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = (found[parameter_name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert float(error) < GRADIENT_ERROR, parameter_name


@pytest.mark.parametrize("level", ["O3", "O3-split"])
def test_shards_put_together_are_the_converted_model(results: list[Result], level: str) -> None:
    for result in results:
        assert all(result["converted"][level].values())
        assert len(result["converted"][level]) == 3 * 4


def test_a_nan_in_one_shard_makes_all_ranks_skip(results: list[Result]) -> None:
    assert [result["poisoned"] for result in results] == [[{"skipped": 1, "kept": True}] * 2] * NUM_RANKS


@pytest.mark.parametrize("case", [("O3", 1), ("O3-split", 0)])
def test_a_checkpoint_of_shards_resumes_to_the_bit(results: list[Result], case: tuple[str, int]) -> None:
    """Also through whole tensors: the weights have the same codes, and moments are encoded again."""
    for result in results:
        found = result["resumed"][case]
        before, same, from_whole = found["losses"]
        assert found["states"][0] == found["states"][1]
        assert found["codes"][0] == found["codes"][1]
        assert before == same
        assert before == pytest.approx(from_whole, rel=LOSS_TOLERANCE["fp8"])


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
    folder = results[0]["folder"]
    first, again = results[0]["jobs"]
    alone = run_job(job(folder / "corpus", 1, 1), RankEnv(), folder / "alone")
    continued = run_job(
        job(folder / "corpus", 1, 1), RankEnv(), folder / "job", (checkpoint_ref(folder / "job" / "checkpoints"),)
    )
    assert first.losses() == pytest.approx(alone.losses(), rel=LOSS_TOLERANCE["fp8"])
    assert again.losses() == first.losses()[1:]
    assert continued.losses() == pytest.approx(first.losses()[1:], rel=LOSS_TOLERANCE["fp8"])
    assert first.of(StartedReport)[0].num_parameters == alone.of(StartedReport)[0].num_parameters
    evaluations = [run.of(EvaluationReport)[-1] for run in (first, alone)]
    assert evaluations[0].loss == pytest.approx(evaluations[1].loss, rel=LOSS_TOLERANCE["fp8"])
    assert [run.of(EvaluationReport)[-1].tokens for run in (first, alone)] == [evaluations[0].tokens] * 2
