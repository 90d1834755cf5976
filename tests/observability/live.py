"""A real Prometheus that watches a real `octet serve` with real jobs. Dashboards and rules are tested against it.

`make dashboards` draws the boards from such a run too. A CPU machine has no GPU series. A small exporter serves them: a rank's
own code over readings that a GPU could give, and lines in the form of DCGM's exporter.
"""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octet.api_schemas import JobSpec
from octet.api_schemas.levels import LEVELS
from octet.worker.metrics.exporter import MetricsCollector
from octet.worker.metrics.table import Metrics
from tests.e2e.octet_server import Server
from tests.kit.ports import free_port
from tests.kit.waiting import LONG_S, wait_until
from tests.observability.dcgm import LABELS

ROOT = Path(__file__).parents[2]
SCRAPE_S = 1
DCGM = {
    "DCGM_FI_DEV_POWER_USAGE": 412.5,
    "DCGM_FI_DEV_FB_USED": 61_440.0,
    "DCGM_FI_DEV_XID_ERRORS": 0.0,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.61,
}


@dataclass(frozen=True)
class Run:
    """The jobs to run: O2 on two ranks, then the other levels, with the same model and text."""

    hidden_size: int = 32
    num_layers: int = 2
    steps: int = 450
    other_steps: int = 800
    """Steps of each job at another level. These are faster, and a job has to last for some scrapes.

    O2 has other steps at which it is evaluated than these."""
    global_batch_size: int = 4
    sequence_length: int = 64
    statistics_every: int = 5
    other_levels: tuple[str, ...] = ("bf16-amp",)
    other_workers: int = 1
    """Ranks of each other job. One rank lets jobs share the slots; a comparison of speed needs two, as O2 has."""
    seeds: int = 2
    """More jobs at the first of the other levels, each with a seed of its own and as many steps as O2."""
    demotes: bool = True
    """True to run another job, which demotes a layer."""

    def spec(self, corpus: Path, level: str, *, workers: int, steps: int | None = None, seed: int = 0) -> dict[str, Any]:
        steps = steps or (self.steps if level == "O2" else self.other_steps)
        precision = {"level": level} | ({"statistics_every": self.statistics_every} if LEVELS[level].gemm == "fp8" else {})
        return JobSpec.model_validate(
            {
                "name": f"live-{level.lower()}",
                "model": {
                    "hidden_size": self.hidden_size, "num_layers": self.num_layers, "num_heads": 4,
                    "vocab_size": 256, "max_sequence_length": self.sequence_length,
                },
                "precision": precision,
                "data": {"source": "text", "path": str(corpus)},
                "training": {
                    "steps": steps, "global_batch_size": self.global_batch_size,
                    "micro_batch_size": self.global_batch_size // 2, "sequence_length": self.sequence_length,
                    "seed": seed, "eval_every": steps // 5, "eval_batches": 2, "checkpoint_every": steps // 5,
                    "schedule": {"warmup_steps": 10},
                },
                "resources": {"workers": workers},
                "labels": {"comparison": "live"},
            }
        ).model_dump(mode="json")  # fmt: skip


class Missing(Exception):
    """Prometheus is not installed. The message says what to install."""


class Prometheus:
    """One Prometheus process, which scrapes every second into a folder of its own."""

    def __init__(self, folder: Path, octet_port: int, gpu_address: str) -> None:
        for program in ("prometheus", "promtool"):
            if shutil.which(program) is None:
                raise Missing(f"missing: {program}. Install Debian's package `prometheus`, or run `make prometheus` as root.")
        self.url = f"http://127.0.0.1:{free_port()}"
        self._folder = folder
        config = self._configured(octet_port, gpu_address)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._process: subprocess.Popen[bytes] | None = None

    def _configured(self, octet_port: int, gpu_address: str) -> dict[str, Any]:
        """Return the committed configuration with faster scrapes, this server's port and the stand-in for a GPU."""
        text = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
        config: dict[str, Any] = yaml.safe_load(text.replace("127.0.0.1:8000", f"127.0.0.1:{octet_port}"))
        config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
        config["rule_files"] = [str(ROOT / "deploy/prometheus/rules/*.yml")]
        for scrape in config["scrape_configs"]:
            for discovery in scrape.get("http_sd_configs", ()):
                discovery["refresh_interval"] = f"{SCRAPE_S}s"
        dcgm = {"targets": [gpu_address], "labels": {"job_id": "gpu", "level": "O2", "pool": "h100", "rank": "0"}}
        (self._folder / "dcgm.yml").write_text(yaml.safe_dump([dcgm]))
        return config

    def __enter__(self) -> "Prometheus":
        command = [
            "prometheus", f"--config.file={self._folder / 'prometheus.yml'}", f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={urllib.parse.urlsplit(self.url).netloc}", "--log.level=warn",
            f"--scrape.discovery-reload-interval={SCRAPE_S}s",  # 5 s otherwise, in which a job only burns processor time
        ]  # fmt: skip
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self.wait_for("vector(1)")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(LONG_S)

    def instant(self, expr: str) -> list[dict[str, Any]]:
        return self._get("query", query=expr)

    def range(self, expr: str, start: float, end: float, step_s: float = SCRAPE_S) -> list[dict[str, Any]]:
        return self._get("query_range", query=expr, start=start, end=end, step=step_s)

    def wait_for(self, expr: str, timeout_s: float = LONG_S) -> list[dict[str, Any]]:
        """Wait until the expression has a value, and return it."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if found := self.instant(expr):
                    return found
            except OSError:
                pass  # Prometheus is not up yet
            if time.monotonic() > deadline:
                log = (self._folder / "prometheus.log").read_text()[-2000:]
                raise AssertionError(f"no value within {timeout_s:g} s: {expr}\n{log}")
            time.sleep(0.2)

    def _get(self, what: str, **parameters: Any) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{what}?{query}", timeout=LONG_S) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise  # Prometheus loads its data
            raise ValueError(f"{parameters['query']}: {error.read().decode()}") from error
        result: list[dict[str, Any]] = body["data"]["result"]
        return result if isinstance(result[0] if result else {}, dict) else [{"metric": {}, "value": result}]


class Live:
    """The results of a run: job ids by purpose, start and end times, and what the exporters served in the middle."""

    def __init__(self, prometheus: Prometheus, server: Server, start: float) -> None:
        self.prometheus, self.server, self.start, self.end = prometheus, server, start, start
        self.jobs: dict[str, str] = {}
        self.exposed: dict[str, str] = {}

    def run_jobs(self, corpus: Path, run: Run) -> None:
        """Run O2, which takes all slots; then the others, one that demotes a layer, and one whose text has been removed."""
        gone = corpus.with_name("gone")
        shutil.copytree(corpus, gone)
        self.jobs["O2"] = self.server.client.submit(run.spec(corpus, "O2", workers=2)).id
        for level in run.other_levels:
            self.jobs[level] = self.server.client.submit(run.spec(corpus, level, workers=run.other_workers)).id
        for seed in range(run.seeds):
            spec = run.spec(corpus, run.other_levels[0], workers=1, steps=run.steps, seed=seed + 1)
            self.jobs[f"seed {seed}"] = self.server.client.submit(spec).id
        if run.demotes:
            demoting = run.spec(corpus, "O2", workers=1) | {"labels": {}}
            demoting["precision"] |= {"demotion": {"min_sqnr_db": 100.0, "patience": 8}}  # nothing reaches 100 dB
            self.jobs["demotes"] = self.server.client.submit(demoting).id
        self.jobs["fails"] = self.server.client.submit(Run(other_steps=20).spec(gone, "fp32", workers=1)).id
        shutil.rmtree(gone)
        self.server.wait_for_step(self.jobs["O2"], 1)
        targets = json.loads(get(f"http://127.0.0.1:{self.server.port}/internal/v1/prometheus/targets"))
        rank = f"http://{targets[0]['targets'][0]}/metrics"
        wait_until(lambda: "\noctet_checkpoint_bytes" in get(rank), poll_s=SCRAPE_S)  # a thread writes the first checkpoint
        self.server.wait_for_step(self.jobs["O2"], run.steps // 4)
        self.exposed["rank"] = get(rank)
        # Prometheus may have been late, and the job over by now, which hides a series from instant queries.
        series = f'octet_train_step{{job_id="{self.jobs["O2"]}", rank="1"}}'
        self.prometheus.wait_for(f"max_over_time({series}[10m]) > {run.steps // 4}")
        self.exposed["api"] = get(f"http://127.0.0.1:{self.server.port}/metrics")
        for job_id in self.jobs.values():
            self._wait_for_end(job_id)
        time.sleep(3 * SCRAPE_S)  # lets Prometheus scrape the last values and evaluate the rules on them
        self.exposed["api at the end"] = get(f"http://127.0.0.1:{self.server.port}/metrics")
        self.end = time.time()

    def _wait_for_end(self, job_id: str) -> None:
        """Ask once per scrape: each look at a job costs client and server processor time that the jobs need too."""
        wait_until(lambda: self.server.client.job(job_id).state.is_terminal, poll_s=SCRAPE_S)

    def filled_in(self, expr: str, job_id: str) -> str:
        """Return a panel's expression as Grafana would send it."""
        macros = {
            "$__rate_interval": "15s",
            "$__interval": "1s",
            "$__range": f"{max(60, round(self.end - self.start) + 10)}s",
            "$job_id": job_id,
            "$comparison": "live",
            "$yardstick": "bf16-amp",
            "$pool": ".*",
        }
        for macro, value in macros.items():
            expr = expr.replace(macro, value)
        return expr


@contextmanager
def running(folder: Path, corpus: Path, run: Run | None = None) -> Iterator[Live]:
    """Serve and train while Prometheus scrapes. When the block begins, the jobs are over and all services are up."""
    server = Server(folder / "octet")
    with gpu_stand_in() as gpu_address, Prometheus(folder, server.port, gpu_address) as prometheus:
        server.start()
        try:
            prometheus.wait_for('octet_jobs_hidden and on () up{job="octet-api"} == 1')
            live = Live(prometheus, server, time.time())
            live.run_jobs(corpus, run or Run())
            yield live
        finally:
            server.stop()


class GpuNode(Collector):
    """Serves what the exporters of a GPU node would serve."""

    def collect(self) -> Iterator[Metric]:
        metrics = Metrics()
        metrics.set("octet_gpu_power_watts", 412.0)
        metrics.set("octet_gpu_sm_clock_hertz", 1.98e9)
        metrics.set("octet_gpu_temperature_celsius", 61.0)
        metrics.set("octet_gpu_utilization_ratio", 0.97)
        metrics.set("octet_train_flops_utilization_ratio", 0.41, "989 TFLOP/s dense bf16")
        yield from MetricsCollector(metrics).collect()
        for name, value in DCGM.items():
            family = GaugeMetricFamily(name, "as DCGM's exporter has it", labels=LABELS)
            family.add_metric(["0", "GPU-5c1e", "00000000:18:00.0", "nvidia0", "NVIDIA H100 80GB HBM3", "node-1"], value)
            yield family


@contextmanager
def gpu_stand_in() -> Iterator[str]:
    registry = CollectorRegistry()
    registry.register(GpuNode())
    server, thread = start_http_server(0, "127.0.0.1", registry)
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=LONG_S) as answer:
        text: str = answer.read().decode()
    return text
