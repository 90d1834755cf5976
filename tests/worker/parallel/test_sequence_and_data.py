"""Sequence parallelism with two data ranks (gloo): each family at each level and ZeRO stage, a job, and four tensor ranks."""

from pathlib import Path

import pytest
import torch

from api_schemas import EvaluationReport, Layout
from api_schemas.levels import LEVELS
from tests.ranks import free_port, run_ranks
from tests.text import write_corpus
from tests.worker.parallel.tensor_runs import (
    GRADIENT_ERROR,
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    Result,
    batch_of,
    checkpoint_ref,
    gradients,
    job,
    make,
    reference,
    run_job,
    trained,
)
from tests.worker.parallel.test_tensor_and_data import CASES, NUM_RANKS
from worker.config import RankEnv
from worker.mesh import Mesh, make_axis
from worker.parallel.axes import Axes

pytestmark = [pytest.mark.slow, pytest.mark.matrix]


def work(rank: int, ports: list[int], folder: str, cases: list[tuple[str, str, int]]) -> None:
    torch.set_num_threads(1)
    envs = [RankEnv(rank=rank, world_size=4, master_port=port) for port in ports]
    spec, job_folder = job(Path(folder, "corpus"), 4, 2, sequence=True), Path(folder, "job")
    first = run_job(spec, envs[0], job_folder)
    again = run_job(spec, envs[1], job_folder, (checkpoint_ref(job_folder / "checkpoints"),))
    found: Result = {"jobs": [first, again]}
    with Mesh(envs[2], torch.device("cpu"), Layout(4, tensor=2)) as mesh:
        found |= {case: trained(Axes.of_mesh(mesh), *case, sequence=True) for case in cases}
        alone = make_axis(Layout(4, tensor=4), "data", rank, mesh.device)
        found["of 4"] = gradients(Axes(alone, mesh.world, mesh.world), "gpt", sequence=True)
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Result]:
    """What each rank found, for the selected cases."""
    folder = tmp_path_factory.mktemp("sequence")
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
    for rank in ranks[1:]:
        for kind in ("scales", "whole"):
            assert all(torch.equal(value, ranks[0][kind][name]) for name, value in rank[kind].items())


def test_gradients_on_four_tensor_ranks_are_those_of_one_process(results: list[Result]) -> None:
    model, _ = make("gpt", "fp32")
    model.loss(batch_of(0, 0, 0)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = (results[0]["of 4"][name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert float(error) < GRADIENT_ERROR, name


def test_a_job_trains_and_resumes_with_and_without_it(results: list[Result]) -> None:
    """To the bit in the same layout; on one rank the curve continues. Its blocks are computed again in the backward pass."""
    folder = results[0]["folder"]
    first, again = results[0]["jobs"]
    alone = run_job(job(folder / "corpus", 1, 1), RankEnv(), folder / "alone")
    continued = run_job(
        job(folder / "corpus", 1, 1), RankEnv(), folder / "job", (checkpoint_ref(folder / "job" / "checkpoints"),)
    )
    assert first.losses() == pytest.approx(alone.losses(), rel=LOSS_TOLERANCE["fp8"])
    assert again.losses() == first.losses()[1:]
    assert continued.losses() == pytest.approx(first.losses()[1:], rel=LOSS_TOLERANCE["fp8"])
    evaluations = [run.of(EvaluationReport)[-1] for run in (first, alone)]
    assert evaluations[0].loss == pytest.approx(evaluations[1].loss, rel=LOSS_TOLERANCE["fp8"])
