"""The plugin of tests on a GPU. torch's device is a stand-in that faults for good when a test says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import torch

class Device:
    has_faulted = False

    @classmethod
    def synchronize(cls):
        if cls.has_faulted:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

torch.cuda.is_available, torch.cuda.synchronize = lambda: True, Device.synchronize

def test_before(): pass

def test_faults(): Device.has_faulted = True

def test_after(): torch.cuda.synchronize()

def test_last(): torch.cuda.synchronize()
"""


@pytest.mark.system
def test_a_fault_fails_its_own_test(tmp_path: Path) -> None:
    (tmp_path / "test_device.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.kit.on_device", "-p", "no:cacheprovider", "-n", "1", "-rfEp"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "test_device.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    outcomes = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED", "ERROR"))]
    assert ["ERROR", "test_device.py::test_faults"] in outcomes
    assert [name for outcome, name in outcomes if outcome != "PASSED"] == ["test_device.py::test_faults"] * 2  # and its process
    passed = {name.rpartition("::")[2] for outcome, name in outcomes if outcome == "PASSED"}
    assert passed >= {"test_before", "test_after", "test_last"}
