"""What a job says when its model cannot be made in pieces, or does not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from api_schemas import FailureReason, JobSpec, OptimizerSpec
from api_schemas.precision import PrecisionSpec
from tests.worker.parallel.init_runs import document
from worker import memory_report
from worker.config import RankEnv, resolve
from worker.errors import reason_of
from worker.mesh import Axis
from worker.models import build_model
from worker.models.meta import parameters_on_meta
from worker.optim import LowBitOptimizer, build_optimizer
from worker.optim.schedule import parameter_groups
from worker.parallel import Parallel
from worker.parallel.axes import Axes
from worker.parallel.materialize import DoesNotFit, Unfilled, materialize, needed_bytes
from worker.prepare import prepare
from worker.pretrained.start import divides, why_whole
from worker.pretrained.values import DrawnValues

CPU = torch.device("cpu")


class OutOfMemory(DrawnValues):
    """Values for which there is no memory from the fourth parameter on."""

    def read(self, parameter: Unfilled) -> Tensor:
        if parameter is self.unfilled[3]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().read(parameter)


def divided(kind: type[DrawnValues], level: str) -> tuple[Any, LowBitOptimizer, Parallel, DrawnValues]:
    """A model without values on one rank, whose axes divide nothing."""
    spec = JobSpec.model_validate(document(Path("/corpus"), "gpt", level, 1)).model
    with parameters_on_meta():
        model = build_model(spec, 0)
    values = kind(model, 0, CPU)
    made = build_optimizer(parameter_groups(model, OptimizerSpec()), OptimizerSpec())
    prepared = prepare(model, made, PrecisionSpec.model_validate({"level": level}), source=values)
    assert isinstance(prepared.optimizer, LowBitOptimizer)
    parallel = Parallel(prepared.model, prepared.optimizer, Axes.of_data(Axis("data", 1, 0, CPU)))
    return prepared.model, prepared.optimizer, parallel, values


@pytest.mark.parametrize("level", ["O2", "O3", "O3-split", "bf16-amp"])
def test_what_it_needs_is_what_it_then_holds(level: str) -> None:
    model, optimizer, parallel, values = divided(DrawnValues, level)
    needed = needed_bytes(model, optimizer, parallel)
    materialize(model, optimizer, parallel, values, parallel.replicas)
    held = memory_report(model, optimizer)
    assert needed == pytest.approx(sum(held.values()), rel=0.001)
    assert model.octet_report.bytes_by_class == held


def test_a_model_that_does_not_fit_names_what_it_needs() -> None:
    model, optimizer, parallel, values = divided(OutOfMemory, "O2")
    with pytest.raises(DoesNotFit, match=r"share of weights and optimizer states takes 0\.00 GiB.*after 3 of 100 ") as raised:
        materialize(model, optimizer, parallel, values, parallel.replicas)
    assert reason_of(raised.value) is FailureReason.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"precision": {"level": "ao"}}, "level ao"),
        ({"training": {"ema_decay": 0.9}, "parallelism": {"tensor": 2}}, "training.ema_decay"),
        ({"model": {"family": "python", "entrypoint": "math:sqrt"}}, "family python"),
    ],
)
def test_what_is_made_whole_says_why(change: dict[str, Any], says: str | None) -> None:
    job = document(Path("/corpus"), "gpt", "O2", 2, zero_stage=1)
    job = job | change | {"training": job["training"] | change.get("training", {})}
    config = resolve(JobSpec.model_validate(job), RankEnv(world_size=2))
    assert divides(config)
    reason = why_whole(config)
    assert reason is None if says is None else says in str(reason)


@pytest.mark.parametrize(("parallelism", "num_ranks"), [({}, 2), ({"zero_stage": 3}, 1)])
def test_a_model_that_nobody_divides_is_made_as_ever(parallelism: dict[str, Any], num_ranks: int) -> None:
    job = document(Path("/corpus"), "gpt", "O2", num_ranks, **parallelism)
    assert not divides(resolve(JobSpec.model_validate(job), RankEnv(world_size=num_ranks)))
