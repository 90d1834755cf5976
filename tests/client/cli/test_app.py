"""The command line without a server: help, usage, refusals, exit statuses, and what goes to which stream."""

import fcntl
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from typer.testing import CliRunner, Result

from octet.client.cli import build_app, options
from octet.client.cli.app import MEANT
from octet.service.db.engine import Database
from tests.kit.ports import free_port

NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens there
COMMANDS = {
    "serve", "api", "ingest", "dispatcher", "demo", "compare", "submit", "validate", "plan", "watch", "pause", "resume",
    "cancel", "clone", "retry", "change", "delete", "list", "show", "logs", "events", "metrics",
    "checkpoints", "download", "export", "exports", "attempts", "models", "levels", "pools", "usage", "version",
    "doctor", "debug", "backup", "restore", "login", "logout",
}  # fmt: skip


def octet(*arguments: str, stdin: str | None = None, **env: str) -> Result:
    return CliRunner().invoke(build_app(), list(arguments), input=stdin, env=env)


@pytest.fixture
def job_file(tmp_path: Path, spec: dict[str, Any]) -> str:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(spec))
    return str(path)


@pytest.mark.parametrize(
    ("typed", "meant"), [("run", "submit"), ("ls", "list"), ("status", "show"), ("STOP", "cancel"), ("sumbit", "submit")]
)
def test_a_command_of_another_tool_is_answered_by_ours(typed: str, meant: str) -> None:
    shown = octet(typed, "x")
    assert shown.exit_code == 2
    assert f"Did you mean '{meant}'?" in shown.stderr


def test_words_of_other_tools_mean_one_command_each() -> None:
    words = [word for row in MEANT.values() for word in row.split()]
    assert len(set(words)) == len(words)
    assert set(MEANT) <= COMMANDS


def test_help_names_every_command() -> None:
    shown = octet("--help")
    assert shown.exit_code == 0
    assert all(f" {command} " in shown.stdout for command in COMMANDS)
    assert {command.name for command in build_app().registered_commands} == COMMANDS


def test_version() -> None:
    assert octet("version").stdout == "0.1.0\n"
    assert octet("--version").stdout == "octet 0.1.0\n"


@pytest.mark.parametrize(
    "command",
    [
        *("", "list", "logs -f x", "watch x", "metrics x y", "debug x", "clone x", "change x --set priority=1", "delete x"),
        *(
            pytest.param(command, marks=pytest.mark.matrix)
            for command in ("pools", "show x", "pause x", "resume x", "cancel x", "retry x")
        ),
    ],
)
def test_no_server_is_status_4_on_stderr(command: str) -> None:
    shown = octet(*command.split(), "--url", NOBODY)
    assert shown.exit_code == 4
    assert shown.stdout == ""
    assert f"cannot reach an Octet server at {NOBODY}" in shown.stderr
    assert "octet serve" in shown.stderr


def test_the_url_comes_from_the_environment() -> None:
    assert NOBODY in octet("list", OCTET_URL=NOBODY).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["show"],
        ["list", "--state", "asleep"],
        ["list", "--limit", "0"],
        ["list", "--limit", "101"],
        ["list", "--page", "0"],
        ["metrics", "x", "y", "--json"],
        ["list", "--url", "localhost:8000"],
        ["logs", "x", "--rank", "-1"],
        ["submit", "/does/not/exist.yaml"],
        ["serve", "--port", "0"],
        ["demo", "--levels", "02"],
        ["demo", "--steps", "0"],
    ],
)
def test_usage_is_status_2_on_stderr(arguments: list[str]) -> None:
    shown = octet(*arguments)
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert shown.stderr


@pytest.mark.parametrize("command", ["submit", "validate"])
def test_a_bad_spec_is_refused_before_any_server_is_asked(command: str, job_file: str) -> None:
    shown = octet(command, job_file, "--set", "precision.level=02", "--set", "training.stepz=5", "--url", NOBODY)
    assert shown.exit_code == 2
    assert "2 fields to change" in shown.stderr
    assert "precision.level" in shown.stderr
    assert "Did you mean 'O2', with the letter O?" in shown.stderr
    assert "Did you mean 'steps'?" in shown.stderr


def test_a_wrong_job_is_answered_by_the_table_of_intents(job_file: str) -> None:
    shown = octet("submit", job_file, "--set", "lr=0.1", "--set", "precision=fp8", "--url", NOBODY)
    assert shown.exit_code == 2
    assert "Set training.optimizer.learning_rate: 0.1." in shown.stderr
    assert "O2: O1 with an FP8 first" in shown.stderr


def test_a_label_without_a_value_is_refused_in_words() -> None:
    shown = octet("list", "--label", "team", "--url", NOBODY)
    assert shown.exit_code == 2
    assert "key:value or key=value" in shown.stderr
    assert "[^" not in shown.stderr
    assert octet("list", "--label", "team=research", "--url", NOBODY).exit_code == 4


def test_a_job_on_standard_input(spec: dict[str, Any]) -> None:
    assert octet("submit", "-", "--url", NOBODY, stdin=json.dumps(spec)).exit_code == 4
    assert octet("submit", "-", "--url", NOBODY, stdin="name: x").exit_code == 2


@pytest.mark.system
def test_the_installed_command_has_the_same_statuses(job_file: str) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "octet.client.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env={"FORCE_COLOR": "1", "TERM": "xterm"}, check=False)

    absent = run("list", "--url", NOBODY)
    assert (absent.returncode, absent.stdout) == (4, "")
    assert "\x1b" not in absent.stderr
    assert run("submit", job_file, "--set", "model.num_heads=3").returncode == 2


def test_serving_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda package: None)
    shown = octet("serve")
    assert shown.exit_code == 2
    assert "pip install 'octet-fp8[service,worker]'" in shown.stderr


def test_a_data_root_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    shown = octet(
        "serve", "--port", str(free_port()), "--data-dir", str(tmp_path / "data"), "--data-root", str(tmp_path / "gone")
    )
    assert shown.exit_code == 2
    assert f"--data-root {tmp_path / 'gone'} is no folder on this machine" in shown.stderr
    assert not (tmp_path / "data").exists()


def test_a_database_is_copied_and_restored_into_an_empty_folder(tmp_path: Path) -> None:
    data, copy, restored = tmp_path / "data", tmp_path / "copy.db", tmp_path / "restored"
    data.mkdir(mode=0o700)
    database = Database(f"sqlite:///{data}/octet.db")
    database.migrate()
    with database.write() as session:
        session.execute(text("INSERT INTO pool_capacities (pool, slots_present, observed_at) VALUES ('cpu', 2, '2026-01-01')"))
    database.close()
    shown = octet("backup", str(copy), "--data-dir", str(data))
    assert shown.exit_code == 0, shown.stderr
    assert "copy.db" in shown.stdout
    shown = octet("backup", str(copy), "--data-dir", str(data))
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert "Name a file that does not exist yet" in " ".join(shown.stderr.split())
    assert octet("restore", str(copy), "--data-dir", str(restored)).exit_code == 0
    database = Database(f"sqlite:///{restored}/octet.db")
    with database.read() as session:
        assert session.execute(text("SELECT pool, slots_present FROM pool_capacities")).all() == [("cpu", 2)]
    database.close()


def test_nothing_is_restored_into_a_folder_that_a_server_uses(tmp_path: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy.db"
    copy.touch()
    data.mkdir(mode=0o700)
    with (data / "serve.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shown = octet("restore", str(copy), "--data-dir", str(data))
    assert shown.exit_code == 2
    assert "another `octet serve` uses" in " ".join(shown.stderr.split())
    assert not (data / "octet.db").exists()
