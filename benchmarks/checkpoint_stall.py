"""Measure how long a step waits for a checkpoint: written in the step, and by a thread while steps go on.

    python -m benchmarks.checkpoint_stall --write

One job trains a GPT on the CPU. Its checkpoints take turns: every other one is finished before the next step, as all were
before. So other load on the machine affects both equally. The first of each kind is left out: it gets its memory. The share of
CPU time is that of the training thread, and of all threads where the step waits for them; other load does not lengthen it.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import Figure, add_write_option, show
from octet.api_schemas import JobSpec
from octet.worker.common.config import RankEnv, resolve
from octet.worker.mesh import Mesh
from octet.worker.reporting.reporter import LogReporter
from octet.worker.train.loop import Trainer
from octet.worker.train.reports import num_parameters

IN_STEP, IN_THREAD = "in the step", "in a thread"
MODEL = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "vocab_size": 256, "max_sequence_length": 64}


class TimedTrainer(Trainer):
    """Finishes every other checkpoint at once, and keeps the seconds of each save, and its share of the CPU time."""

    stalls_s: dict[str, list[float]]
    cpu_shares: dict[str, list[float]]

    def run(self, checkpoints: Any = ()) -> Any:
        """Train, and measure."""
        self.stalls_s, self.cpu_shares = {IN_STEP: [], IN_THREAD: []}, {IN_STEP: [], IN_THREAD: []}
        self._number, self._stall_cpu_s, self._cpu_began_s = 0, 0.0, time.thread_time()
        return super().run(checkpoints)

    def save(self) -> None:
        """Save, and finish it if it is its turn. A save in a thread has waited for the one before, if that was not done."""
        kind = (IN_STEP, IN_THREAD)[self._number % 2]
        started_s, cpu_started_s = time.perf_counter(), time.thread_time()
        clock = time.process_time if kind == IN_STEP else time.thread_time
        stall_started_s = clock()
        super().save()
        if kind == IN_STEP:
            self.writer.finish()
        self.stalls_s[kind].append(time.perf_counter() - started_s)
        previous = (IN_STEP, IN_THREAD)[(self._number + 1) % 2]  # the checkpoint that began this interval
        if self._number:
            self.cpu_shares[previous].append(self._stall_cpu_s / (cpu_started_s - self._cpu_began_s))
        self._stall_cpu_s, self._cpu_began_s = clock() - stall_started_s, time.thread_time()
        self._number += 1


def measure(level: str, num_checkpoints: int, every: int) -> TimedTrainer:
    """Train a job with so many checkpoints of each kind."""
    training = {"steps": 2 * num_checkpoints * every, "global_batch_size": 2, "sequence_length": 64, "checkpoint_every": every}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first.txt", "second.txt"):
            Path(folder, name).write_text("\n".join(f"line {number} of {name}: the quick brown fox" for number in range(1000)))
        document = {
            "name": "checkpoint-stall",
            "model": MODEL,
            "precision": {"level": level},
            "data": {"source": "text", "path": folder},
            "training": training | {"eval_batches": 1},
        }
        config = resolve(JobSpec.model_validate(document), RankEnv())
        with Mesh(config.env, torch.device("cpu")) as mesh:
            trainer = TimedTrainer(config, mesh, LogReporter(), Path(folder, "job"))
            trainer.run()
    return trainer


def main() -> int:
    """Print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--level", default="O2")
    parser.add_argument("--checkpoints", type=int, default=6, help="of each kind")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    add_write_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = measure(options.level, options.checkpoints, options.every)
    model = f"GPT of {num_parameters(trainer.model) / 1e6:.1f} M parameters at {options.level}"
    figures: list[Figure] = []
    for kind in (IN_STEP, IN_THREAD):
        stalls_s, share = trainer.stalls_s[kind][1:], statistics.median(trainer.cpu_shares[kind])
        name, most = f"checkpoint: {model}, written {kind}", f"up to {max(stalls_s) * 1e3:.1f}"
        figures.append(Figure(f"{name}, a step waits (ms)", f"{statistics.median(stalls_s) * 1e3:.1f}", most))
        figures.append(Figure(f"{name}, share of CPU time (%)", f"{share * 100:.2f}"))
    show(figures, "benchmarks.checkpoint_stall", options.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
