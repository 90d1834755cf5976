"""The commands of `docs/own-models.md` run, with fewer steps: a loop of one's own over the stages of a pipeline."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from tests.docs.blocks import ROOT, commands
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.waiting import LONG_S

COMMANDS = commands("docs/own-models.md")
NUM_STEPS = "12"


def options_of(command: str) -> tuple[int, list[str]]:
    """The ranks of a command, and its script with options, for fewer steps."""
    _, flag, num_ranks, *script = shlex.split(command)
    assert flag == "--nproc-per-node"
    script[script.index("--steps") + 1] = NUM_STEPS
    return int(num_ranks), script


def as_rank(rank: int, num_ranks: int, script: list[str], port: int, folder: str) -> None:
    """Run a script as torchrun would, but for its start. What it prints goes to a file of the rank."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = script
    with Path(folder, f"{rank}.txt").open("w") as file, redirect_stdout(file):
        runpy.run_path(str(ROOT / script[0]), run_name="__main__")


def assert_learns(said: str) -> None:
    [(first, last)] = re.findall(r"loss (\S+) -> (\S+)\n", said)
    assert float(last) < 0.9 * float(first)


@pytest.mark.system
def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    num_ranks, script = options_of(COMMANDS[0])
    run_ranks(as_rank, (num_ranks, script, free_port(), str(tmp_path)), num_ranks)
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(num_ranks)]
    assert said[0] == ""
    assert_learns(said[1])


@pytest.mark.matrix
@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_trains_under_torchrun(command: str) -> None:
    num_ranks, script = options_of(command)
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    program += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), *script]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert_learns(result.stdout)
