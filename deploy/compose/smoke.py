"""Prove the compose stack: up, the demo and README's job, a job on each pool, metrics, every container killed once, down.

    make compose-smoke                                     with Docker
    make compose-smoke COMPOSE="podman compose"            with another engine

Jobs go through the published API. While two of them train, a container is killed with SIGKILL and started again some seconds
later; both jobs must succeed, with each step of their curves reported once and equal to those of undisturbed jobs.
`--kill dispatcher ray-head` kills those alone. Exit status 0 only if all of it holds. The stack and its volumes are removed at
the end: do not run it where they matter.
"""

import argparse
import json
import logging
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from octet.api_schemas import Job, JobState
from octet.client import Client
from octet.client.errors import OctetError
from octet.client.job_file import load_job_file

ROOT = Path(__file__).parent.parent.parent
COMPOSE = shlex.split(os.environ.get("COMPOSE", "docker compose"))
API = f"http://127.0.0.1:{os.environ.get('OCTET_PORT', '8000')}"
PROMETHEUS = f"http://127.0.0.1:{os.environ.get('OCTET_PROMETHEUS_PORT', '9090')}"
GRAFANA = f"http://127.0.0.1:{os.environ.get('OCTET_GRAFANA_PORT', '3000')}"

KILLED = ("api", "ingest", "dispatcher", "postgres", "prometheus", "grafana", "node-cpu", "node-cpu-batch", "ray-head")
POOLS = {"cpu": 2, "cpu-batch": 1}
STEPS = 800
KILL_AT_STEP = 60
AWAY_S = 5.0
UP_S, JOB_S = 300.0, 420.0

logger = logging.getLogger("smoke")


class Failed(Exception):
    """Something that has to hold does not."""


@dataclass
class Stack:
    """The running stack, as its user reaches it."""

    client: Client

    def finish(self, jobs: list[Job]) -> list[Job]:
        """The jobs once all have succeeded."""
        wait_for("the jobs' end", lambda: all(self.client.job(job.id).state.is_terminal for job in jobs), JOB_S)
        ended = [self.client.job(job.id) for job in jobs]
        for job in ended:
            if job.state is not JobState.SUCCEEDED:
                raise Failed(f"{job.name} on {job.spec.resources.pool} {job.state}: {job.reason} {job.message}")
        return ended

    def submit(self, name: str) -> list[Job]:
        """One job on each pool."""
        return [self.client.submit(spec(f"{name}-{pool}", pool, workers)) for pool, workers in POOLS.items()]

    def wait_until_training(self, jobs: list[Job]) -> None:
        def train() -> bool:
            shown = [self.client.job(job.id) for job in jobs]
            if any(job.state.is_terminal for job in shown):
                raise Failed("a job ended before the container could be killed; raise STEPS")
            return all(job.progress is not None and job.progress.step >= KILL_AT_STEP for job in shown)

        wait_for(f"step {KILL_AT_STEP} of both jobs", train, JOB_S)

    def losses(self, job: Job) -> list[float | None]:
        """The job's curve, after checking that it has every step once."""
        points = list(self.client.metrics(job.id))
        if [point.step for point in points] != list(range(1, STEPS + 1)):
            raise Failed(f"the curve of {job.name} has {len(points)} points, not each of {STEPS} steps once")
        return [point.loss for point in points]


def spec(name: str, pool: str, workers: int) -> dict[str, Any]:
    """A job of half a minute, on text that every image has."""
    return {
        "name": name,
        "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 256, "max_sequence_length": 128},
        "precision": {"level": "O2"},
        "data": {"source": "text", "path": "/app/corpus/json", "include": ["**/*.py"]},
        "training": {
            "steps": STEPS,
            "global_batch_size": 8,
            "sequence_length": 64,
            "eval_every": STEPS,
            "checkpoint_every": 20,
            "seed": 7,
        },
        "resources": {"pool": pool, "workers": workers},
        "retry": {"max_failures": 3},
        "labels": {"purpose": "smoke"},
    }


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kill", nargs="*", default=KILLED, choices=KILLED, metavar="SERVICE", help=f"of {', '.join(KILLED)}")
    killed = parser.parse_args().kill
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    began = time.monotonic()
    try:
        compose("up", "-d", "--build")
        logger.info("the stack is built and started after %.0f s", time.monotonic() - began)
        with Client(API, wait_for("the API key", api_key, UP_S), patience_s=60) as client:
            prove(Stack(client), killed)
    except (Failed, OctetError) as failure:
        logger.error("FAILED: %s", failure)
        return 1
    finally:
        compose("down", "-v")
    logger.info("passed in %.0f s; the stack is down", time.monotonic() - began)
    return 0


def prove(stack: Stack, killed: Sequence[str]) -> None:
    wait_for("a service that is ready", stack.client.is_ready, UP_S)
    undisturbed = stack.submit("undisturbed")
    wait_for("each rank's own metrics in Prometheus", lambda: ranks_scraped(undisturbed), JOB_S)
    expected = [stack.losses(job) for job in stack.finish(undisturbed)]
    logger.info("a job on each of %s succeeded; loss %.4f → %.4f", ", ".join(POOLS), expected[0][0], expected[0][-1])
    look_at_prometheus()
    run_what_the_documents_show(stack)
    wait_for("Grafana", lambda: get_json(f"{GRAFANA}/api/health")["database"] == "ok", UP_S)
    refused = status_of(f"{API}/v1/jobs")
    if refused != 401:
        raise Failed(f"GET /v1/jobs without the API key answers {refused}, not 401")
    for service in killed:
        kill(stack, service, expected)


def run_what_the_documents_show(stack: Stack) -> None:
    """Run the demo, and the job that README shows."""
    shown = compose("--profile", "demo", "run", "--rm", "demo")  # docker compose needs no profile here, podman-compose does
    if "Passed: " not in shown:
        raise Failed(f"the demo did not pass:\n{shown[-2000:]}")
    (example,) = stack.finish([stack.client.submit(load_job_file(str(ROOT / "examples/gpt-tiny.yaml")))])
    logger.info("the demo passed; %s of examples/ succeeded", example.name)
    (row,) = stack.client.plan(example.spec, ["O2"]).rows
    if row.peak_bytes is None:
        raise Failed(f"the api traces no peak: {row.reason}")
    logger.info("the api plans %s: %d bytes at the peak", example.name, row.peak_bytes)


def kill(stack: Stack, service: str, expected: list[list[float | None]]) -> None:
    """Kill a container while jobs train; they must end as if it had never happened."""
    jobs = stack.submit(f"without-{service}")
    stack.wait_until_training(jobs)
    compose("kill", "-s", "SIGKILL", service)
    killed = time.monotonic()
    time.sleep(AWAY_S)
    compose("start", service)
    ended = stack.finish(jobs)
    for job, curve in zip(ended, expected, strict=True):
        if stack.losses(job) != curve:
            raise Failed(f"the curve of {job.name} differs from that of the undisturbed job")
    attempts = ", ".join(f"{job.spec.resources.pool} {job.num_attempts}" for job in ended)
    seconds = time.monotonic() - killed
    logger.info("%-14s killed: both jobs succeeded %3.0f s later, curves equal; attempts: %s", service, seconds, attempts)


def ranks_scraped(jobs: list[Job]) -> bool:
    """Return True if Prometheus found every rank through service discovery and has its steps."""
    found = {(series["job_id"], series["rank"]) for series in query("octet_train_step")}
    wanted = {(job.id, str(rank)) for job in jobs for rank in range(job.spec.resources.workers)}
    return wanted <= found


def look_at_prometheus() -> None:
    for expression in ('up{job="octet-api"} == 1', 'octet_jobs{state="succeeded"} >= 1', "octet_dispatcher_leads == 1"):
        wait_for(f"{expression} in Prometheus", partial(query, expression), 60)
    rules = [rule for group in get_json(f"{PROMETHEUS}/api/v1/rules")["data"]["groups"] for rule in group["rules"]]
    unhealthy = [rule["name"] for rule in rules if rule["health"] not in {"ok", "unknown"}]
    if not rules or unhealthy:
        raise Failed(f"{len(rules)} rules are loaded; in error: {unhealthy}")
    logger.info("Prometheus: the API and every rank were scraped; %d rules are loaded, none in error", len(rules))


def compose(*arguments: str) -> str:
    """Run the engine; its output is shown where it fails."""
    result = subprocess.run([*COMPOSE, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        output = (result.stdout + result.stderr)[-4000:]
        raise Failed(f"{shlex.join([*COMPOSE, *arguments])} ended with {result.returncode}:\n{output}")
    return result.stdout


def api_key() -> str | None:
    try:
        return compose("exec", "-T", "api", "cat", "/secrets/api/key").strip() or None
    except Failed:
        return None


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float) -> Any:
    """Wait until the condition is true and return its value. Network errors count as false."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if answer := condition():
                return answer
        except (OSError, OctetError) as error:
            logger.debug("%s: %s", what, error)
        time.sleep(0.5)
    raise Failed(f"{what} did not come within {timeout_s:.0f} s")


def query(expression: str) -> list[dict[str, str]]:
    """The labels of every series that an expression returns."""
    answer = get_json(f"{PROMETHEUS}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
    return [series["metric"] for series in answer["data"]["result"]]


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


if __name__ == "__main__":
    sys.exit(main())
