"""The examples of `docs/integrations.md`: its commands run, with fewer steps, in a folder of the test's own."""

import runpy
import shlex
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, commands

DOCUMENT = "docs/integrations.md"


def run(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **changed: str) -> None:
    """Run a command of the document in this process. changed: options with other values."""
    _, script, *options = shlex.split(command)
    for name, value in changed.items():
        options[options.index(f"--{name}") + 1] = value
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", [script, *options])
    runpy.run_path(str(ROOT / script), run_name="__main__")


def test_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first, resumed = [f"{command} --use_cpu" for command in commands(DOCUMENT) if "transformers/train.py" in command]
    quiet = " --logging_strategy no --disable_tqdm True"
    run(first + quiet, tmp_path, monkeypatch, max_steps="2", save_steps="1")
    assert "level O2: 14 layers converted, 1 skipped" in capsys.readouterr().out
    run(resumed + quiet, tmp_path, monkeypatch, max_steps="3", save_steps="1", resume_from_checkpoint="trained/checkpoint-2")
    assert {path.name for path in (tmp_path / "trained").glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (1, 2, 3)}
