"""Count the instructions that each kernel executes per element in its machine code for Hopper. No GPU is used or needed.

    python -m benchmarks.gpu.instructions [--out FOLDER] [--kernels quantize,update]

A multiprocessor issues 128 lanes of instructions per cycle: up to 128 lanes of fp32 arithmetic, 64 of integers, comparisons,
selections and conversions ("ALU"), and 16 of roots and reciprocals. The time per element is that of the most loaded pipe, or
of all instructions together if that is longer. If a kernel has loops, its longest loop is counted. The resulting share is an
upper bound: in reality loads wait, and no kernel issues in every cycle.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu.compiled import compile_kernel, kernels, num_warps
from benchmarks.gpu.report import Report, Row, unused
from benchmarks.gpu.session import RESULTS
from worker.kernels.cuda import gradient_norms
from worker.kernels.formats import BLOCK

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
LANES = {"fp32": 128, "ALU": 64, "special": 16}
FP32 = {"FFMA", "FMUL", "FADD", "HADD2", "HFMA2", "HMUL2", "IMAD"}  # IMAD: runs on half of the fp32 pipe
SPECIAL = {"MUFU", "F2I", "I2F", "F2F", "FRND"}
ELSEWHERE = {"LDG", "STG", "LDS", "STS", "LDC", "ATOMG", "RED", "SHFL", "BAR", "BRA", "EXIT", "NOP", "S2R", "R2UR", "WARPSYNC"}
ISSUED = 128
SMS, CYCLES_PER_S, COPY_BYTES_PER_S = 132, 1.83e9, 4.3e12
"""An H200: measured 1.98 GHz at most and 4.3 TB/s. The clock under load is a guess between 1.70 and 1.98 GHz."""

WEIGHT_BYTES = {"fp32": 8, "bf16": 4, "fp16": 4, "fp16-scaled": 4, "split": 4, "master": 5}
STATE_BYTES = {"fp32": 8.0, "fp8-dre": 2 + 12 / BLOCK, "fp16-block": 4 + 8 / BLOCK, "int8-companded": 2 + 8 / BLOCK}
STATE_BYTES["uint8-companded"] = STATE_BYTES["int8-companded"]


def num_bytes(name: str, constants: dict[str, Any]) -> float | None:
    """Return the bytes that a kernel must move per element; None for kernels that are no bottleneck."""
    kind = name.split()[0]
    if kind == "update":
        gradient = 4 if constants["GRADIENT"] == "fp32" else 1
        states = constants["STATES"].split()
        return WEIGHT_BYTES[constants["WEIGHT"]] + gradient + sum(STATE_BYTES[codec] for codec in states)
    if kind == "quantize_tile":
        return 2.0 + constants["ROWS"] + constants["COLUMNS"]
    return {"encode_flat": 4.0 if name.endswith("fp16") else 3.0, "quantize_rows": 3.0, "amax_flat": 2.0, "transpose": 2.0,
            "norm": 1.0, "accumulate": 4.0, "accumulated_amax": 3.0}.get(kind)  # fmt: skip


def num_elements(name: str, constants: dict[str, Any]) -> int:
    """Return the number of elements that one program, or one turn of its loop, processes."""
    if name.startswith("update"):
        return int(constants["NUM_BLOCKS"]) * BLOCK
    if name.startswith("amax_flat"):
        return int(constants["BLOCK"] * constants["NUM_BLOCKS"])
    if name.startswith("norm of parts"):
        return int(constants["CHUNK"]) * len(gradient_norms.FORMATS)  # a branch for each dtype, of which a program takes one
    if "TILE_M" in constants:
        return int(constants["TILE_M"] * constants["TILE_N"])
    return int(constants.get("CHUNK") or constants.get("BLOCK") or constants["ROWS"] * constants["COLUMNS"])


def instructions(cubin: bytes) -> list[str]:
    """Return the opcodes, without options, of the longest loop; of the whole kernel if it has no loop."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    longest = range(0)
    for line in _said("nvdisasm", "-c", cubin).splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(opcodes)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)\S*\s*([^;]*);", line):
            opcodes.append(found[1])
            back = re.search(r"`\((\.L_\w+)\)", found[2]) if found[1] == "BRA" else None
            if back and back[1] in labels and len(opcodes) - labels[back[1]] > len(longest) + 1:  # skips the loop at the end
                longest = range(labels[back[1]], len(opcodes))
    return [opcodes[index] for index in longest] or opcodes


def registers(cubin: bytes) -> int:
    """Return the number of registers per thread."""
    text = _said("cuobjdump", "--dump-resource-usage", cubin)
    found = re.search(r"REG:(\d+)", text)
    assert found is not None, text
    return int(found[1])


def _said(tool: str, option: str, cubin: bytes) -> str:
    """Run one of the tools that come with Triton on machine code, and return its output."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout


def rows(wanted: tuple[str, ...]) -> Iterator[Row]:
    """Yield a row for each kernel whose name begins with one of `wanted`."""
    for name, kernel, constants in kernels():
        moved = num_bytes(name, constants)
        if moved is None or not name.startswith(wanted):
            continue
        cubin = compile_kernel(name, kernel, constants).asm["cubin"]
        executed = instructions(cubin)
        per_element = num_warps(name) * 32 / num_elements(name, constants)
        pipes = Counter(_pipe(opcode) for opcode in executed)
        cycles = max(len(executed) / ISSUED, *(pipes[pipe] / lanes for pipe, lanes in LANES.items())) * per_element
        share = moved * SMS * CYCLES_PER_S / cycles / COPY_BYTES_PER_S
        counts = ", ".join(f"{pipe} {pipes[pipe] * per_element:.1f}" for pipe in LANES)
        yield Row(
            name,
            f"{len(executed) * per_element:.1f} per element: {counts}",
            f"{moved:.2f} bytes",
            share,
            note=f"{cycles:.3f} cycles; {registers(cubin)} registers, {executed.count('BAR')} barriers",
        )


def _pipe(opcode: str) -> str:
    if opcode in FP32:
        return "fp32"
    if opcode in SPECIAL:
        return "special"
    return "elsewhere" if opcode in ELSEWHERE or opcode.startswith("U") else "ALU"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=RESULTS, help="folder for the table")
    arguments.add_argument("--kernels", default="", help="beginnings of kernel names, separated by commas; default: all")
    options = arguments.parse_args()
    header = [
        "Counted in machine code for compute capability 9.0, not measured: `python -m benchmarks.gpu.instructions`, "
        f"Triton {triton.__version__}, torch {torch.__version__}. Ratio: the share of an H200's copy bandwidth that arithmetic "
        "alone would allow (above 1: memory is the limit)."
    ]
    path = unused(options.out / f"{datetime.now(UTC):%Y-%m-%d}-gpu-instructions.md")
    report = Report("Instructions of the kernels", path, header)
    for row in rows(tuple(options.kernels.split(","))):
        report.add("Instructions", row)
    sys.stdout.write(str(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
