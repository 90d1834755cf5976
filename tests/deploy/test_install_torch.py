"""The build of PyTorch follows the machine, and an index that does not answer is no obstacle. pip and uv note their calls."""

import json
import os
import platform
import sys
from pathlib import Path

import pytest

from deploy import install_torch

PROGRAM = """
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([{name!r}, *sys.argv[1:]]) + "\\n")
sys.exit({status})
"""


class Machine:
    """A folder that stands for a machine: its programs, its driver, and what was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.constraints = folder / "constraints.txt"
        self.constraints.write_text("# versions\ntorch==99.1.0\nuv==9.9\n")
        self.program("pip", 0)

    def program(self, name: str, status: int) -> None:
        package = self.folder / name
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(PROGRAM.format(name=name, status=status))

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    def install(self, *options: str) -> None:
        install_torch.main(["--constraints", str(self.constraints), *options])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A Linux machine without a device, whose Python finds this test's pip and uv first."""
    monkeypatch.setattr(install_torch, "DRIVER", tmp_path / "driver")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return Machine(tmp_path)


def test_without_a_device_the_cpu_build_is_taken(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.program("uv", 0)
    machine.install()
    uv, cpu = machine.calls()
    assert uv[-1] == "uv==9.9"
    assert cpu[:3] == ["uv", "pip", "install"]
    assert cpu[-1] == "torch==99.1.0"
    assert cpu[cpu.index("--torch-backend") + 1] == "cpu"
    assert cpu[cpu.index("--python") + 1] == sys.executable
    assert "390 MB" in capsys.readouterr().out


def test_an_index_that_does_not_answer_leaves_the_choice_to_pip(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.program("uv", 2)
    machine.install()
    assert [call[0] for call in machine.calls()] == ["pip", "uv", "pip"]
    assert machine.calls()[-1][-2:] == ["--no-deps", "torch==99.1.0"]
    said = capsys.readouterr().out
    assert "does not answer" in said
    assert "5.7 GB" in said


@pytest.mark.parametrize("sign", ["driver", "nvidia-smi"])
def test_a_machine_with_a_device_gets_the_cuda_build(machine: Machine, capsys: pytest.CaptureFixture[str], sign: str) -> None:
    (machine.folder / sign).touch(mode=0o755)
    machine.install()
    (call,) = machine.calls()
    assert call[-2:] == ["--no-deps", "torch==99.1.0"]
    assert "about 3 GB" in capsys.readouterr().out


def test_an_index_that_is_named_is_taken(machine: Machine) -> None:
    machine.install("--index-url", "https://wheels.example/cpu")
    (call,) = machine.calls()
    assert call[-4:] == ["--no-deps", "--index-url", "https://wheels.example/cpu", "torch==99.1.0"]


def test_other_systems_have_one_build(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    machine.install()
    assert [call[0] for call in machine.calls()] == ["pip"]


def test_what_is_installed_stays(machine: Machine) -> None:
    import torch

    machine.constraints.write_text(f"torch=={torch.__version__.partition('+')[0]}\nuv==9.9\n")
    machine.install()
    assert not (machine.folder / "calls").exists()


def test_a_failure_of_pip_is_ours(machine: Machine) -> None:
    (machine.folder / "pip/__main__.py").write_text("raise SystemExit(7)")
    with pytest.raises(SystemExit, match="7"):
        machine.install("--index-url", "https://wheels.example/cpu")


def test_the_versions_are_pinned() -> None:
    versions = install_torch.pinned(Path(__file__).parents[2] / "constraints.txt")
    assert {"torch", "uv"} <= versions.keys()
