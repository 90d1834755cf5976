"""Every kernel compiles for each chip, in a process of its own: this one has loaded Triton as an interpreter."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
OTHER_TRITON = ROOT / "build" / "triton-3.6.0"
"""The Triton of torch 2.11, which the GPU machines have. `make test-matrix` installs it there."""

SHARED_BYTES = {"89": 99 << 10, "90": 227 << 10, "100": 227 << 10, "120": 99 << 10}
"""Shared memory that one program can have, by ten times the compute capability."""
NUM_REGISTERS = 65_536
"""Registers of a multiprocessor."""
ALONE = ("matmul", "measure", "quantize_tile gelu")
"""Kernels whose program takes more than half of a multiprocessor's registers; tiles with erf have twice the threads."""


@pytest.mark.parametrize(
    ("triton", "options"),
    [
        pytest.param(None, ["--spread"], id="pinned, spread", marks=pytest.mark.system),
        pytest.param(None, [], id="pinned", marks=pytest.mark.matrix),
        pytest.param(OTHER_TRITON, [], id="3.6", marks=pytest.mark.matrix),
        pytest.param(None, ["--spread", "--capability", "89"], id="Ada", marks=pytest.mark.matrix),
        pytest.param(None, ["--spread", "--capability", "100"], id="Blackwell", marks=pytest.mark.matrix),
        pytest.param(None, ["--spread", "--capability", "120"], id="Blackwell of desktops", marks=pytest.mark.matrix),
    ],
)
def test_kernels_compile_and_move_16_bytes_at_a_time(triton: Path | None, options: list[str], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    if triton is not None:
        if not triton.exists():
            pytest.skip(f"missing: {triton.relative_to(ROOT)}; make {triton.relative_to(ROOT)}")
        environment["PYTHONPATH"] = str(triton)
    program = [sys.executable, "-m", "tests.worker.kernels.cuda.compiled", *options]
    result = subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    compiled = json.loads(result.stdout)
    assert triton is None or triton.name == f"triton-{compiled['triton']}"
    accesses = compiled["kernels"]
    check_resources(accesses, options[-1] if "--capability" in options else "90", is_pinned=triton is None)
    assert len(accesses) > (35 if options else 65)
    assert {"update fp16-scaled fp8-dre fp16-block", "update lion split int8-companded"} <= set(accesses)
    # A kernel whose formats have one byte moves 8 of them at a time, whole sectors all the same.
    bytes_only = {name for name in accesses if "split" in name.split() and not re.search("fp16|fp32", name)}
    accesses = {name: access for name, access in accesses.items() if not name.startswith("prepare") and name not in bytes_only}
    assert [name for name, access in accesses.items() if not access["wide_loads"]] == []
    update = {name: access for name, access in accesses.items() if name.startswith("update")}
    assert [name for name in update if update[name]["exchanges"] or update[name]["slow_ways"]] == []  # one warp, no branches
    writers = [
        name for name in accesses if not name.startswith(("amax", "clear", "measure", "norm", "accumulated", "clamped", "sum"))
    ]
    assert [name for name in writers if not accesses[name]["wide_stores"]] == []
    assert [name for name, access in accesses.items() if access["other_casts"]] == []  # encode_scaled leaves it to the cast
    assert all(accesses[name]["saturating_casts"] for name in accesses if name.startswith("quantize"))


def check_resources(kernels: dict[str, dict[str, int]], capability: str, *, is_pinned: bool) -> None:
    """Check that kernels fit, that two programs run on a multiprocessor, and that none spills. Only Hopper's were read."""
    assert {name: kernel["shared"] for name, kernel in kernels.items() if kernel["shared"] > SHARED_BYTES[capability]} == {}
    if capability != "90" or not is_pinned:
        return
    assert {name: kernel["stack"] for name, kernel in kernels.items() if kernel["stack"]} == {}
    wide = [name for name, kernel in kernels.items() if 2 * kernel["registers"] * kernel["threads"] > NUM_REGISTERS]
    assert [name for name in wide if not name.startswith(ALONE)] == []


def test_a_kernel_that_spills_is_seen() -> None:
    kernel = {"registers": 128, "stack": 0, "shared": 1024, "threads": 256}
    check_resources({"fits": kernel}, "90", is_pinned=True)
    for change in ({"stack": 8}, {"registers": 136}, {"shared": 228 << 10}):
        with pytest.raises(AssertionError):
            check_resources({"one": kernel | change}, "90", is_pinned=True)
