"""Jobs whose model is divided into stages: what each rank finds out, for `test_pipeline.py` to compare with one process."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from api_schemas import JobSpec, StepReport
from tests.worker.test_train import Recorder
from worker import checkpoint
from worker.config import RankEnv, resolve
from worker.fp8.gradient import Float8Gradient
from worker.mesh import Mesh
from worker.train import Trainer

LLAMA = {
    "family": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 4,
    "num_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_sequence_length": 16,
    "tie_embeddings": False,
}
GPT = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 256, "max_sequence_length": 16}
STEPS = 3
Result = dict[str, Any]


def document(
    corpus: Path, model: dict[str, Any], precision: dict[str, Any], workers: int = 1, **parallelism: Any
) -> dict[str, Any]:
    """A job of four micro-batches for each data rank."""
    num_data_ranks = workers // parallelism.get("pipeline", 1)
    return {
        "name": "staged",
        "model": model,
        "precision": precision,
        "data": {"path": str(corpus)},
        "training": {
            "steps": STEPS,
            "global_batch_size": 8,
            "micro_batch_size": 2 // num_data_ranks,
            "sequence_length": 16,
            "optimizer": {"learning_rate": 3e-3},
            "checkpoint_every": 2,
            "eval_batches": 2,
            "seed": 1,
        },
        "parallelism": parallelism,
        "resources": {"workers": workers},
    }


def run_job(job: dict[str, Any], env: RankEnv, folder: Path) -> Result:
    """Losses, norms and evaluation of a job, as the rank reports them, and what it knows of itself."""
    recorder, config = Recorder(), resolve(JobSpec.model_validate(job), env)
    checkpoints = tuple(ref for ref in checkpoint.complete_in(folder / "checkpoints") if ref.step < STEPS)
    with Mesh(env, torch.device("cpu"), config.layout) as mesh:
        trainer = Trainer(config, mesh, recorder, folder)
        summary = trainer.run(checkpoints)
        names = list(trainer.model.state_dict())
    return {
        "losses": recorder.losses(),
        "norms": [report.gradient_norm for report in recorder.of(StepReport)],
        "evaluation": (summary.evaluation_loss, summary.evaluation_metrics),
        "num_parameters": summary.num_parameters,
        "sent": summary.sent_bytes,
        "names": names,
    }


def saved(folder: Path) -> dict[str, Tensor]:
    """The whole tensors of model and optimizer in the newest checkpoint of a job, by path, as bytes."""
    state = checkpoint.load(folder / "checkpoints", checkpoint.complete_in(folder / "checkpoints")[0])
    return dict(_tensors({"model": state["model"], "optimizer": state["optimizer"]}))


def _tensors(value: Any, path: str = "") -> Any:
    if isinstance(value, Tensor):
        yield path, _bytes(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{path}/{key}")


def poisoned(job: dict[str, Any], env: RankEnv, folder: Path) -> Result:
    """A step in which the last stage alone has a NaN gradient: how many steps were skipped, and whether weights stayed."""
    config = resolve(JobSpec.model_validate(job), env)
    with Mesh(env, torch.device("cpu"), config.layout) as mesh:
        trainer = Trainer(config, mesh, Recorder(), folder)
        before = {name: value.detach().clone() for name, value in trainer.model.state_dict().items() if "weight" in name}
        trainer._forward_backward()
        if mesh.owns_loss:
            weight = trainer.model.get_parameter("blocks.3.mlp.up.weight")
            assert isinstance(weight.grad, Float8Gradient)
            weight.grad = Float8Gradient.quantize(torch.full(weight.shape, torch.nan), weight.grad.position)
        trainer.parallel.synchronize()
        norm = float(trainer.parallel.clip_grad_norm_(1.0))
        trainer.optimizer.step()
        trainer.parallel.publish()
        after = trainer.model.state_dict()
        optimizer: Any = trainer.optimizer
        kept = all(torch.equal(_bytes(after[name]), _bytes(value)) for name, value in before.items())
        return {"norm": norm, "skipped": optimizer.num_skipped_steps, "kept": kept}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def work(rank: int, port: int, folder: str, jobs: list[str]) -> None:
    """Run the named jobs in the folder on all ranks, one after the other; names with "poisoned" take one step of that kind.

    A job goes on from the older checkpoint in its folder, if there is one.
    """
    torch.set_num_threads(1)
    found = {}
    for index, name in enumerate(jobs):
        job = json.loads(Path(folder, f"{name}.json").read_text())
        env = RankEnv(rank=rank, world_size=job["resources"]["workers"], master_port=port + index)
        run = poisoned if "poisoned" in name else run_job
        found[name] = run(job, env, Path(folder, name))
    torch.save(found, f"{folder}/{rank}.pt")
