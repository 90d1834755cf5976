"""The examples of `docs/integrations.md`: its commands run, with fewer steps, in a folder of the test's own."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, commands
from tests.kit.ports import free_port
from tests.kit.waiting import LONG_S

DOCUMENT = "docs/integrations.md"


def run(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **changed: str) -> None:
    """Run a command of the document in this process. changed: options with other values."""
    _, script, *options = shlex.split(command)
    for name, value in changed.items():
        options[options.index(f"--{name}") + 1] = value
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", [script, *options])
    runpy.run_path(str(ROOT / script), run_name="__main__")


@pytest.mark.system
def test_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = [f"{command} --use_cpu" for command in commands(DOCUMENT) if "transformers/train.py" in command]
    first, resumed, in_bf16 = shown
    quiet = " --logging_strategy no --disable_tqdm True"
    run(first + quiet, tmp_path, monkeypatch, max_steps="1", save_steps="1")
    assert "level O2: 14 layers converted, 1 skipped" in capsys.readouterr().out
    run(resumed + quiet, tmp_path, monkeypatch, max_steps="2", save_steps="1", resume_from_checkpoint="trained/checkpoint-1")
    assert {path.name for path in (tmp_path / "trained").glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (1, 2)}
    run(in_bf16 + quiet, tmp_path, monkeypatch, max_steps="1")
    assert "in bf16   model.norm" in capsys.readouterr().out


@pytest.mark.parametrize(
    "level", ["O3", *(pytest.param(level, marks=pytest.mark.matrix) for level in ("te", "ao", "O1", "O2"))]
)
def test_accelerate(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    [command] = [command for command in commands(DOCUMENT) if "python examples/accelerate/train.py" in command]
    run(command, tmp_path, monkeypatch, level=level, epochs="1")
    assert_learns(level, capsys.readouterr().out)


def test_fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    [command] = [command for command in commands(DOCUMENT) if "examples/fabric/train.py" in command]
    run(command, tmp_path, monkeypatch, steps="12")
    assert_learns("O2", capsys.readouterr().out)


@pytest.mark.filterwarnings("ignore")  # Lightning's own warnings
def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    [command] = [command for command in commands(DOCUMENT) if "examples/lightning/train.py" in command]
    run(command, tmp_path, monkeypatch, epochs="2")
    assert_learns("O2", capsys.readouterr().out)
    assert {path.name for path in (tmp_path / "lightning").iterdir()} == {"epoch=0.ckpt", "epoch=1.ckpt"}


def on_two_ranks(script: str, level: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the document under torchrun, for one epoch at a level."""
    [command] = [command for command in commands(DOCUMENT) if script in command and "torchrun" in command]
    _, *options = shlex.split(command)
    options[options.index("--level") + 1] = level
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "PET_MASTER_PORT": str(free_port())}
    program = [sys.executable, "-m", "torch.distributed.run", *options, "--epochs", "1"]
    return subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONG_S, check=False)


@pytest.mark.matrix
@pytest.mark.parametrize("level", ["te", "ao", "O1", "O2", "O3"])
@pytest.mark.parametrize("script", ["accelerate/train.py", "wrapped.py --level te", "wrapped.py --level O3 --wrapper fsdp2"])
def test_accelerate_on_two_ranks(script: str, level: str) -> None:
    result = on_two_ranks(script, level)
    assert result.returncode == 0, result.stderr[-3000:]
    assert_learns(level, result.stdout)


@pytest.mark.matrix
@pytest.mark.parametrize("level", ["te", "ao"])
def test_accelerate_on_two_ranks_that_gather_in_fp8(level: str) -> None:
    result = on_two_ranks("wrapped.py --level ao --wrapper fsdp2 --gather fp8", level)
    assert result.returncode == 0, result.stderr[-3000:]
    assert_learns(level, result.stdout)


def assert_learns(level: str, said: str) -> None:
    first, last = re.findall(rf"{level}: loss (\S+) -> (\S+)\n", said)[0]
    assert float(last) < 0.8 * float(first)
