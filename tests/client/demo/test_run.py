"""The demo against the real application, with ranks that report in place of a cluster: what it asks, shows and leaves."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner, Result

from octet.api_schemas import FailureReason, FinishedReport, JobSpec, JobState, JobSummary, LogReport
from octet.client import Client, SpecRefused
from octet.client.cli import build_app
from octet.client.demo.job import JUDGED_FROM_STEPS, demo_spec
from octet.client.demo.own_server import EXAMPLES
from tests.client.octet_app import OctetApp, Rank

MakeSummary = Callable[..., JobSummary]


@pytest.fixture
def own_app(tmp_path: Path) -> Iterator[OctetApp]:
    with OctetApp(tmp_path) as running:
        yield running


def run_demo(app: OctetApp, act: Callable[[Rank, JobSpec], None], *options: str) -> Result:
    """Run `octet demo --url` while each of its jobs gets a rank that acts."""
    done = threading.Event()

    def serve() -> None:
        with Client(app.url) as client:
            while not done.wait(0.02):
                for job in client.jobs(state="queued"):
                    rank = app.start_rank(job.id)
                    rank.train(steps=2)
                    act(rank, job.spec)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        return CliRunner().invoke(build_app(), ["demo", "--url", app.url, *options], catch_exceptions=False)
    finally:
        done.set()
        thread.join()


def test_the_same_job_at_each_level_on_the_standard_library() -> None:
    fp32, o2 = (demo_spec(level, 400, "demo-1") for level in ("fp32", "O2"))
    differing = {name for name in JobSpec.model_fields if getattr(fp32, name) != getattr(o2, name)}
    assert differing == {"name", "precision"}
    assert fp32.data.path == sysconfig.get_path("stdlib")
    assert fp32.data.selects("json/decoder.py")
    assert not fp32.data.selects("test/test_json/test_decode.py")


def test_few_steps_are_allowed_and_wrong_levels_are_not() -> None:
    assert demo_spec("fp32", 1, "demo-1").training.schedule.warmup_steps == 0
    with pytest.raises(SpecRefused, match="with the letter O"):
        demo_spec("02", 400, "demo-1")


def test_it_ends_with_the_comparison(own_app: OctetApp, make_summary: MakeSummary) -> None:
    converted = {"weights": 1600, "gradients": 800, "exp_avg": 800, "exp_avg_sq": 1600}

    def act(rank: Rank, spec: JobSpec) -> None:
        low = {"memory_bytes": converted, "converted_memory_bytes": converted} if spec.precision.level == "O2" else {}
        rank.succeed(make_summary(**low))

    shown = run_demo(own_app, act)
    assert shown.exit_code == 0, shown.output
    assert "fp32 2.000 (yes), O2 2.000 (yes)" in shown.stdout
    rows = {line.strip().split("  ")[0]: line.split() for line in shown.stdout.splitlines()}
    assert rows["evaluation perplexity"][-2:] == ["7.389", "7.389"]
    assert rows["final training loss"][-2:] == ["1.7500", "1.7500"]
    assert rows["in converted layers"][-2:] == ["16.00", "6.00"]
    assert "first step" in shown.stdout
    verdict = "Passed: fp32 holds 16.00 bytes per parameter, O2 4.80 (70% less) at +0.00% evaluation loss."
    assert shown.stdout.splitlines()[-2] == verdict
    assert "\x1b" not in shown.stdout
    with Client(own_app.url) as client:
        jobs = list(client.jobs())
    page = f"{own_app.url}/compare?jobs={jobs[1].id},{jobs[0].id}"
    assert shown.stdout.splitlines()[-1] == f"The jobs on the page: {page}"
    assert f"Watch the jobs on {page}" in shown.stdout
    assert [job.name for job in jobs] == ["demo-O2", "demo-fp32"]
    assert len({job.labels["comparison"] for job in jobs}) == 1


def test_a_job_that_did_not_learn_fails_the_demo(own_app: OctetApp, make_summary: MakeSummary) -> None:
    shown = run_demo(own_app, lambda rank, _: rank.succeed(make_summary(evaluation_loss=3.1)))
    assert shown.exit_code == 1
    assert "3.100 (NO)" in shown.stdout
    assert shown.stdout.splitlines()[-2].startswith("FAILED to learn")


def test_too_few_steps_are_not_judged(own_app: OctetApp, make_summary: MakeSummary) -> None:
    shown = run_demo(own_app, lambda rank, _: rank.succeed(make_summary(evaluation_loss=3.1)), "--steps", "30")
    assert shown.exit_code == 0
    assert "30 steps are too few to judge" in shown.stdout
    assert "fp32 3.100 (97%), O2 3.100 (97%)." in shown.stdout
    assert f"From {JUDGED_FROM_STEPS} steps on it has to be at most 80%." in shown.stdout
    assert shown.stdout.splitlines()[-2].startswith("Too short to judge: fp32 holds 16.00 bytes per parameter")


@pytest.mark.system
def test_a_job_that_fails_is_shown_with_the_end_of_its_log(own_app: OctetApp, make_summary: MakeSummary) -> None:
    def act(rank: Rank, spec: JobSpec) -> None:
        if spec.precision.level == "fp32":
            rank.succeed(make_summary())
            return
        rank.report(LogReport(level="ERROR", message="the last words"))
        rank.report(FinishedReport(outcome="failed", reason=FailureReason.DATA_ERROR, message="gone"))

    shown = run_demo(own_app, act)
    assert shown.exit_code == 1
    assert "the last words" in shown.stdout
    assert "data_error: gone" in shown.stdout
    assert shown.stdout.splitlines()[-2] == "FAILED: demo-O2 failed."


def test_a_server_of_others_is_not_asked_to_stay() -> None:
    shown = CliRunner().invoke(build_app(), ["demo", "--url", "http://127.0.0.1:9", "--stay"])
    assert shown.exit_code == 2
    assert "stays up anyway" in shown.stderr


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (signal.SIGTERM, 143)])
def test_what_ends_the_demo_ends_its_jobs(own_app: OctetApp, error: Any, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        if error is KeyboardInterrupt:
            raise KeyboardInterrupt
        signal.raise_signal(error)

    monkeypatch.setattr("octet.client.watch.time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    before = signal.getsignal(signal.SIGTERM)
    shown = CliRunner().invoke(build_app(), ["demo", "--url", own_app.url])
    assert shown.exit_code == status
    assert signal.getsignal(signal.SIGTERM) is before
    with Client(own_app.url) as client:
        assert [job.state for job in client.jobs()] == [JobState.CANCELLED, JobState.CANCELLED]


@pytest.mark.system
def test_a_server_that_does_not_start_leaves_its_log(tmp_path: Path) -> None:
    (tmp_path / "octet.db").mkdir()  # where the database should be a file
    shown = CliRunner().invoke(build_app(), ["demo", "--data-dir", str(tmp_path)])
    assert shown.exit_code == 4
    assert "the server ended with exit status" in shown.stderr
    assert f"log is {tmp_path / 'server.log'}" in shown.stderr
    assert (tmp_path / "server.log").exists()


@pytest.mark.system
@pytest.mark.parametrize(
    ("ended_by", "status"), [(None, 0), (signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.matrix)]
)
def test_nothing_is_left_of_a_server_of_its_own(tmp_path: Path, ended_by: signal.Signals | None, status: int) -> None:
    """Run the whole path, Ray and worker included. Two steps are too few to be judged, and the verdict says so.

    Without a signal the server stays up on request: its page is read, then Ctrl-C ends it without a failure.
    """
    steps = "2" if ended_by is None else "1000"  # what is ended early must not end by itself before, on a busy machine
    command = [
        sys.executable,
        "-m",
        "octet.client.cli",
        "demo",
        "--steps",
        steps,
        "--levels",
        "fp32",
        "--data-dir",
        str(tmp_path),
        *(["--stay"] if ended_by is None else []),
    ]
    shown = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heed_interrupts
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            shown += line
            if line.startswith("The server stays up"):
                (page,) = re.findall("The jobs on the page: (http://[^/]+/jobs/job_\\w+)", shown)
                assert httpx.get(page).headers["content-type"].startswith("text/html")
                with Client(page.partition("/jobs/")[0]) as client:
                    assert [job.state for job in client.jobs()] == [JobState.SUCCEEDED]
                    if EXAMPLES.is_dir():  # what the page's form begins with
                        client.validate(yaml.safe_load(Path("examples/gpt-tiny.yaml").read_text("utf-8")))
                demo.send_signal(signal.SIGINT)
            # The second time the server is being stopped already.
            if ended_by is not None and ("job.placed" in line or "Stopping" in line):
                demo.send_signal(ended_by)
    assert demo.returncode == status, shown
    assert ("Too short to judge: fp32 holds" in shown) == (ended_by is None)
    assert processes_of(tmp_path) == []


def heed_interrupts() -> None:
    """Let SIGINT interrupt the process, as in a terminal.

    A shell starts background commands with SIGINT ignored, and their children inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def processes_of(data_dir: Path) -> list[str]:
    """Command lines of all processes that were started for this folder: it is in their environment or arguments."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            about = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            if str(data_dir).encode() in about and process.name != str(os.getpid()):
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found
