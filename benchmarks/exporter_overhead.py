"""Measure what a rank's metrics cost the training loop: steps with and without metrics alternate in one run.

    python -m benchmarks.exporter_overhead

Turns of a few steps alternate: A without metrics or scrapes; B with metrics, while another process scrapes the exporter every
second, five times as often as in the shipped configuration. Each pair of turns gives one ratio B/A of processor time per step,
summed over all threads of the rank, including the exporter's. On a CPU, processor time is the step time without the time that
other programs take. The result is the median of the ratios with its quartiles. Writes a dated table to benchmarks/results/.
"""

import argparse
import math
import multiprocessing
import os
import platform
import statistics
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry, generate_latest

from api_schemas import JobSpec, ReportBody, StepReport
from worker.config import RankEnv, TrainConfig, resolve
from worker.mesh import Mesh
from worker.metrics.device import device_readings
from worker.metrics.exporter import Exporter, MetricsCollector
from worker.metrics.table import FAMILIES, OPERANDS, Lap, Metrics
from worker.reporting.reporter import LogReporter
from worker.train import Trainer

RESULTS = Path(__file__).parent / "results"
SCRAPE_EVERY_S = 1.0
LIMIT = 0.02
SIZES = {
    "small": {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "batch": 4, "length": 32},
    "medium": {"hidden_size": 128, "num_layers": 4, "num_heads": 4, "batch": 8, "length": 64},
}


class NoMetrics(Metrics):
    """Keeps nothing but the duration of timed phases, which the training loop reads to report its wait for data."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[Lap]:
        lap = Lap()
        began = time.perf_counter()
        yield lap
        lap.seconds = time.perf_counter() - began

    def observe(self, body: ReportBody) -> None:
        pass

    def observe_wire(self, sent_bytes: Any) -> None:
        pass

    def observe_fp8(self, samples: Any) -> None:
        pass


class Silent(LogReporter):
    def send(self, body: ReportBody, at: datetime | None = None) -> None:
        pass


def scrape_when_asked(address: str, asked: Event, over: Event) -> None:
    """Scrape every `SCRAPE_EVERY_S` while `asked` is set, until `over`; runs in another process."""
    while not over.is_set():
        if asked.wait(0.1):
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                answer.read()
            over.wait(SCRAPE_EVERY_S)


def measure(level: str, size: str, statistics_every: int, num_pairs: int, turn_s: float) -> tuple[list[float], float]:
    """Return the ratio B/A of each pair of turns, and the median processor time of a step of A in seconds.

    statistics_every: steps between two samples of FP8 statistics in B.
    """
    metrics = Metrics()
    with tempfile.TemporaryDirectory() as folder, Exporter(metrics, "127.0.0.1") as exporter:
        context = multiprocessing.get_context("spawn")
        asked, over = context.Event(), context.Event()
        scraper = context.Process(target=scrape_when_asked, args=(exporter.address, asked, over), daemon=True)
        scraper.start()
        plain = _trainer(level, size, 0, Path(folder), NoMetrics())
        observed = _trainer(level, size, statistics_every, Path(folder), metrics)
        num_steps = min(_steps_in(plain, turn_s), _steps_in(observed, turn_s))
        ratios, plain_s = [], []
        for pair in range(num_pairs):
            step_s: dict[str, float] = {}
            for name in ("plain", "observed") if pair % 2 == 0 else ("observed", "plain"):
                asked.set() if name == "observed" else asked.clear()
                step_s[name] = _run(observed if name == "observed" else plain, num_steps) / num_steps
            ratios.append(step_s["observed"] / step_s["plain"])
            plain_s.append(step_s["plain"])
        over.set()
        scraper.join()
    return ratios, statistics.median(plain_s)


def cost_of_the_calls(num_steps: int = 2000) -> tuple[float, float]:
    """Return the seconds to write one step's metrics and the seconds of one scrape; each is the best of five."""
    metrics = Metrics()
    metrics.describe_work(rank_share=1.0, samples_per_step=8, flops_per_token=6e5)
    metrics.describe_device(device_readings(torch.device("cpu")), None)
    for family in FAMILIES:
        for label in OPERANDS if family.labels else ("",):
            metrics.set(family.name, 1.0, *(label for _ in family.labels))
    report = StepReport(step=1, loss=2.0, gradient_norm=1.0, learning_rate=0.1, tokens=128, step_time_s=0.01, data_wait_s=0.001)
    collector = MetricsCollector(metrics)
    step_s, scrape_s = [], []
    for _ in range(5):
        began = time.process_time()
        for _ in range(num_steps):
            with metrics.timed("other"):
                with metrics.timed("forward_backward"), metrics.timed("data_wait"):
                    pass
                with metrics.timed("communication"):
                    pass
                with metrics.timed("optimizer"):
                    pass
                metrics.observe_wire({("exchange", "float32"): 1, ("exchange", "float8_e4m3fn"): 1})
                metrics.observe(report)
        step_s.append((time.process_time() - began) / num_steps)
        began = time.process_time()
        for _ in range(100):
            registry = CollectorRegistry()
            registry.register(collector)
            generate_latest(registry)
        scrape_s.append((time.process_time() - began) / 100)
    return min(step_s), min(scrape_s)


def _trainer(level: str, size: str, statistics_every: int, folder: Path, metrics: Metrics) -> Trainer:
    config = _config(level, size, statistics_every)
    mesh = Mesh(config.env, torch.device("cpu"), config.layout).__enter__()
    return Trainer(config, mesh, Silent(), folder, metrics)


def _config(level: str, size: str, statistics_every: int) -> TrainConfig:
    shape = SIZES[size]
    document = {
        "name": "overhead",
        "model": {
            **{name: shape[name] for name in ("hidden_size", "num_layers", "num_heads")},
            "vocab_size": 256, "max_sequence_length": 128,
        },
        "precision": {"level": level} | ({"statistics_every": statistics_every} if statistics_every else {}),
        "data": {"source": "text", "path": sysconfig.get_paths()["stdlib"] + "/json"},
        "training": {"steps": 100_000, "global_batch_size": shape["batch"], "sequence_length": shape["length"]},
    }  # fmt: skip
    return resolve(JobSpec.model_validate(document), RankEnv())


def _steps_in(trainer: Trainer, turn_s: float) -> int:
    """Return the number of steps in a turn, after a warm-up step that also counts memory and activations."""
    _run(trainer, 5)
    return max(5, round(turn_s / (_run(trainer, 5) / 5)))


def _run(trainer: Trainer, num_steps: int) -> float:
    began = time.process_time()
    for _ in range(num_steps):
        with trainer.metrics.timed("other"):
            trainer.step()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="pairs of turns for each line of the table")
    parser.add_argument("--turn", type=float, default=1.0, help="seconds of a turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"# What a rank's metrics cost, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python -m benchmarks.exporter_overhead --pairs {options.pairs} --turn {options.turn:g}`: torch {torch.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}. Scraped every "
        f"{SCRAPE_EVERY_S:g} s (shipped: 5 s). Allowed: {LIMIT:.0%} of the step time.",
        "",
        "| level | network | step, processor time | cost, median | quartiles |",
        "| --- | --- | --- | --- | --- |",
    ]
    for level, size in (("bf16-amp", "small"), ("O2", "small"), ("bf16-amp", "medium"), ("O2", "medium")):
        ratios, step_s = measure(level, size, 0, options.pairs, options.turn)
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells = (level, size, f"{step_s * 1e3:.1f} ms", f"{middle - 1:+.2%}", f"{low - 1:+.2%} to {high - 1:+.2%}")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)  # noqa: T201
    step_s, scrape_s = cost_of_the_calls()
    sampled, _ = measure("O2", "medium", 1, max(4, options.pairs // 4), options.turn)
    cost = statistics.median(sampled) - 1
    lines += [
        "",
        f"Alone, the calls of one step take {step_s * 1e6:.0f} µs, and a scrape {scrape_s * 1e3:.1f} ms of another thread. "
        f"With a scrape every 5 s: within {LIMIT:.0%} of any step longer than {step_s / (LIMIT - scrape_s / 5) * 1e3:.1f} ms.",
        "",
        f"One sample of FP8 statistics (`precision.statistics_every`), with its metrics, takes {cost:.2f} of a step of the "
        f"medium network at O2. Sampling every {math.ceil(cost / LIMIT)} steps or less often takes at most {LIMIT:.0%}.",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-exporter_overhead.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
