"""The zoo's runs on a rank: one small GPT in a loop of one's own, in each way of Accelerate's FP8 scripts, and as a job.

`test_zoo.py` compares them on two ranks, and `tests/e2e/test_zoo.py` with a job of the real service.
"""

import json
import logging
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from octet.api_schemas import JobSpec
from octet.worker import initialize, memory_report, parallelize
from octet.worker.data import open_source
from octet.worker.kernels.torch_private import leave_the_compiler_unloaded
from octet.worker.models import build_model
from octet.worker.models.blocks import repeated_blocks
from octet.worker.rank.main import main
from tests.kit.ports import free_port

NUM_STEPS, NUM_RANKS = 8, 2
RATE, WEIGHT_DECAY, BETAS, EPS, MAX_NORM, SEED = 1e-2, 0.1, (0.9, 0.95), 1e-8, 1.0, 1
BATCH, MICRO_BATCH, LENGTH = 8, 2, 32


class Case(NamedTuple):
    """A level in a way: single, "data parallel", fsdp, or "ZeRO 1" to "ZeRO 3"."""

    way: str
    level: str

    @property
    def num_ranks(self) -> int:
        return 1 if self.way == "single" else NUM_RANKS

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage of the job. FSDP divides what ZeRO 3 does."""
        return 3 if self.way == "fsdp" else int(self.way[-1]) if self.way.startswith("ZeRO") else 0


class Run(NamedTuple):
    """The results of a rank. sent: bytes of means and of gathered tensors, by collective and dtype, in all steps."""

    losses: list[float]
    memory_bytes: dict[str, int]
    converted_bytes: dict[str, int]
    num_converted: int
    sent: dict[tuple[str, str], int]


def job(case: Case, corpus: str) -> dict[str, Any]:
    """The job that trains as the loop of one's own does."""
    return {
        "name": "zoo",
        "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 256, "max_sequence_length": 64},
        "precision": {"level": case.level},
        "data": {"path": corpus},
        "training": {
            "steps": NUM_STEPS,
            "global_batch_size": BATCH,
            "micro_batch_size": MICRO_BATCH,
            "sequence_length": LENGTH,
            "optimizer": {"learning_rate": RATE, "weight_decay": WEIGHT_DECAY, "betas": BETAS, "eps": EPS},
            "schedule": {"name": "constant"},
            "gradient_clip": MAX_NORM,
            "checkpoint_every": 0,
            "eval_batches": 1,
            "seed": SEED,
        },
        "parallelism": {"zero_stage": case.zero_stage},
        "resources": {"workers": case.num_ranks},
    }


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    leave_the_compiler_unloaded()
    return torch.optim.AdamW(groups(model), lr=RATE, betas=BETAS, eps=EPS)


class Loop:
    """The parts that differ between the ways: the model, its optimizer, and how a step accumulates and clips."""

    def __init__(self, case: Case, spec: JobSpec) -> None:
        self.model: Any
        model = build_model(spec.model, SEED)
        if case.way == "fsdp":
            self.model, _ = initialize(model, None, case.level, seed=SEED)
            for block in repeated_blocks(self.model):
                fully_shard(block)
            fully_shard(self.model)
            self.optimizer = adamw(self.model)
        else:
            self.model, optimizer = initialize(model, adamw(model), case.level, seed=SEED)
            assert optimizer is not None
            self.optimizer = optimizer
        in_ranks = case.way not in ("single", "fsdp")
        self.parallel = parallelize(self.model, self.optimizer, zero_stage=case.zero_stage) if in_ranks else None
        if self.parallel is not None:
            self.parallel.data.sent_bytes.clear()

    def backward(self, loss: Tensor, is_last: bool) -> None:
        if self.parallel is not None:
            with self.parallel.no_sync(not is_last):
                loss.backward()
        else:
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(is_last)
            loss.backward()

    def clip(self) -> None:
        if self.parallel is not None:
            self.parallel.clip_grad_norm_(MAX_NORM)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)


def own_loop(case: Case, corpus: str) -> Run:
    """Train in a loop of one's own, on a rank of the default process group or alone."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    spec = JobSpec.model_validate(job(case, corpus))
    loop = Loop(case, spec)
    source = open_source(spec.data, LENGTH, SEED)
    of_rank = BATCH // num_ranks
    num_micro_batches = of_rank // MICRO_BATCH
    losses: list[float] = []
    memory_bytes: dict[str, int] = {}
    converted_bytes: dict[str, int] = {}
    for step in range(NUM_STEPS):
        parts = []
        for index in range(num_micro_batches):
            samples = source.train_batch(step * BATCH + rank * of_rank + index * MICRO_BATCH, MICRO_BATCH)
            loss = loop.model.loss(samples).loss / num_micro_batches
            loop.backward(loss, index == num_micro_batches - 1)
            parts.append(loss.detach())
        loop.clip()
        loop.optimizer.step()
        if not step:  # every state exists now, and the gradients are still alive
            memory_bytes = memory_report(loop.model, loop.optimizer)
            converted_bytes = memory_report(loop.model, loop.optimizer, converted_only=True)
        loop.optimizer.zero_grad()
        mean = torch.stack(parts).sum().double()
        if num_ranks > 1:
            dist.all_reduce(mean)
        losses.append(float(mean) / num_ranks)
    sent = dict(loop.parallel.data.sent_bytes) if loop.parallel is not None else {}
    return Run(losses, memory_bytes, converted_bytes, loop.model.octet_report.num_converted_parameters, sent)


class Lines(logging.Handler):
    """The log of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def as_job(case: Case, corpus: str, rank: int, port: int, folder: Path) -> Run:
    """Train the job by `octet.worker.rank.main`, as under torchrun."""
    names: dict[str, object] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    names |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.num_ranks}
    os.environ.update({name: str(value) for name, value in names.items()})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"job_{rank}.json"
    path.write_text(json.dumps(job(case, corpus)))
    lines = Lines()
    logging.getLogger().addHandler(lines)
    logging.getLogger().setLevel(logging.INFO)
    try:
        assert main([str(path), "--job-dir", str(folder)]) == 0, lines.lines[-5:]
    finally:
        logging.getLogger().removeHandler(lines)
    if rank:
        return Run([], {}, {}, 0, {})
    losses = [float(found[1]) for line in lines.lines if (found := re.match(r"step step=\d+ loss=(\S+) ", line))]
    summary = json.loads((folder / "summary.json").read_text())
    sent = {(name, dtype): number for name, by_dtype in summary["sent_bytes"].items() for dtype, number in by_dtype.items()}
    return Run(losses, summary["memory_bytes"], summary["converted_memory_bytes"], summary["num_converted_parameters"], sent)


def both(case: Case, corpus: str, rank: int, folder: Path) -> tuple[Run, Run] | None:
    """Train in a loop of one's own, then the job. A single process is the first rank's; None on the others."""
    os.environ["WORLD_SIZE"] = str(case.num_ranks)
    if case.num_ranks == 1:
        return None if rank else (own_loop(case, corpus), as_job(case, corpus, 0, 0, folder / f"{case.way} {case.level}"))
    store = dist.FileStore(str(folder / f"{case.way} {case.level} meets here"), case.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.num_ranks)
    own = own_loop(case, corpus)
    port = torch.tensor(free_port())  # of the first rank, and new: a run before this one may have taken minutes
    dist.broadcast(port, 0)
    dist.barrier()
    dist.destroy_process_group()
    return own, as_job(case, corpus, rank, int(port), folder / f"{case.way} {case.level}")
