"""Jobs whose model is made in pieces, and the same made whole: what each rank holds at most, and the bits that come of it."""

import gc
import hashlib
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from octet.api_schemas import EventReport, JobSpec
from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.worker import memory_report
from octet.worker.common.config import RankEnv, resolve
from octet.worker.fp8 import weights
from octet.worker.mesh import Mesh, TensorInPieces
from octet.worker.metrics.readback import DeferredValue
from octet.worker.models import build_model
from octet.worker.pretrained import start
from octet.worker.train.loop import Trainer
from octet.worker.train.resume import load_newest
from tests.kit.fp8_folders import FORMS, save_fp8
from tests.kit.live_storages import LiveStorages
from tests.kit.training import Recorder
from tests.worker.parallel.job_runs import checkpoint_ref

HIDDEN, NUM_LAYERS, VOCABULARY = 64, 8, 256
SIZES = {
    "hidden_size": HIDDEN,
    "num_layers": NUM_LAYERS,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
    "max_sequence_length": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt", **SIZES},
    "llama": {"family": "llama", "intermediate_size": 4 * HIDDEN, "num_key_value_heads": 2, "tie_embeddings": False, **SIZES},
}
NETWORK = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
"""A Llama of transformers, which is read from a folder."""
FOLDERS = ("folder", "folder-fp8")
LARGEST = 4 * HIDDEN * HIDDEN
"""Elements of the largest parameter."""
PIECE = 1 << 11
"""Elements that are encoded at a time here; 4 M elsewhere, which would be all of these layers."""
Result = dict[str, Any]


def document(corpus: Path, family: str, level: str, workers: int, **parallelism: Any) -> dict[str, Any]:
    """A job of two steps. family: of `MODELS`, or one of `FOLDERS`, which `save_networks` has saved beside the corpus."""
    model = {"path": str(corpus.parent / family)} if family in FOLDERS else MODELS[family]
    return {
        "name": "in-pieces",
        "model": model,
        "precision": {"level": level},
        "data": {"path": str(corpus)},
        "training": {
            "steps": 2,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "sequence_length": 16,
            "optimizer": {"learning_rate": 3e-3},
            "checkpoint_every": 1,
            "eval_batches": 1,
            "seed": 1,
        },
        "parallelism": parallelism,
        "resources": {"workers": workers},
    }


def save_networks(folder: Path) -> None:
    """Save a network as transformers does, in bf16, and in FP8 with a power of two for each weight."""
    network: Any = build_model(HuggingFaceSpec(architecture="llama", config=NETWORK), seed=3)
    network.network.to(torch.bfloat16).save_pretrained(folder / "folder")
    save_fp8(folder / "folder-fp8", network.network.float(), FORMS["tensor"], power_of_two=True)


def run_job(job: dict[str, Any], env: RankEnv, folder: Path, *, whole: bool) -> Result:
    """Run a job. Return the bytes that a rank holds, and the bits of its states.

    Bytes: the most while the job is prepared, and those right after it. Bits: before the first step, and at the end.
    whole: make the model whole, as for a job whose model cannot be made in pieces.
    """
    recorder, config = Recorder(), resolve(JobSpec.model_validate(job), env)
    reason = mock.patch.object(start, "why_whole", return_value="a test asks for it" if whole else None)
    with Mesh(env, torch.device("cpu"), config.layout) as mesh:
        gc.collect()
        with reason, mock.patch.object(weights, "PIECE_ELEMENTS", PIECE), LiveStorages() as live:
            trainer = Trainer(config, mesh, recorder, folder)
        held = sum(memory_report(trainer.model, trainer.optimizer).values())
        made = bits(trainer)
        trainer.run()
        events = [event.type for event in recorder.of(EventReport)]
        return {
            "peak": live.peak_bytes,
            "held": held,
            "made": made,
            "trained": bits(trainer),
            "losses": recorder.losses(),
            "events": events,
        }


def resume_job(job: dict[str, Any], env: RankEnv, folder: Path) -> Result:
    """Resume from a run's older checkpoint. Return the most bytes held meanwhile, the bytes before, and the bits at the end."""
    recorder, config = Recorder(), resolve(JobSpec.model_validate(job), env)
    with Mesh(env, torch.device("cpu"), config.layout) as mesh:
        gc.collect()
        with mock.patch.object(weights, "PIECE_ELEMENTS", PIECE), LiveStorages() as live:
            trainer = Trainer(config, mesh, recorder, folder)
            held = live.peak_bytes = live.num_bytes
            found = (checkpoint_ref(folder / "checkpoints"),)
            level = config.precision.level
            trainer.progress = load_newest(
                trainer.job, mesh, trainer.folder, found, trainer.step_times, recorder.send, level=level
            )
        assert trainer.progress.step == 1
        with closing(trainer.batches), trainer.writer:
            trainer.step()
            trainer._report(trainer.log.flush())
        return {"peak": live.peak_bytes, "held": held, "trained": bits(trainer), "losses": recorder.losses()}


def bits(trainer: Trainer) -> dict[str, Any]:
    """Every leaf of this rank's state dicts by its path; of tensors dtype, shape and a hash."""
    model, optimizer = trainer.job.parallel.state_dicts()
    return dict(_leaves({"model": dict(model), "optimizer": optimizer}, ""))


def _leaves(value: Any, path: str) -> Any:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key}")
    elif isinstance(value, TensorInPieces):
        yield from _leaves(value.own, path)
    elif isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        yield path, (str(value.dtype), tuple(value.shape), hashlib.sha256(flat.numpy().tobytes()).hexdigest())
    else:
        yield path, value.read() if isinstance(value, DeferredValue) else value


def work(rank: int, folder: str, ports: dict[str, tuple[int, int, int]], jobs: dict[str, dict[str, Any]]) -> None:
    """Run each job in pieces, whole, and again in pieces from its older checkpoint, and save what each found."""
    torch.set_num_threads(1)
    found: dict[str, list[Result]] = {}
    for name, job in jobs.items():
        found[name] = []
        for whole in (False, True):
            env = RankEnv(rank=rank, world_size=job["resources"]["workers"], master_port=ports[name][whole])
            found[name].append(run_job(job, env, Path(folder, f"{name} {whole}"), whole=whole))
        env = RankEnv(rank=rank, world_size=job["resources"]["workers"], master_port=ports[name][2])
        found[name].append(resume_job(job, env, Path(folder, f"{name} False")))
    torch.save(found, f"{folder}/{rank}.pt")
