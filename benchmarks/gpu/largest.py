"""Find the largest GPT that trains on the card, by adding layers of hidden size 4096. Each try is a process of its own.

    python -m benchmarks.gpu.largest --level O2 --layers 40

runs one try: three steps. It prints a line of JSON with the peak memory, or null if memory did not suffice.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.networks import BF16_AMP, O2, SEQUENCE_LENGTH, VOCABULARY, build_gpt, gpt_step, peak_bytes_of
from benchmarks.gpu.report import Row, Target, first_line
from benchmarks.gpu.session import Case, Session
from octet.api_schemas import GPTSizes
from octet.api_schemas.models.gpt import gpt_sizes
from octet.worker.common.config import ALLOCATOR

WAYS = {"bf16-amp": BF16_AMP, "O2": O2}
BYTES_PER_PARAMETER = {"bf16-amp": 20, "O2": 8}  # rough, including activations; the search starts from it
TRY_S = 25.0
SMOKE_LIMIT_BYTES = 830_000
TARGET = Target(2.0, 2.6)
ROOT = Path(__file__).parent.parent.parent


def largest_cases(session: Session) -> list[Case]:
    """Return the cases: bf16-amp, then O2, which is compared with it."""
    most: dict[str, int] = {}
    return [Case(f"largest GPT, {level}", partial(_largest, session, level, most), 2 * TRY_S) for level in WAYS]


def search(peak_of: Callable[[int], int | None], start: int, capacity: int, may_try: Callable[[], bool]) -> tuple[int, int]:
    """Return the largest number of layers known to fit, and the smallest known not to fit; 0 if there is none.

    peak_of: runs a try and returns its peak in bytes; None if memory did not suffice. The peak grows with each layer, so a
    try that fits predicts how many more layers would. Ends when the two are within 2.5 %, or when may_try returns False.
    """
    fits, fails, candidate = 0, 0, start
    while (not fails or fails - fits > max(1, fits // 40)) and may_try():
        peak = peak_of(candidate)
        if peak is None:
            fails = candidate
            candidate = (fits + fails) // 2 if fits else max(1, fails * 3 // 4)
            if fails == 1:
                break
        else:
            fits = candidate
            candidate = max(fits + 1, fits * capacity // max(peak, 1))
        if fails:
            candidate = min(candidate, fails - 1)
    return fits, fails


def sizes(num_layers: int, *, smoke: bool) -> GPTSizes:
    """Return the sizes of the network to try."""
    if smoke:
        return gpt_sizes(64, num_layers, 2, 256, 32)
    return gpt_sizes(4096, num_layers, 32, VOCABULARY, SEQUENCE_LENGTH)


def _largest(session: Session, level: str, most: dict[str, int]) -> Iterator[Row]:
    """Search one level. most: receives an upper limit for the parameters of bf16-amp, so the comparison favours bf16-amp."""
    session.timer.release()
    capacity = SMOKE_LIMIT_BYTES
    if not session.smoke:
        capacity = torch.cuda.get_device_properties(session.device).total_memory
    kept_s = session.left_s / 2 if level == "bf16-amp" else 0.0
    per_layer = BYTES_PER_PARAMETER[level] * 12 * sizes(1, smoke=session.smoke).hidden_size ** 2
    start = max(1, capacity // per_layer)
    fits, fails = search(partial(_try, session, level), start, capacity, lambda: session.left_s - kept_s > TRY_S)
    figure = f"largest GPT of hidden size 4096 that trains, {level}"
    note = f"{fails} layers did not fit; " if fails else "no larger one was tried; "
    note += f"1 × {SEQUENCE_LENGTH} tokens, not compiled"
    if level == "bf16-amp" and fails:
        most[level] = _num_parameters(fails - 1, session)
    if not fits:
        yield Row(figure, "none", note=note)
        return
    num_parameters = _num_parameters(fits, session)
    measured = f"{num_parameters / 1e9:.2f} B parameters, {fits} layers"
    if level == "bf16-amp" or "bf16-amp" not in most:
        yield Row(figure, measured, note=note)
        return
    reference = most["bf16-amp"]
    yield Row(figure, measured, f"bf16-amp at most {reference / 1e9:.2f} B", num_parameters / reference, TARGET, note)


def _num_parameters(num_layers: int, session: Session) -> int:
    return build_gpt(sizes(num_layers, smoke=session.smoke), torch.device("meta")).num_parameters


def _try(session: Session, level: str, num_layers: int) -> int | None:
    command = [sys.executable, "-m", "benchmarks.gpu.largest", "--level", level, "--layers", str(num_layers)]
    command += ["--device", session.device.type]
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR}
    done = subprocess.run(
        [*command, *(["--smoke"] if session.smoke else [])],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"{level} with {num_layers} layers ended with status {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Run one try and print its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", choices=WAYS, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    peak = None
    try:
        config = sizes(options.layers, smoke=options.smoke)
        step, held = gpt_step(config, WAYS[options.level], 1, device, compiled=None)
        peak = peak_bytes_of(step, held, device)
    except torch.OutOfMemoryError as error:
        sys.stderr.write(f"{first_line(error)}\n")
    if options.smoke and peak is not None and peak > SMOKE_LIMIT_BYTES:
        peak = None
    sys.stdout.write(f"{json.dumps(peak)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
