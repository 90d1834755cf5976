"""Cases: which shapes gain in FP8. The resulting table decides which layers `auto_filter` leaves in bf16.

Compares a layer's forward and backward pass with FP8 products to the same layer with bf16 products, by the device's clock,
eager. fp32 weights are compared with a layer of bf16-amp (level te), codes with a decoded weight (level O2). The measurements
are written to `speedups.json` next to the report; copy it over `worker/fp8/speedups.json` to use it.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.linear import time_layer
from benchmarks.gpu.report import NOT_REACHED, Row, describe_versions, unused
from benchmarks.gpu.roofline import FEATURES, TOKENS, as_text
from benchmarks.gpu.session import Case, Session
from benchmarks.gpu.timing import Timer
from octet.worker import initialize
from octet.worker.fp8.fallback import Fallback
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.speedups import KINDS, WEIGHTS, SpeedupTable, load_tables

SMALL_TOKENS, SMALL_FEATURES = (32, 64), (16, 32)
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {"opt_level": "te"},
    "scaled": {"opt_level": "O2", "gradient_accumulation": "fp32"},  # both quantize gradients afterwards
}
SHAPES_S = 8.0
"""Time limit for all shapes at one number of tokens."""

Speedups = dict[str, dict[str, list[Any]]]


def speedup_cases(session: Session) -> list[Case]:
    """Return the cases by number of tokens, then the one that writes the table."""
    speedups: Speedups = {weights: {kind: [] for kind in KINDS} for weights in WEIGHTS}
    tokens, features = (SMALL_TOKENS, SMALL_FEATURES) if session.smoke else (TOKENS, FEATURES)
    timer = session.timer if session.smoke else Timer(session.device, repeats=5, warmup=2)
    measure = partial(_measure, timer, features, speedups)
    cases = [
        Case(f"speedup at {number} tokens, {weights} weights", partial(measure, number, weights), SHAPES_S)
        for number in tokens
        for weights in WEIGHTS
    ]
    return [*cases, Case("speedups.json", partial(_write, session, tokens, features, speedups), 0.0)]


def _measure(timer: Timer, features: tuple[int, ...], speedups: Speedups, tokens: int, weights: str) -> Iterator[Row]:
    shapes = [(tokens, in_features, out_features) for in_features in features for out_features in features]
    bf16_s = {shape: _seconds(timer, shape, weights, "tensor", Fallback.TOO_SMALL) for shape in shapes}
    for kind in KINDS:
        found = {shape: bf16_s[shape] / _seconds(timer, shape, weights, kind, Fallback.NONE) for shape in shapes}
        speedups[weights][kind].append([[round(found[tokens, k, n], 3) for n in features] for k in features])
        slower = [f"{k}→{n} {ratio:.2f}" for (_, k, n), ratio in found.items() if ratio < 1]
        figure = f"speedup at {tokens} tokens, {weights} weights, {kind}"
        measured = f"{len(shapes) - len(slower)} of {len(shapes)} shapes are faster in FP8"
        note = f"ratio: the median; slower: {', '.join(slower) or 'none'}"
        yield Row(figure, measured, "the same layers in bf16", median(found.values()), note=note)
    timer.release()


def _seconds(timer: Timer, shape: tuple[int, int, int], weights: str, kind: str, fallback: Fallback) -> float:
    _, in_features, out_features = shape
    linear = nn.Linear(in_features, out_features, bias=False, device=timer.device)
    layer, _ = initialize(linear, None, recipe=KINDS[kind], statistics_every=0, auto_filter=False, **OPTIONS[weights])
    assert isinstance(layer, Float8Linear)
    layer.fallback = fallback
    return time_layer(timer, layer, shape).median_s


def _write(session: Session, tokens: tuple[int, ...], features: tuple[int, ...], speedups: Speedups) -> Iterator[Row]:
    """Write the measured table in place of the one of this device, or of the one computed for its capability."""
    if any(len(grid) < len(tokens) for by_kind in speedups.values() for grid in by_kind.values()):
        yield Row("speedups.json", NOT_REACHED, note="not all shapes were measured; --sections speedup has the whole time")
        return
    is_cuda = session.device.type == "cuda"
    capability = torch.cuda.get_device_capability(session.device) if is_cuda else (0, 0)
    name = torch.cuda.get_device_name(session.device) if is_cuda else "CPU"
    versions = f"CUDA {torch.version.cuda}, {describe_versions()}"
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    measured = SpeedupTable(capability, "measured", name, versions, today, tokens, features, speedups)
    path = unused(session.options.out / ("speedups-smoke.json" if session.smoke else "speedups.json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [
        known for known in load_tables() if known.device != name and (known.device or tuple(known.capability) != capability)
    ]
    path.write_text(as_text([*kept, measured]))
    yield Row("speedups.json", path.name, note="to use it, copy it over worker/fp8/speedups.json")
