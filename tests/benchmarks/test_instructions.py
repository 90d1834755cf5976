"""Instructions are counted, and memory stays the limit of the O2 optimizer step on an H200."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.system
def test_the_o2_step_leaves_memory_the_bound(tmp_path: Path) -> None:
    """Runs in a process of its own, without Triton's interpreter."""
    command = [sys.executable, "-m", "benchmarks.gpu.instructions", "--out", str(tmp_path), "--kernels"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [*command, "update fp16-scaled fp8-dre,norm of parts"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.glob("*-gpu-instructions.md")
    rows = [line.strip("| ").split(" | ") for line in table.read_text().splitlines() if " per element" in line]
    names = [row[0] for row in rows]
    assert names[0] == "update fp16-scaled fp8-dre fp16-block"
    assert names[1] == "norm of parts, 2"
    step, norm = rows[:2]
    assert 40 < per_element(step) < 80
    assert 2 < per_element(norm) < 12
    assert step[2] == "11.16 bytes"
    assert float(step[3]) >= 1.0
    assert "0 barriers" in step[-1]


def per_element(row: list[str]) -> float:
    found = re.match(r"([\d.]+) per element", row[1])
    assert found is not None, row
    return float(found[1])
