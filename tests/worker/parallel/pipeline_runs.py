"""Jobs whose model is divided into stages: what each rank finds out, for the tests of pipelines to compare with one process."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octet.api_schemas import JobSpec, StepReport
from octet.worker import checkpoint
from octet.worker.common.config import RankEnv, resolve
from octet.worker.fp8.gradient import Float8Gradient
from octet.worker.mesh import Mesh
from octet.worker.train.loop import Trainer
from octet.worker.train.passes import forward_backward
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.text import write_corpus
from tests.kit.training import Recorder

LLAMA = {
    "family": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_sequence_length": 16,
    "tie_embeddings": False,
}
GPT = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 256, "max_sequence_length": 16}
MODELS = {"gpt": GPT, "llama": LLAMA}
DELAYED = {"level": "te", "recipe": {"scaling": "delayed", "amax_history_length": 2}}
STEPS = 3
Result = dict[str, Any]


def precision(level: str) -> dict[str, Any]:
    """A level's name, or "delayed"."""
    return DELAYED if level == "delayed" else {"level": level}


def document(
    corpus: Path, model: dict[str, Any], precision: dict[str, Any], workers: int = 1, **parallelism: Any
) -> dict[str, Any]:
    """A job of four micro-batches for each data rank."""
    num_data_ranks = workers // (parallelism.get("pipeline", 1) * parallelism.get("tensor", 1))
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
        forward_backward(trainer.job, trainer.batches, config, 0, mesh, trainer.metrics)
        if mesh.owns_loss:
            weight = trainer.model.get_parameter("blocks.3.mlp.up.weight")
            assert isinstance(weight.grad, Float8Gradient)
            weight.grad = Float8Gradient.quantize(torch.full(weight.shape, torch.nan), weight.grad.position)
        trainer.job.parallel.synchronize()
        norm = float(trainer.job.parallel.clip_grad_norm_(1.0))
        trainer.optimizer.step()
        trainer.job.parallel.publish()
        after = trainer.model.state_dict()
        optimizer: Any = trainer.optimizer
        kept = all(torch.equal(_bytes(after[name]), _bytes(value)) for name, value in before.items())
        return {"norm": norm, "skipped": optimizer.num_skipped_steps, "kept": kept}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def gradients(job: dict[str, Any], env: RankEnv, folder: Path) -> Result:
    """The gradients of a step before its clipping, by name, of this rank's stages, with shards put together."""
    config = resolve(JobSpec.model_validate(job), env)
    with Mesh(env, torch.device("cpu"), config.layout) as mesh:
        trainer = Trainer(config, mesh, Recorder(), folder)
        forward_backward(trainer.job, trainer.batches, config, 0, mesh, trainer.metrics)
        trainer.job.parallel.synchronize()
        found = {}
        for name, parameter in trainer.model.named_parameters():
            assert parameter.grad is not None
            cut = trainer.job.parallel.shards.cuts.get(parameter)
            parts = mesh.tensor.start_gather(parameter.grad).wait()
            found[name] = parts[0] if cut is None else cut.join(list(parts))
        return found


def port_of(path: Path, rank: int) -> int:
    """A port for the ranks of a job, which the first rank finds just before it is used and writes to the path."""
    if rank == 0:
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(str(free_port()))
        unfinished.rename(path)
    while not path.exists():
        time.sleep(0.01)
    return int(path.read_text())


def work(rank: int, folder: str, jobs: list[str]) -> None:
    """Run the named jobs in the folder on all ranks, one after the other.

    Names with "poisoned" or "gradients" take one step of that kind. Any other job goes on from the older checkpoint in its
    folder, if there is one.
    """
    torch.set_num_threads(1)
    found = {}
    for name in jobs:
        job = json.loads(Path(folder, f"{name}.json").read_text())
        env = RankEnv(
            rank=rank, world_size=job["resources"]["workers"], master_port=port_of(Path(folder, f"{name}.port"), rank)
        )
        run = poisoned if "poisoned" in name else gradients if "gradients" in name else run_job
        found[name] = run(job, env, Path(folder, name))
    torch.save(found, f"{folder}/{rank}.pt")


class Jobs:
    """Jobs in a folder, with what their ranks found."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.corpus = folder, write_corpus(folder / "corpus")
        self.found: dict[str, list[Result]] = {}

    def run(self, jobs: dict[str, dict[str, Any]], num_ranks: int) -> None:
        """Run jobs by name, all on the same ranks, one after the other."""
        for name, job in jobs.items():
            (self.folder / f"{name}.json").write_text(json.dumps(job))
        run_ranks(work, (str(self.folder), list(jobs)), num_ranks)
        results = [torch.load(self.folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]
        self.found |= {name: [result[name] for result in results] for name in jobs}

    def alone(self, family: str, level: str) -> tuple[str, Result]:
        """The job of one process: its name, and what it found."""
        name = f"{family} {level} alone"
        if name not in self.found:
            job = document(self.corpus, MODELS[family], precision(level))
            self.found[name] = [run_job(job, RankEnv(), self.folder / name)]
        return name, self.found[name][0]

    def differences(self, name: str, other: str) -> list[str]:
        """Tensors that are not the same in the last checkpoints of two jobs."""
        one, two = (saved(self.folder / job) for job in (name, other))
        assert one.keys() == two.keys()
        return [path for path, value in one.items() if not torch.equal(value, two[path])]

    def check_resumed(self, job: dict[str, Any], name: str, num_ranks: int) -> None:
        """The job goes on from the older checkpoint of the run of that name to the bit, in the same layout."""
        again = self.resume(job, f"again {name}", name, num_ranks)
        assert again["losses"] == self.found[name][0]["losses"][-1:]
        assert self.differences(f"again {name}", name) == []

    def resume(self, job: dict[str, Any], name: str, source: str, num_ranks: int) -> Result:
        """Go on from the older checkpoint of another job, in a copy of its folder. Returns what the first rank found."""
        shutil.copytree(self.folder / source, self.folder / name)
        if num_ranks == 1:
            return run_job(job, RankEnv(), self.folder / name)
        self.run({name: job}, num_ranks)
        return self.found[name][0]


def check_skipped(ranks: list[Result]) -> None:
    """All ranks have skipped the step in which one had a NaN, and know no norm."""
    for found in ranks:
        assert (found["skipped"], found["kept"]) == (1, True)
        assert found["norm"] != found["norm"]
