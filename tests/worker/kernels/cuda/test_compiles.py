"""Every kernel compiles for Hopper, in a process of its own: this one has loaded Triton as an interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]


def test_kernels_compile_and_move_16_bytes_at_a_time(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    program = [sys.executable, "-m", "tests.worker.kernels.cuda.compile_for_hopper"]
    result = subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    accesses = json.loads(result.stdout)
    assert len(accesses) > 20
    narrow = [name for name, access in accesses.items() if not access["wide_loads"]]
    assert narrow == []
    writers = {name: access for name, access in accesses.items() if not name.startswith(("amax", "clear"))}
    assert [name for name, access in writers.items() if not access["wide_stores"]] == []
