"""The command line against the real application: each command, as text and as JSON, and how it exits."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from octet.api_schemas import CheckpointReport, EvaluationReport, FailureReason, FinishedReport, Job, JobSummary, LogReport
from octet.client import ApiError, Client, api
from octet.client.cli import build_app
from octet.service.jobs import planning
from tests.client.octet_app import API_KEY, OctetApp, Rank
from tests.kit.waiting import LONG_S

MakeSummary = Callable[..., JobSummary]


@pytest.fixture
def octet(app: OctetApp) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(build_app(), list(arguments), env={"OCTET_URL": app.url}, catch_exceptions=False)

    return run


@pytest.fixture
def job_file(tmp_path: Path, runnable: dict[str, Any]) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(runnable))
    return str(path)


@pytest.fixture
def finished(app: OctetApp, client: Client, runnable: dict[str, Any], make_summary: MakeSummary) -> Job:
    """A job that has run: three steps, an evaluation, a checkpoint, a log line."""
    job = client.submit(runnable | {"name": "finished", "labels": {"team": "research"}})
    rank = app.start_rank(job.id)
    rank.train(steps=3)
    rank.report(
        EvaluationReport(step=2, loss=2.5, tokens=512),
        CheckpointReport(step=3, name="step_0000000003", num_bytes=10_000, sha256="a" * 64, loss=2.97),
        LogReport(level="WARNING", message="\x1b[31mred"),
    )
    rank.succeed(make_summary())
    return client.job(job.id)


def test_a_key_is_made_listed_rotated_and_revoked(app: OctetApp, octet: Callable[..., Result]) -> None:
    made = octet("keys", "create", "ada", "--role", "viewer", "--tenant", "research", "--expires-days", "90")
    secret = made.stdout.strip()
    assert secret.startswith("octet_")
    assert "viewer of research, until 20" in made.stderr

    def works(secret: str) -> bool:
        with Client(app.url, secret) as client:
            try:
                list(client.jobs())
            except ApiError:
                return False
            return True

    assert works(secret)
    (listed,) = json.loads(octet("keys", "list", "--json").stdout)
    assert (listed["name"], listed["tenant"], listed["role"]) == ("ada", "research", "viewer")
    new = json.loads(octet("keys", "rotate", listed["id"], "--overlap-hours", "0", "--json").stdout)
    assert (works(secret), works(new["secret"])) == (False, True)
    assert octet("keys", "revoke", new["id"]).stdout == f"{new['id']} (ada) is revoked.\n"
    assert not works(new["secret"])
    lines = octet("keys", "list").stdout.splitlines()
    assert [line.split()[-1] for line in lines] == ["WORKS", "revoked", "expired"]
    refused = octet("keys", "create", "ada", "--role", "viewer", "--tenant", "No such")
    assert refused.exit_code == 2
    assert octet("keys", "revoke", "key_of_nobody").exit_code == 2


@contextmanager
def ranks_do(app: OctetApp, act: Callable[[Rank], None]) -> Iterator[None]:
    """In the background: start a rank for the next job that is queued under the name `watched`, and act through it."""

    def serve() -> None:
        with Client(app.url) as client:
            while not done.wait(0.02):
                for job in client.jobs(state="queued", name="watched"):
                    rank = app.start_rank(job.id)
                    rank.train(steps=2)
                    act(rank)
                    return

    done = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_submit_prints_the_id_and_what_to_do_next(octet: Callable[..., Result], client: Client, job_file: str) -> None:
    shown = octet("submit", job_file, "--set", "priority=70", "--set", "name=submitted")
    [job] = client.jobs(name="submitted")
    assert shown.exit_code == 0
    assert shown.stdout == f"{job.id} is queued. Watch it with: octet watch {job.id}\n"
    assert job.priority == 70
    assert json.loads(octet("submit", job_file, "--json").stdout)["state"] == "queued"


def test_submit_varies_fields(octet: Callable[..., Result], client: Client, job_file: str) -> None:
    shown = octet("submit", job_file, "--set", "name=varied", "--vary", "precision.level=O2,te", "--vary", "training.seed=1,2")
    jobs = list(client.jobs(name="varied"))[::-1]
    assert shown.exit_code == 0
    assert [(job.spec.precision.level, job.spec.training.seed) for job in jobs] == [("O2", 1), ("O2", 2), ("te", 1), ("te", 2)]
    assert shown.stdout.splitlines()[0] == f"{jobs[0].id}  O2, seed=1"
    assert shown.stdout.splitlines()[-1] == "4 jobs are stored. They wait in the queue: octet list"
    varied = ("submit", job_file, "--vary", "training.seed=1,2")
    assert [job["spec"]["training"]["seed"] for job in json.loads(octet(*varied, "--json").stdout)["jobs"]] == [1, 2]
    refused = octet("submit", job_file, "--vary", "training.steps=0")
    assert (refused.exit_code, "changes.0.training.steps" in refused.stderr) == (2, True)
    assert "it shows one job" in octet(*varied, "--watch").stderr


def test_what_only_the_server_can_refuse(octet: Callable[..., Result], job_file: str) -> None:
    for command in ("submit", "validate"):
        shown = octet(command, job_file, "--set", "resources.pool=gpu")
        assert shown.exit_code == 2
        assert shown.stdout == ""
        assert "resources.pool" in shown.stderr
        assert "allowed: cpu" in shown.stderr


def test_validate(octet: Callable[..., Result], job_file: str) -> None:
    shown = octet("validate", job_file)
    assert shown.exit_code == 0
    assert "is a valid job: 858,880 parameters" in shown.stdout
    assert "256 tokens a step in 1 micro-batches of 4 sequences" in shown.stdout
    assert json.loads(octet("validate", job_file, "--json").stdout)["object"] == "validated_job"
    assert octet("validate", job_file, "--offline", "--url", "http://127.0.0.1:9").stdout == shown.stdout


@pytest.mark.system
def test_plan(octet: Callable[..., Result], job_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "DEADLINE_S", LONG_S)
    monkeypatch.setattr(api, "LONGEST_PLAN_S", LONG_S)
    shown = octet("plan", job_file, "--levels", "fp32,O2")
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()[:3]] == ["LEVEL", "fp32", "O2"]
    by_server = json.loads(octet("plan", job_file, "--levels", "fp32,O2", "--json").stdout)
    here = json.loads(
        octet("plan", job_file, "--levels", "fp32,O2", "--offline", "--json", "--url", "http://127.0.0.1:9").stdout
    )
    for one, other in zip(by_server["rows"], here["rows"], strict=True):
        assert one["states"] == other["states"]
        assert one["peak_bytes"] == other["peak_bytes"] > one["plain_bytes"]
    assert octet("plan", job_file, "--levels", "O9").exit_code == 2


@pytest.mark.system
def test_plan_of_a_folder(
    octet: Callable[..., Result], runnable: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(planning, "DEADLINE_S", LONG_S)
    monkeypatch.setattr(api, "LONGEST_PLAN_S", LONG_S)
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "vocab_size": 256, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = tmp_path / "folder.yaml"
    job.write_text(json.dumps(runnable | {"model": {"family": "huggingface", "path": str(tmp_path)}}))
    found = [
        json.loads(octet("plan", str(job), "--levels", "O2", "--json", *more).stdout)["rows"][0]
        for more in ((), ("--offline", "--url", "http://127.0.0.1:9"))
    ]
    assert found[0]["peak_bytes"] == found[1]["peak_bytes"] > 0, found
    assert found[0]["states"] == found[1]["states"]
    assert found[0]["states_agree"] is True


def test_a_watched_job_that_succeeds_exits_0(
    app: OctetApp, octet: Callable[..., Result], job_file: str, make_summary: MakeSummary
) -> None:
    with ranks_do(app, lambda rank: rank.succeed(make_summary())):
        shown = octet("submit", job_file, "--watch", "--set", "name=watched")
    assert shown.exit_code == 0
    assert "job.accepted" in shown.stdout
    assert "watched  succeeded  step 2/100, loss 2.9800" in shown.stdout
    assert "evaluation  loss 2.0000, perplexity 7.389" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_a_watched_job_that_fails_exits_1(app: OctetApp, octet: Callable[..., Result], job_file: str) -> None:
    failed = FinishedReport(outcome="failed", reason=FailureReason.DATA_ERROR, message="the corpus is gone")
    with ranks_do(app, lambda rank: rank.report(failed)):
        shown = octet("submit", job_file, "--watch", "--json", "--set", "name=watched")
    assert shown.exit_code == 1
    assert json.loads(shown.stdout)["reason"] == "data_error"
    again = octet("watch", json.loads(shown.stdout)["id"])
    assert again.exit_code == 1
    assert "data_error: the corpus is gone" in again.stdout
    assert "hint" in again.stdout


def test_ctrl_c_detaches_and_the_job_goes_on(
    octet: Callable[..., Result], client: Client, job_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("octet.client.watch.time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    shown = octet("submit", job_file, "--watch", "--set", "name=detached")
    [job] = client.jobs(name="detached")
    assert shown.exit_code == 130
    assert f"octet cancel {job.id}" in shown.stderr
    assert "the job goes on" in shown.stderr
    assert job.state == "queued"


def test_cancel(octet: Callable[..., Result], client: Client, runnable: dict[str, Any]) -> None:
    job = client.submit(runnable)
    assert octet("cancel", job.id).stdout == f"{job.id} is cancelled.\n"
    again = octet("cancel", job.id)
    assert again.exit_code == 2
    assert "illegal_transition" in again.stderr
    assert octet("watch", job.id).exit_code == 1


def test_pause_resume_and_cancel_without_a_checkpoint(
    app: OctetApp, octet: Callable[..., Result], client: Client, runnable: dict[str, Any]
) -> None:
    job = client.submit(runnable)
    for command, state in (("pause", "paused"), ("pause", "paused"), ("resume", "queued"), ("resume", "queued")):
        assert octet(command, job.id).stdout == f"{job.id} is {state}.\n"
    app.start_rank(job.id)
    assert octet("cancel", job.id).stdout == f"{job.id} is cancelling.\n"
    assert json.loads(octet("cancel", job.id, "--now", "--json").stdout)["desired_state"] == "cancel_now"
    shown = octet("resume", job.id)
    assert shown.exit_code == 2
    assert "the job is cancelling; resume is not possible. Possible: cancel." in shown.stderr


def test_retry_clone_and_change(app: OctetApp, octet: Callable[..., Result], client: Client, runnable: dict[str, Any]) -> None:
    job = client.submit(runnable)
    client.cancel(job.id)
    assert octet("retry", job.id).stdout == f"{job.id} is queued.\n"
    assert octet("change", job.id, "--set", "priority=70", "--set", "labels.team=research").exit_code == 0
    assert (client.job(job.id).priority, client.job(job.id).labels) == (70, {"team": "research"})
    shown = octet("change", job.id, "--set", "name=other")
    assert (shown.exit_code, "unknown field 'name'" in shown.stderr) == (2, True)
    copy = json.loads(octet("clone", job.id, "--set", "name=copy", "--set", "labels.team=null", "--json").stdout)
    assert (copy["name"], copy["labels"], copy["priority"]) == ("copy", {}, 70)
    assert octet("clone", "copy").stdout.endswith(f"Watch it with: octet watch {next(client.jobs(limit=1)).id}\n")
    client.cancel(copy["id"])
    assert json.loads(octet("retry", copy["id"], "--steps", "900", "--json").stdout)["spec"]["training"]["steps"] == 900


def test_delete_asks_first(octet: Callable[..., Result], client: Client, runnable: dict[str, Any]) -> None:
    job = client.submit(runnable)
    shown = octet("delete", job.id, "--yes")
    assert (shown.exit_code, "the job is queued; delete is not possible. Cancel it first." in shown.stderr) == (2, True)
    client.cancel(job.id)
    shown = octet("delete", job.id)
    assert (shown.exit_code, f"({job.id}) with its logs and checkpoints?" in shown.stderr) == (1, True)
    assert client.find(job.id) is not None
    assert octet("delete", job.id, "--yes").stdout == f"{job.id} is deleted.\n"
    with pytest.raises(ApiError, match="not_found"):
        client.job(job.id)


def test_delete_one_checkpoint(octet: Callable[..., Result], client: Client, finished: Job) -> None:
    """Asking first, and by name; of the shared job only what is not there, so that it stays for other tests."""
    asked = octet("delete", finished.id, "--checkpoint", "step_0000000099")
    assert (asked.exit_code, f"Delete step_0000000099 of {finished.name}" in asked.stderr) == (1, True)
    absent = octet("delete", finished.id, "--checkpoint", "step_0000000099", "--yes")
    assert (absent.exit_code, "has no checkpoint 'step_0000000099'" in absent.stderr) == (2, True)
    absent = octet("delete", finished.id, "--export", "step_0000000099_bf16", "--yes")
    assert (absent.exit_code, "has no export" in absent.stderr) == (2, True)
    both = octet("delete", finished.id, "--checkpoint", "a", "--export", "b", "--yes")
    assert (both.exit_code, "not both" in both.output) == (2, True)


def test_list(octet: Callable[..., Result], finished: Job) -> None:
    shown = octet("list", "--state", "succeeded", "--label", "team:research", "--limit", "1")
    assert shown.exit_code == 0
    header, row = shown.stdout.splitlines()
    assert header.startswith("ID")
    assert row.startswith(finished.id)
    assert json.loads(octet("list", "--state", "succeeded", "--limit", "1", "--json").stdout)[0]["id"] == finished.id
    assert json.loads(octet("list", "--label", "team:nobody", "--json").stdout) == []


def test_an_empty_list_names_the_filters_and_what_is_there_without_them(octet: Callable[..., Result], finished: Job) -> None:
    shown = octet("list", "--state", "failed", "--label", "team:nobody", "--search", "finis").stdout
    assert shown.startswith("No job fits --state failed --label team:nobody --search finis. Without the filter there ")
    total = json.loads(octet("list", "--json").stdout)
    assert total
    assert octet("list", "--page", "100").stdout.startswith("Page 100 is empty: all ")


def test_a_list_has_pages_and_filters(octet: Callable[..., Result], client: Client, runnable: dict[str, Any]) -> None:
    ids = [client.submit(runnable | {"name": f"leaf-of-list-{number}", "priority": 7}).id for number in range(5)]
    for job_id in ids[:2]:
        client.cancel(job_id)
    first = octet("list", "--search", "LEAF-of", "--limit", "2")
    assert [line.split()[0] for line in first.stdout.splitlines()[1:] if line.startswith("job_")] == [ids[4], ids[3]]
    assert "1 to 2 of 5 jobs; the next page: --page 2" in first.stderr
    last = octet("list", "--search", "leaf-of", "--limit", "2", "--page", "3")
    assert [line.split()[0] for line in last.stdout.splitlines()[1:]] == [ids[0]]
    assert "5 to 5 of 5 jobs\n" in last.stderr
    assert "leaf-of-list-4 waits: " in first.stdout
    both = octet("list", "--search", "leaf-of", "--state", "queued", "--state", "cancelled", "--json")
    assert [job["id"] for job in json.loads(both.stdout)] == ids[::-1]
    chosen = octet(
        "list", "--search", "leaf-of", "--state", "cancelled", "--level", "O2", "--pool", "cpu", "--page", "2", "-n", "1"
    )
    assert [line.split()[0] for line in chosen.stdout.splitlines()[1:]] == [ids[0]]
    assert json.loads(octet("list", "--search", "leaf-of", "--level", "fp32", "--json").stdout) == []


def test_without_a_command_octet_shows_what_is_going_on(
    app: OctetApp, octet: Callable[..., Result], client: Client, finished: Job, runnable: dict[str, Any]
) -> None:
    waiting = client.submit(runnable | {"name": "going-on"})
    shown = octet()
    assert shown.exit_code == 0
    not_ready = "Not ready: no dispatcher leads: jobs are accepted, and wait until one does"
    assert shown.stdout.startswith(f"Octet at {app.url}\n{not_ready}\nPOOL ")
    fires = "critical: No dispatcher leads: jobs are taken and none is started. docs/operations.md#octetnoleader"
    assert "\nAlerts that fire: " in shown.stdout  # jobs of other tests on this server may have fired some of their own
    assert f"\n{fires}\n" in shown.stdout
    running, ended = shown.stdout.split("Jobs that ended last")
    assert waiting.id in running
    assert "going-on waits: " in running
    assert "octet watch going-on" in ended
    assert finished.id in ended
    assert waiting.id not in ended


def test_without_a_job_octet_says_how_to_begin(tmp_path: Path) -> None:
    with OctetApp(tmp_path) as app:
        shown = CliRunner().invoke(build_app(), [], env={"OCTET_URL": app.url})
        assert "No jobs yet. Next:\n  octet submit job.yaml --watch\n  octet list\n" in shown.stdout
        assert CliRunner().invoke(build_app(), ["list"], env={"OCTET_URL": app.url}).stdout.startswith("No jobs. Submit one")


def test_show(octet: Callable[..., Result], finished: Job) -> None:
    shown = octet("show", finished.id)
    assert shown.exit_code == 0
    assert "1, the newest at step 3 (10 kB)" in shown.stdout
    assert Job.model_validate_json(octet("show", finished.id, "--json").stdout) == finished
    unknown = octet("show", "job_unknown")
    assert unknown.exit_code == 2
    assert "there is no job 'job_unknown'" in unknown.stderr


@pytest.mark.parametrize(
    ("command", "text", "field", "value"),
    [
        ("attempts", "node-1", "node", "node-1"),
        ("checkpoints", "10 kB", "num_bytes", 10_000),
        ("metrics", "2.9800", "step", 1),
    ],
)
def test_records_as_table_and_as_one_document(
    octet: Callable[..., Result], finished: Job, command: str, text: str, field: str, value: object
) -> None:
    assert text in octet(command, finished.id).stdout
    assert json.loads(octet(command, finished.id, "--json").stdout)[0][field] == value


def test_a_long_curve_is_shown_in_buckets_with_its_evaluations(octet: Callable[..., Result], finished: Job) -> None:
    shown = octet("metrics", finished.id, "--rows", "2").stdout.splitlines()
    assert [line.split()[:3] for line in shown[1:]] == [["3", "2.9800", "2.5000"]]  # the mean, and the evaluation after 2


def test_jobs_are_compared(octet: Callable[..., Result], app: OctetApp, client: Client, finished: Job) -> None:
    other = client.submit(finished.spec.model_copy(update={"name": "other"}))
    app.start_rank(other.id).train(steps=3)
    shown = octet("metrics", finished.id, "other")
    assert shown.exit_code == 0
    header, *rows = [line.split() for line in shown.stdout.splitlines()]
    assert header == ["STEP", "FINISHED", "OTHER", "DIFF"]
    assert rows == [[str(step), f"{3 - step / 100:.4f}", f"{3 - step / 100:.4f}", "+0.00%"] for step in (1, 2, 3)] + [
        ["eval", "2", "2.5000", "–", "–"]
    ]


@pytest.mark.parametrize("follow", [(), ("--follow",)])
def test_events_and_logs_as_lines_and_as_json(octet: Callable[..., Result], finished: Job, follow: tuple[str, ...]) -> None:
    logs = octet("logs", finished.id, *follow)
    assert logs.stdout.endswith("  WARNING  \\x1b[31mred\n")
    [line] = octet("logs", finished.id, "--json", *follow).stdout.splitlines()
    assert json.loads(line)["message"] == "\x1b[31mred"
    assert octet("logs", finished.id, "--rank", "1", *follow).stdout == ""
    numbers = [json.loads(line)["seq"] for line in octet("events", finished.id, "--json", *follow).stdout.splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert "job.succeeded" in octet("events", finished.id, *follow).stdout


@pytest.mark.parametrize(
    ("wish", "is_shown"),
    [
        (["--tail", "1"], True),
        (["--since", "1h"], True),
        (["--since", "2999-01-01"], False),
        (["--attempt", "1", "--rank", "0"], True),
    ],
)
def test_some_lines_of_a_log(octet: Callable[..., Result], finished: Job, wish: list[str], is_shown: bool) -> None:
    assert ("red" in octet("logs", finished.id, *wish).stdout) is is_shown


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (["--since", "yesterday"], "allowed: 30s, 10m, 2h, 1d"),
        (["--since", "999999d"], "allowed: 30s, 10m"),
        (["--attempt", "2"], "has 1"),
    ],
)
def test_a_log_that_nobody_can_have_is_refused(octet: Callable[..., Result], finished: Job, wish: list[str], said: str) -> None:
    refused = octet("logs", finished.id, *wish)
    assert refused.exit_code == 2
    assert said in refused.stderr


def test_models_levels_and_pools(octet: Callable[..., Result]) -> None:
    lines = octet("models").stdout.splitlines()
    assert lines[0].split()[:2] == ["PRESET", "PARAMS"]
    (row,) = [line.split() for line in lines if "swin-1.0b" in line]
    assert row[:5] == ["swin-1.0b", "1.06", "G", "17", "GB"]
    assert lines[-2].split()[:3] == ["huggingface", "138", "architectures;"]
    assert lines[-1].split()[:4] == ["python", "your", "own", "network;"]
    families = {family["family"]: family for family in json.loads(octet("models", "--json").stdout)}
    assert "qwen3" in families["huggingface"]["architectures"]["next_token"]
    assert "≤ 6.2" in octet("levels").stdout
    assert "O2" in [level["name"] for level in json.loads(octet("levels", "--json").stdout)]
    assert octet("pools").stdout.splitlines()[1].startswith("cpu")
    assert json.loads(octet("pools", "--json").stdout)[0]["accelerator"] == "cpu"


def test_usage_and_the_trace_of_a_job(octet: Callable[..., Result], client: Client, runnable: dict[str, Any]) -> None:
    job = client.submit(runnable)
    _, row, storage = octet("usage").stdout.splitlines()
    (tenant,) = json.loads(octet("usage", "--json").stdout)
    pool = tenant["pools"][0]
    assert row.split()[:-1] == ["default", "cpu", str(pool["slots"]), str(pool["jobs"])]
    assert 0 <= float(row.split()[-1]) <= 1.001 * pool["slot_hours"], "those of running jobs grow meanwhile"
    assert storage.startswith("default: storage ")
    assert "; slot hours count from 0 on 2" in storage
    assert f"trace     {job.trace_id}" in octet("show", job.id).stdout


def test_the_key_comes_from_the_environment(tmp_path: Path) -> None:
    with OctetApp(tmp_path, api_keys=(API_KEY,)) as app:
        without = CliRunner().invoke(build_app(), ["list", "--url", app.url])
        assert without.exit_code == 2
        assert "an API key is needed" in without.stderr
        assert "Set OCTET_API_KEY" in without.stderr
        assert CliRunner().invoke(build_app(), ["list", "--url", app.url], env={"OCTET_API_KEY": API_KEY}).exit_code == 0


def test_a_reader_that_goes_away_is_no_traceback(app: OctetApp, finished: Job) -> None:
    command = f"{sys.executable} -m octet.client.cli events {finished.id} --url {app.url} | true"
    piped = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert piped.stderr == ""


def test_a_job_is_found_by_its_name_and_by_a_beginning_of_its_id(
    octet: Callable[..., Result], client: Client, runnable: dict[str, Any]
) -> None:
    first = client.submit(runnable | {"name": "found-once"})
    again = [client.submit(runnable | {"name": "found-twice"}) for _ in range(2)]
    for text in (first.id, "found-once", first.id[:-1]):
        assert json.loads(octet("show", text, "--json").stdout)["id"] == first.id
        assert octet("events", text).exit_code == 0
    shown = octet("cancel", "found-twice")
    assert shown.exit_code == 2
    assert all(job.id in shown.stderr for job in again)
    assert first.id not in shown.stderr
    newest = octet("show", "found-twice", "--json")
    assert json.loads(newest.stdout)["id"] == again[1].id
    assert f"this is the newest, {again[1].id}" in newest.stderr
    shown = octet("cancel", "job_")
    assert shown.exit_code == 2
    shown = octet("show", again[0].id[:5])
    assert shown.exit_code == 2
    assert first.id in shown.stderr
    assert "there is no job 'secnd'" in octet("show", "secnd").stderr
    assert client.job(first.id).state.value == "queued"
    assert octet("cancel", "found-once").exit_code == 0
    assert client.job(first.id).state.value == "cancelled"
