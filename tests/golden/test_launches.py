"""No step launches more on a GPU than launches.json says, or moves more bytes of activations."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.test_roads import Result

ROOT = Path(__file__).parents[2]
LAUNCHES = Path(__file__).with_name("launches.json")


@pytest.mark.system
def test_no_more_launches_than_recorded() -> None:
    """In a process of its own, since Triton interprets kernels in that of the tests."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.golden.launches", "--print"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    found: Result = json.loads(result.stdout)
    expected: Result = json.loads(LAUNCHES.read_text())
    assert set(found) == set(expected)
    for name, recorded in expected.items():
        assert sum(found[name]["launches"].values()) <= sum(recorded["launches"].values()), (name, found[name], recorded)
        assert found[name]["bytes"] <= recorded["bytes"], name
