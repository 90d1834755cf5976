"""A job names its optimizer: what is built, and that a job with Lion learns and resumes at fp32 and in few bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from octet.api_schemas import JobSpec, OptimizerSpec
from octet.worker import plain_state_dict
from octet.worker.checkpoint import load_folder
from octet.worker.common.config import RankEnv, resolve
from octet.worker.mesh import Mesh
from octet.worker.optim import LowBitLion, LowBitMuon, LowBitSGD, build_optimizer
from octet.worker.pretrained.from_checkpoint import averaged, trained
from octet.worker.train.loop import Trainer
from tests.kit.training import Recorder

SPEC = {"learning_rate": 2e-3, "weight_decay": 0.2, "betas": (0.8, 0.9)}


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("lion", LowBitLion)])
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


@pytest.mark.system
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


@pytest.mark.parametrize(
    ("level", "options"),
    [
        ("fp32", {}),
        ("O2", {"offload_optimizer": True}),
        ("O3-split-8bit", {"gradient_clip": None, "gradient_release": True}),
    ],
)
def test_a_job_with_muon(spec_document: dict[str, Any], level: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Matrices have one state, embedding and norms two; a resumed job repeats the losses to the bit."""
    document = spec_document | {"precision": {"level": level}}
    document["training"] |= {
        "steps": 12,
        "checkpoint_every": 8,
        "optimizer": {"name": "muon", "learning_rate": 2e-2},
        **options,
    }
    config = resolve(JobSpec.model_validate(document), RankEnv())
    assert config.optimizer.momentum == 0.95
    with Mesh(config.env, torch.device("cpu")) as mesh:
        whole, resumed = Recorder(), Recorder()
        trainer = Trainer(config, mesh, whole, tmp_path)
        trainer.run()
        optimizer = trainer.optimizer
        assert isinstance(optimizer, LowBitMuon)
        states = {name: set(optimizer.state[held]) for name, held in trainer.model.named_parameters()}
        at_step_8 = tuple(ref for ref in whole.checkpoints() if ref.step == 8)
        Trainer(config, mesh, resumed, tmp_path).run(at_step_8)
    assert "exp_avg_sq" not in states["blocks.0.attention.qkv.weight"] | states["blocks.0.mlp.down.weight"]
    assert "exp_avg_sq" in states["token_embedding.weight"] & states["blocks.0.mlp.up.bias"]
    losses = whole.losses()
    assert losses[-1] < losses[0] - 1.0
    assert resumed.losses() == losses[8:]


def test_muon_keeps_a_momentum_that_is_set() -> None:
    spec = OptimizerSpec.model_validate({"name": "muon", "momentum": 0.9})
    assert (spec.momentum, OptimizerSpec(name="muon").momentum, OptimizerSpec(name="sgd").momentum) == (0.9, 0.95, 0.9)
    assert OptimizerSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_sgd_is_bounded_by_the_clip() -> None:
    parameter = nn.Parameter(torch.zeros(4, 4))
    spec = OptimizerSpec(name="sgd", learning_rate=0.1, momentum=0.8)
    optimizer = build_optimizer([{"params": [parameter]}], spec, gradient_clip=0.5)
    assert type(optimizer) is LowBitSGD
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["max_gradient"]) == (0.8, 0.5)


RECIPE = {
    "optimizer": {"name": "sgd", "learning_rate": 0.5, "weight_decay": 1e-3, "no_decay": ["*embedding*"], "layer_decay": 0.8},
    "schedule": {"name": "warmup_stable_decay", "warmup_steps": 2, "decay_fraction": 0.3, "final_fraction": 0.0},
    "ema_decay": 0.6,
}


@pytest.mark.parametrize("level", ["O2", pytest.param("fp32", marks=pytest.mark.matrix)])
def test_a_job_with_every_option_learns_resumes_and_evaluates_the_average(
    spec_document: dict[str, Any], level: str, tmp_path: Path
) -> None:
    document = spec_document | {"precision": {"level": level}}
    document["training"] = document["training"] | {"steps": 16, "checkpoint_every": 8, **RECIPE}
    config = resolve(JobSpec.model_validate(document), RankEnv())
    with Mesh(config.env, torch.device("cpu")) as mesh:
        whole, resumed = Recorder(), Recorder()
        trainer = Trainer(config, mesh, whole, tmp_path)
        summary = trainer.run()
        average, model = trainer.job.average.best(trainer.model), trainer.model
        assert average is not model
        at_step_8 = tuple(ref for ref in whole.checkpoints() if ref.step == 8)
        again = Trainer(config, mesh, resumed, tmp_path)
        assert again.run(at_step_8).evaluation_loss == summary.evaluation_loss
    assert summary.evaluation_loss == trainer.evaluate()["loss"]
    assert resumed.losses() == whole.losses()[8:]
    assert whole.losses()[-1] < whole.losses()[0] - 0.3
    assert trainer.progress.memory_bytes["other"] >= 4 * summary.num_parameters
    assert torch.equal(next(average.parameters()), next(again.job.average.best(again.model).parameters()))
    state = load_folder(tmp_path / "checkpoints" / whole.checkpoints()[0].name)
    exported = averaged(state, trained(state))
    for name, value in average.state_dict().items():
        assert torch.equal(exported.state_dict()[name], value), name


@pytest.mark.matrix
@pytest.mark.parametrize("levels", [("O2", "fp32"), ("fp32", "O3"), ("O3", "O2")])
def test_an_average_continues_at_another_level(spec_document: dict[str, Any], levels: tuple[str, str], tmp_path: Path) -> None:
    training = spec_document["training"] | {"checkpoint_every": 4, "ema_decay": 0.6}
    recorder, averages = Recorder(), []
    for level, steps in zip(levels, (4, 5), strict=True):
        document = spec_document | {"precision": {"level": level}, "training": training | {"steps": steps}}
        config = resolve(JobSpec.model_validate(document), RankEnv())
        with Mesh(config.env, torch.device("cpu")) as mesh:
            trainer = Trainer(config, mesh, recorder, tmp_path)
            trainer.run(recorder.checkpoints())
        averages.append(plain_state_dict(trainer.job.average.best(trainer.model)))
    values = plain_state_dict(trainer.model)
    for name in ("blocks.0.mlp.up.weight", "token_embedding.weight"):
        expected = 0.6 * averages[0][name] + 0.4 * values[name].float()
        assert not torch.equal(averages[0][name], values[name])
        torch.testing.assert_close(averages[1][name], expected, rtol=1e-5, atol=1e-6)
