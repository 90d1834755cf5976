"""Time the steps of a job against a bare training loop of the same model, data and level, on one CPU thread.

    python -m benchmarks.job_overhead [--levels bf16-amp,O2] [--rounds 12] [--steps 40] [--write]

The job is a spec that runs through `octet.worker.rank.main`: batches read by a thread, losses, norms,
reports, metrics. Alone it writes its reports to its log; as a rank it sends them to a control
plane, in another process, and serves metrics. The bare loop is what a user writes around
`octet.initialize`, with batches of the same source. The two take turns step by step, in one
process, so that other load affects both equally. The limit: a job has at least 0.97 of the bare
loop's throughput, by the CPU time of all threads, with the whole 95 % interval over rounds of a
whole job. `job_steps.py` says how that is computed.
"""

import argparse
import json
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import torch
from torch import nn

from benchmarks.figures import add_write_option, show
from benchmarks.job_steps import Found, figures, holds
from octet.api_schemas import DesiredState, JobSpec, LaunchOrder, PoolConfig, ReportReply
from octet.worker import initialize
from octet.worker.common.config import RankEnv, resolve
from octet.worker.data import open_source
from octet.worker.data.prefetch import on_device
from octet.worker.models import TrainedModel
from octet.worker.optim.registry import build_optimizer
from octet.worker.optim.schedule import learning_rate_at, parameter_groups, set_learning_rate
from octet.worker.pretrained.start import start_model
from octet.worker.rank import main as job
from octet.worker.train.loop import Trainer

LEVELS = ("bf16-amp", "O2")
CPU = torch.device("cpu")
TO_LOG, TO_CONTROL_PLANE = "log", "control plane"
NUM_WARM_UP = 5
MODEL = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 256, "max_sequence_length": 64}


def write_corpus(folder: Path) -> Path:
    """Write two files of text, one to train on and one to evaluate; returns their folder."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for part in range(2):
        lines = (f"line {number} of a text to train on" for number in range(10_000))
        corpus.joinpath(f"{part}.txt").write_text("\n".join(lines))
    return corpus


def spec_of(level: str, corpus: Path, num_steps: int) -> dict[str, Any]:
    """Return the spec of a job that trains a small GPT, without a checkpoint or an evaluation between its steps."""
    training = {"steps": num_steps, "global_batch_size": 8, "sequence_length": 64, "eval_batches": 1, "seed": 1}
    data = {"source": "text", "path": str(corpus)}
    return {"name": "overhead", "model": MODEL, "precision": {"level": level}, "data": data, "training": training}


def bare_loop(spec: dict[str, Any], device: torch.device = CPU) -> Generator[None, None, None]:
    """Train as the job does in a plain loop: each `next` takes one step. On a CPU it reads each loss, as the job does there."""
    config = resolve(JobSpec.model_validate(spec), RankEnv())
    source = open_source(config.data, config.sequence_length, config.seed, config.readable_files, config.sizes.takes)
    torch.manual_seed(config.seed)
    network: TrainedModel = start_model(config.model, config.seed, config.readable_files)[0].to(device)
    tokens = config.batch.micro_batch_size * config.sequence_length
    made = build_optimizer(parameter_groups(network, config.optimizer), config.optimizer, config.gradient_clip)
    model, optimizer = initialize(network, made, config.precision.level, tokens=tokens)
    assert optimizer is not None
    assert config.training.steps is not None
    for step in range(config.training.steps):
        rate = learning_rate_at(step, config.optimizer.learning_rate, config.schedule, config.training.steps)
        set_learning_rate(optimizer, rate)
        batch = source.train_batch(step * config.batch.global_batch_size, config.batch.micro_batch_size)
        loss = model.loss(on_device(batch, device)).loss  # type: ignore[operator]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clip or 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cpu":
            loss.item()
        yield


class ControlPlane(HTTPServer):
    """Acknowledges the reports of one rank, and keeps the numbers of the steps that they tell of."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.steps: list[int] = []
        self.last_seq = 0


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ControlPlane

    def do_POST(self) -> None:
        batch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for report in batch["reports"]:
            if report["seq"] > self.server.last_seq:
                self.server.last_seq = report["seq"]
                self.server.steps += [report["body"]["step"]] if report["body"]["kind"] == "step" else []
        reply = ReportReply(desired=DesiredState.RUN, lease_s=600, acknowledged_seq=self.server.last_seq)
        self._send(reply.model_dump_json().encode())

    def do_GET(self) -> None:
        self._send(json.dumps(self.server.steps).encode())

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_arguments: Any) -> None:
        pass


@contextmanager
def control_plane() -> Iterator[str]:
    """Answer one rank's reports in a process of its own. Yields its address."""
    server = ControlPlane()
    process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        process.kill()
        process.join()
        server.server_close()


def run_alone(spec: dict[str, Any], folder: Path, accelerator: str = "cpu") -> None:
    """Run a job as `python -m octet.worker` does."""
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    status = job.main([str(path), "--job-dir", str(folder / "job"), "--accelerator", accelerator])
    if status != 0:
        raise RuntimeError(f"the job ended with exit status {status}; expected 0. Its log is above.")


def run_as_rank(spec: dict[str, Any], folder: Path, accelerator: str = "cpu") -> None:
    """Run a job as a rank under Ray does. Raises unless the control plane has heard of each step once."""
    with control_plane() as url:
        order = LaunchOrder(
            attempt_id="att_" + "0" * 26,
            job_id="job_" + "0" * 26,
            epoch=1,
            token="none",
            spec=JobSpec.model_validate(spec),
            pool=PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=1),
            report_url=url,
            job_dir=str(folder / "job"),
            checkpoints=(),
            lease_s=600,
            heartbeat_s=5,
        )
        with mock.patch.object(logging.getLogger(), "handlers", []):  # without the one that a job alone has set up
            outcome = job.run_rank(order, RankEnv(accelerator=accelerator), datetime.now(UTC))
        heard = httpx.get(url, trust_env=False).json()
    if not outcome.succeeded or heard != list(range(1, spec["training"]["steps"] + 1)):
        raise RuntimeError(f"the job ended with {outcome.message!r}, and the control plane heard of the steps {heard}")


RUN: dict[str, Callable[..., None]] = {TO_LOG: run_alone, TO_CONTROL_PLANE: run_as_rank}


def measure(spec: dict[str, Any], folder: Path, run: Callable[[dict[str, Any], Path], None] = run_alone) -> Found:
    """Run a job, and a bare step before each of its steps. The first steps are not timed."""
    bare, found, step = bare_loop(spec), Found(), Trainer.step
    ended: list[Moment] = []  # when each bare step did

    def timed(trainer: Trainer) -> None:
        began = Moment.now()
        if len(ended) > NUM_WARM_UP:
            found.job_s.append(began.main_s - ended[-1].main_s)
        next(bare)
        ended.append(Moment.now())
        if len(ended) > NUM_WARM_UP:
            found.bare_s.append(ended[-1].main_s - began.main_s)
        step(trainer)

    with mock.patch.object(Trainer, "step", timed):
        run(spec, folder)
    first, last = ended[NUM_WARM_UP], ended[-1]
    found.threads_s = (last.all_s - first.all_s) - (last.main_s - first.main_s)
    return found


@dataclass(frozen=True)
class Moment:
    """The CPU seconds of the main thread and of all threads at one moment."""

    main_s: float
    all_s: float

    @classmethod
    def now(cls) -> "Moment":
        return cls(time.thread_time(), time.process_time())


def main() -> int:
    """Print and write the figures. Returns 1 if an interval is not above the limit."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", default=",".join(LEVELS), help="separated by commas")
    parser.add_argument("--rounds", type=int, default=12, help="jobs of each level")
    parser.add_argument("--steps", type=int, default=40, help=f"of each job; the first {NUM_WARM_UP} are not timed")
    add_write_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    levels, found = options.levels.split(","), dict[tuple[str, str], list[Found]]()
    with tempfile.TemporaryDirectory(prefix="octet-overhead-") as name:
        corpus = write_corpus(Path(name))

        def run(level: str, reports: str, number: int) -> Found:
            folder = Path(name, f"{level} {reports} {number}")
            folder.mkdir()
            return measure(spec_of(level, corpus, options.steps), folder, RUN[reports])

        for number in range(options.rounds):
            for level in levels:
                for reports in RUN:
                    found.setdefault((level, reports), []).append(run(level, reports, number))
    show(figures(found), "benchmarks.job_overhead", options.write)
    return int(not all(holds(rounds) for rounds in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
