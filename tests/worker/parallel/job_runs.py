"""Jobs of small models on several ranks: each trains, and again from its older checkpoint."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from octet.api_schemas import CheckpointRef, JobSpec
from octet.worker import checkpoint
from octet.worker.common.config import RankEnv, resolve
from octet.worker.mesh import Mesh
from octet.worker.train.loop import Trainer
from tests.golden.record import document as golden_job
from tests.kit.training import Recorder


def job(corpus: Path, workers: int, **parallelism: Any) -> JobSpec:
    """A job of two steps at O3-split and ZeRO 1, whose blocks are computed again in the backward pass."""
    document = golden_job({"level": "O3-split"}, corpus, workers)
    training = {"steps": 2, "micro_batch_size": 1, "checkpoint_every": 1, "schedule": {}, "activation_checkpointing": "full"}
    parallelism = {"zero_stage": 1, **parallelism}
    return JobSpec.model_validate(document | {"parallelism": parallelism, "training": document["training"] | training})


def run_job(spec: JobSpec, env: RankEnv, folder: Path, checkpoints: tuple[CheckpointRef, ...] = ()) -> Recorder:
    recorder, config = Recorder(), resolve(spec, env)
    with Mesh(env, torch.device("cpu"), config.layout) as mesh:
        Trainer(config, mesh, recorder, folder).run(checkpoints)
    return recorder


def jobs(rank: int, ports: list[int], folder: str, **parallelism: Any) -> list[Recorder]:
    """Run a job on one rank of four, and again from its older checkpoint. Return both runs' reports. ports: two."""
    spec, job_folder = job(Path(folder, "corpus"), 4, **parallelism), Path(folder, "job")
    envs = [RankEnv(rank=rank, world_size=4, master_port=port) for port in ports]
    first = run_job(spec, envs[0], job_folder)
    return [first, run_job(spec, envs[1], job_folder, (checkpoint_ref(job_folder / "checkpoints"),))]


def checkpoint_ref(folder: Path) -> CheckpointRef:
    """The older checkpoint of a run."""
    path = folder / checkpoint.checkpoint_name(1)
    return CheckpointRef(step=1, name=path.name, sha256=hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest())
