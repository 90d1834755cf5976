"""A job names its optimizer: what is built, and that a job with Lion learns and resumes at fp32 and in few bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from api_schemas import JobSpec, OptimizerSpec
from tests.worker.test_train import Recorder
from worker.config import RankEnv, resolve
from worker.mesh import Mesh
from worker.optim import LowBitLion, build_optimizer
from worker.train import Trainer

SPEC = {"learning_rate": 2e-3, "weight_decay": 0.2, "betas": (0.8, 0.9)}


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("lion", LowBitLion)])
def test_build(name: str, kind: type[torch.optim.Optimizer]) -> None:
    decayed, other = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))
    groups = [{"params": [decayed]}, {"params": [other], "weight_decay": 0.0}]
    optimizer = build_optimizer(groups, OptimizerSpec.model_validate({"name": name, **SPEC}))
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert all((group["lr"], tuple(group["betas"])) == (2e-3, (0.8, 0.9)) for group in optimizer.param_groups)


def test_a_stored_spec_is_read_again() -> None:
    spec = OptimizerSpec(name="lion")
    assert OptimizerSpec.model_validate(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize("level", ["fp32", "O2", "O3-split-8bit"])
def test_a_job_with_lion(spec_document: dict[str, Any], level: str, tmp_path: Path) -> None:
    document = spec_document | {"precision": {"level": level}}
    document["training"] |= {"steps": 12, "checkpoint_every": 8, "optimizer": {"name": "lion", "learning_rate": 5e-3}}
    config = resolve(JobSpec.model_validate(document), RankEnv())
    with Mesh(config.env, torch.device("cpu")) as mesh:
        whole, resumed = Recorder(), Recorder()
        trainer = Trainer(config, mesh, whole, tmp_path)
        trainer.run()
        assert isinstance(trainer.optimizer, LowBitLion)
        assert trainer.progress.memory_bytes["exp_avg_sq"] == 0
        at_step_8 = tuple(ref for ref in whole.checkpoints() if ref.step == 8)
        Trainer(config, mesh, resumed, tmp_path).run(at_step_8)
    losses = whole.losses()
    assert losses[-1] < losses[0] - 1.0
    assert resumed.losses() == losses[8:]
