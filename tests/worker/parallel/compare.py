"""Helpers for tests of divided models: they collect the ranks' results and compare them with those of one process."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octet.api_schemas import EvaluationReport
from octet.api_schemas.levels import LEVELS
from octet.worker.common.config import RankEnv
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks, saved_by_ranks
from tests.kit.training import Recorder
from tests.worker.parallel.job_runs import checkpoint_ref, job, run_job
from tests.worker.parallel.tensor_runs import LOSS_TOLERANCE, NORM_TOLERANCE, Case, Result, make, reference

GRADIENT_ERROR = 1e-6
"""Largest error relative to the largest element, in fp32. Measured: 2.4e-7."""
DIVIDED_LEVELS = [name for name, level in LEVELS.items() if not level.loss_scaling and level.engine == "octet"]
CASES: list[Case] = [
    (family, level, stage)
    for family, stages in (("gpt", (0, 1, 2, 3)), ("llama", (0, 3)))
    for level in DIVIDED_LEVELS
    for stage in stages
]
"""Each family at each level and ZeRO stage."""


def found_by_ranks(
    work: Callable[..., None], num_ranks: int, folder: Path, cases: Sequence[tuple[Any, ...]] = (), num_worlds: int = 1
) -> list[Result]:
    """Return what each rank found: what `work(rank, ports, folder, cases)` has saved in the folder under its number.

    num_worlds: process groups that it makes one after the other, each with a port. Its processes are forks of one that has
    loaded what they need: a world of two starts in 0.1 s.
    """
    run_ranks(work, ([free_port() for _ in range(num_worlds)], str(folder), cases), num_ranks)
    return [found | {"folder": folder} for found in saved_by_ranks(folder, num_ranks)]


def chosen_cases(
    request: pytest.FixtureRequest, test: Callable[..., None], names: Sequence[str] = ("family", "level", "stage")
) -> list[tuple[Any, ...]]:
    """Return the values of these arguments of a test that this session runs."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.function is test]
    return sorted({tuple(item.callspec.params[name] for name in names) for item in items})


def check_training(ranks: Sequence[Result], family: str, level: str, num_shares: int) -> None:
    """Losses and norms are those of one process on all shares of the batch; what ranks hold alike stayed alike."""
    losses, norms = reference(family, level, num_shares)
    gemm = LEVELS[level].gemm
    means = [sum(of_ranks) / len(ranks) for of_ranks in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert means == pytest.approx(losses, rel=LOSS_TOLERANCE[gemm])
    assert ranks[0]["norms"] == pytest.approx(norms, rel=NORM_TOLERANCE[gemm])
    for rank in ranks[1:]:
        assert rank["norms"] == ranks[0]["norms"]
        for kind in ("scales", "whole"):
            assert rank[kind].keys() == ranks[0][kind].keys()
            assert all(torch.equal(value, ranks[0][kind][name]) for name, value in rank[kind].items())
    assert ranks[0]["whole"]


def check_gradients(found: Result, family: str, batches: Sequence[Mapping[str, Tensor]]) -> None:
    """The mean loss, and fp32 gradients, are those of one process on these batches together."""
    model, _ = make(family, "fp32")
    losses = [model.loss(batch).loss / len(batches) for batch in batches]
    for loss in losses:
        loss.backward()
    assert found["loss"] == pytest.approx(sum(float(loss.detach()) for loss in losses), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = (found["gradients"][name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert float(error) < GRADIENT_ERROR, name


def check_resumed(found: Result) -> None:
    """At the same degrees to the bit. Through whole tensors the weights have the same codes, and moments are encoded again."""
    before, same, from_whole = found["losses"]
    assert found["states"][0] == found["states"][1]
    assert found["codes"][0] == found["codes"][1]
    assert before == same
    assert before == pytest.approx(from_whole, rel=LOSS_TOLERANCE["fp8"])


def check_jobs(result: Result) -> tuple[Recorder, Recorder]:
    """From its own checkpoint a job resumes to the bit, and on one rank its curve continues; it is the curve of one process.

    Returns the job's reports, and those of one process.
    """
    folder: Path = result["folder"]
    first, again = result["jobs"]
    runs: dict[str, Any] = {"alone": (), "job": (checkpoint_ref(folder / "job" / "checkpoints"),)}
    alone, continued = (run_job(job(folder / "corpus", 1), RankEnv(), folder / name, refs) for name, refs in runs.items())
    assert first.losses() == pytest.approx(alone.losses(), rel=LOSS_TOLERANCE["fp8"])
    assert again.losses() == first.losses()[1:]
    assert continued.losses() == pytest.approx(first.losses()[1:], rel=LOSS_TOLERANCE["fp8"])
    evaluations = [run.of(EvaluationReport)[-1] for run in (first, alone)]
    assert evaluations[0].loss == pytest.approx(evaluations[1].loss, rel=LOSS_TOLERANCE["fp8"])
    assert evaluations[0].tokens == evaluations[1].tokens
    return first, alone
