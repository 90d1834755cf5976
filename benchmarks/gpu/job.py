"""A job's throughput beside a bare loop's, on one device: what the trainer, its reports and its metrics take from a GPU.

The job is a spec that runs through `octet.worker.rank.main`, and reports to its log, or as a rank to a
control plane in another process. The bare loop is what a user writes around `octet.initialize` with
the same source of batches; it waits for the device at its end alone. Blocks are not compiled and no
step is a CUDA graph: the host issues each launch, so what else it does counts most. A round is a
job between two bare loops. The ratio of a row is the lower end of its 95 % interval over the
rounds.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.networks import BF16_AMP, O2, Way
from benchmarks.gpu.report import Row, Target
from benchmarks.gpu.session import Case, Session
from benchmarks.job_overhead import RUN, bare_loop, write_corpus
from benchmarks.job_steps import LIMIT
from octet.api_schemas.paired import Interval
from octet.worker.train.loop import Trainer

THROUGHPUT = Target(LIMIT, 0.99, style=".3f")
NUM_ROUNDS, NUM_SMOKE_ROUNDS = 3, 2
NUM_WARM_UP = 5
SIZE = {"hidden_size": 1024, "num_layers": 24, "num_heads": 16, "vocab_size": 256, "max_sequence_length": 1024}
TINY = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 256, "max_sequence_length": 32}


@dataclass
class Clock:
    """Seconds from the end of the warm-up to the end of the last step, when the device has computed it."""

    device: torch.device
    num_steps: int
    num_begun: int = 0
    marks_s: list[float] = field(default_factory=list)

    def begin_step(self) -> None:
        """Call it before each step, and once after the last."""
        if self.num_begun in (NUM_WARM_UP, self.num_steps):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.marks_s.append(time.perf_counter())
        self.num_begun += 1

    @property
    def step_s(self) -> float:
        """The mean time of a step."""
        began_s, ended_s = self.marks_s
        return (ended_s - began_s) / (self.num_steps - NUM_WARM_UP)


def job_cases(session: Session) -> list[Case]:
    """Return a case for each level and receiver of reports; first those that report to a control plane, as jobs do."""
    return [
        Case(f"job, {way.name}, reports to its {reports}", partial(_job, session, way, reports), expected_s=30)
        for reports in reversed(RUN)
        for way in (BF16_AMP, O2)
    ]


def spec_of(session: Session, way: Way, corpus: Path) -> dict[str, Any]:
    """Return the spec of a job without a checkpoint or an evaluation between its steps."""
    model, batch_size, num_steps = (TINY, 2, NUM_WARM_UP + 3) if session.smoke else (SIZE, 8, NUM_WARM_UP + 40)
    training = {"steps": num_steps, "global_batch_size": batch_size, "sequence_length": model["max_sequence_length"]}
    training |= {"eval_batches": 1, "seed": 1, "compile": "off", "cuda_graph": "off"}
    data = {"source": "text", "path": str(corpus)}
    return {"name": "job", "model": model, "precision": {"level": way.level}, "data": data, "training": training}


def _job(session: Session, way: Way, reports: str) -> Iterator[Row]:
    bare_s, job_s, ratios = list[float](), list[float](), list[float]()
    num_rounds = NUM_SMOKE_ROUNDS if session.smoke else NUM_ROUNDS
    with tempfile.TemporaryDirectory(prefix="octet-job-") as name:
        spec = spec_of(session, way, write_corpus(Path(name)))
        for number in range(num_rounds):
            folder = Path(name, str(number))
            folder.mkdir()
            before_s = _bare_step_s(session, spec)
            job_s.append(_job_step_s(session, spec, folder, RUN[reports]))
            bare_s += [before_s, _bare_step_s(session, spec)]
            ratios.append(fmean(bare_s[-2:]) / job_s[-1])
    found = Interval.of(ratios)
    yield Row(
        f"job, {way.name}, reports to its {reports}: throughput",
        f"step {fmean(job_s) * 1e3:.4g} ms",
        f"bare loop {fmean(bare_s) * 1e3:.4g} ms",
        found.mean - found.half_width,
        THROUGHPUT,
        f"lower end of {found.mean:.3f} ± {found.half_width:.3f}, {num_rounds} rounds",
    )


def _bare_step_s(session: Session, spec: dict[str, Any]) -> float:
    clock = Clock(session.device, spec["training"]["steps"])
    steps = bare_loop(spec, session.device)
    for _ in range(clock.num_steps):
        clock.begin_step()
        next(steps)
    clock.begin_step()
    steps.close()
    session.timer.release()
    return clock.step_s


def _job_step_s(session: Session, spec: dict[str, Any], folder: Path, run: Callable[..., None]) -> float:
    clock, step = Clock(session.device, spec["training"]["steps"]), Trainer.step

    def timed(trainer: Trainer) -> None:
        clock.begin_step()
        step(trainer)
        if clock.num_begun == clock.num_steps:
            clock.begin_step()

    with mock.patch.object(Trainer, "step", timed):
        run(spec, folder, session.device.type)
    session.timer.release()
    return clock.step_s
