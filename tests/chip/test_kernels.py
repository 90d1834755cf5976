"""The kernels' own tests pass with programs in random orders, and no two programs of a launch use one address."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.system
def test_programs_run_in_any_order(seed: int) -> None:
    """In a process of its own: the plugin loads Triton, which asks then if it is to interpret."""
    folder = "tests/worker/kernels/cuda"
    options = ["-p", "tests.chip.in_random_order", "--program-seed", str(seed), "-m", "not gpu and not matrix"]
    options += ["--ignore", f"{folder}/test_compiles.py"]  # which runs no program
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, folder]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stdout[-5000:]
