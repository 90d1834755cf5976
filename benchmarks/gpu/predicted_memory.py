"""Predict the peak memory of training steps on a GPU without one: `networks.py` and `largest.py` run on fake tensors.

    python -m benchmarks.gpu.predicted_memory [--out FOLDER] [--sections gpt,options,vision,…] [--smoke]

writes a dated table: peaks, what they consist of, and the ratios that have targets.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import OUT, PREDICTIONS, Figure, add_write_option, write
from benchmarks.gpu.networks import (
    BF16_AMP,
    FP16_AMP,
    O1,
    O2,
    O2_ALL_FP8,
    O3_SPLIT,
    TE,
    Step,
    Way,
    gpt_step,
    vision_step,
)
from benchmarks.gpu.predicted_largest import largest_rows
from benchmarks.gpu.predicted_loading import loading_rows
from benchmarks.gpu.predicted_savings import VISION_SAVINGS, large_rows, option_rows
from benchmarks.gpu.report import Report, Row, unused
from benchmarks.gpu.session import chosen_names
from benchmarks.gpu.train import MEMORY, SAVED, SIZES, SMALL, Size
from octet.worker.planning.fake_gpu import DEVICE_TYPE, fake_gpu, see_within
from octet.worker.planning.live_bytes import LiveBytes, Snapshot

GIB = 1 << 30
BF16_AMP_OURS, O2_8BIT = Way("bf16-amp, our AdamW", "bf16-amp"), Way("O2-8bit", "O2-8bit")
WAYS = (BF16_AMP, BF16_AMP_OURS, FP16_AMP, TE, O1, O2, O2_ALL_FP8, O3_SPLIT, O2_8BIT)
SAVING = tuple(
    Way(f"{level} all in FP8, activations in FP8, gradient release", level, options=O2_ALL_FP8.options, savings=VISION_SAVINGS)
    for level in ("O2", "O2-8bit")
)
VISION_WAYS = (FP16_AMP, BF16_AMP, O2, O2_ALL_FP8, *SAVING)
SMOKE_WAYS = (BF16_AMP, FP16_AMP, O2)
PEERS = (BF16_AMP, FP16_AMP)
WITH_TARGET = ("1.3 B", "tiny")
NUM_ORIGINS = 4
HEADER = (
    "Predictions, not measurements: no GPU was used. The step of `benchmarks/gpu/networks.py` ran, eager, on torch's fake "
    "tensors, which have sizes and no bytes. Live storages were counted op by op, rounded up to 512 bytes. Not included: "
    "fragmentation, what torch's own kernels and cuBLAS allocate and free within an op, the CUDA context. torch.compile keeps "
    "other activations, see docs/benchmarks.md. torch {torch}."
)


@dataclass(frozen=True)
class Prediction:
    """The peak of a step once the states exist, and what is alive at that moment."""

    peak_bytes: int
    at_peak: Snapshot

    def __str__(self) -> str:
        return f"{self.peak_bytes / GIB:.2f} GiB"

    @property
    def note(self) -> str:
        """The parts of the peak, in GiB."""
        classes = [f"{kind} {_gib(held)}" for kind, held in self.at_peak.by_class.most_common() if held >= GIB / 200]
        origins = [f"{origin} {_gib(held)}" for origin, held in self.at_peak.by_origin.most_common(NUM_ORIGINS)]
        return f"{', '.join(classes)}. Largest parts that are freed within the step: {'; '.join(origins)}"


def predict(make_step: Callable[[torch.device], tuple[Step, Any]]) -> Prediction:
    """Predict a step. make_step: builds a step and (model, optimizer) on a device.

    The second step finds the peak, the third looks at what is alive there.
    """
    gc.collect()
    snapshots: list[Snapshot] = []
    with fake_gpu() as device, LiveBytes(see_within=see_within, device_type=DEVICE_TYPE) as live:
        step, (model, optimizer) = make_step(device)
        step()
        live.restart()
        step()
        peak_bytes, peak_op = live.peak_bytes, live.peak_op
        with live.named(model):
            live.restart(at=(peak_op, lambda: snapshots.append(live.snapshot(model, optimizer))))
            step()
        if live.peak_bytes != peak_bytes:
            raise RuntimeError(f"two steps peak at {peak_bytes} and {live.peak_bytes} bytes; expected equal peaks.")
    return Prediction(peak_bytes, snapshots[0])


def peak_of(make_step: Callable[[torch.device], tuple[Step, Any]]) -> int:
    """Return the peak of a step's prediction in bytes, without what is alive there: in two steps."""
    gc.collect()
    with fake_gpu() as device, LiveBytes(see_within=see_within, device_type=DEVICE_TYPE) as live:
        step, _held = make_step(device)
        step()
        live.restart()
        step()
    return live.peak_bytes


def gpt_rows(smoke: bool) -> Iterator[Row]:
    for size in SMALL if smoke else SIZES:
        found: dict[str, Prediction] = {}
        for way in SMOKE_WAYS if smoke else WAYS:
            found[way.name] = predicted = predict(partial(_gpt_step, size, way))
            figure = f"GPT {size.name}, {way.name}: peak memory"
            note = f"{size.batch_size} × {size.config.max_sequence_length} tokens. {predicted.note}"
            if way in PEERS:
                reference, ratio = "", None
                if way != BF16_AMP:
                    base = found[BF16_AMP.name]
                    reference, ratio = f"{BF16_AMP.name} {base}", predicted.peak_bytes / base.peak_bytes
                yield Row(figure, str(predicted), reference, ratio, note=note)
                continue
            for peer in PEERS:
                if peer.name not in found:
                    continue
                ratio = predicted.peak_bytes / found[peer.name].peak_bytes
                target = MEMORY if way == O2 and size.name in WITH_TARGET else None
                noted = note if peer == BF16_AMP else ""
                yield Row(figure, str(predicted), f"{peer.name} {found[peer.name]}", ratio, target, noted)


def vision_rows(smoke: bool) -> Iterator[Row]:
    for family in SAVED:
        found: dict[str, Prediction] = {}
        for way in VISION_WAYS[:3] if smoke else VISION_WAYS:
            found[way.name] = predicted = predict(partial(vision_step, family, way, smoke=smoke))
            name = {"Swin": "Swin-1.0B at batch 16", "ViT": "ViT-1.2B at batch 64"}[family]
            if way == FP16_AMP:
                yield Row(f"{name}, {way.name}: peak memory", str(predicted), note=predicted.note)
                continue
            saved = 1 - predicted.peak_bytes / found[FP16_AMP.name].peak_bytes
            reference, target = f"fp16-amp {found[FP16_AMP.name]}", SAVED[family] if way not in PEERS else None
            yield Row(
                f"{name}, {way.name}: peak memory saved", str(predicted), reference, saved, target, predicted.note, style=".0%"
            )


CITED = ("Model of 8 B parameters", "Loading a model of 8 B parameters")
"""The sections that docs/fine-tuning.md shows."""

MEASURED = ("GPT step", "Options that save memory", "Vision models", "Largest GPT")
"""The sections whose rows `make gpu-day` measures."""

SECTIONS = {
    "GPT step": gpt_rows,
    "Options that save memory": partial(option_rows, predict),
    "Model of 8 B parameters": partial(large_rows, predict),
    "Loading a model of 8 B parameters": loading_rows,
    "Vision models": vision_rows,
    "Largest GPT": partial(largest_rows, peak_of),
}


def _gpt_step(size: Size, way: Way, device: torch.device) -> tuple[Step, Any]:
    return gpt_step(size.config, way, size.batch_size, device, compiled=None)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"


def predictions(report: Report) -> list[Figure]:
    """Return all rows that a GPU benchmark measures, under its names."""
    return [row.result("memory, predicted") for name in MEASURED for row in report.sections.get(name, [])]


def figures(report: Report) -> list[Figure]:
    """Return the rows with goals, and all rows of the model of 8 B parameters."""
    rows = [(name, row) for name, of_section in report.sections.items() for row in of_section]
    return [row.result("memory, predicted") for name, row in rows if name in CITED or row.target is not None]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=OUT, help="folder for the table")
    add_write_option(arguments)
    arguments.add_argument("--sections", default="", help="beginnings of section names, separated by commas; default: all")
    arguments.add_argument("--smoke", action="store_true", help="use tiny sizes, only to check that everything runs")
    options = arguments.parse_args()
    wanted = chosen_names("--sections", options.sections, list(SECTIONS))
    kind = "-smoke" if options.smoke else ""
    path = unused(options.out / f"{datetime.now(UTC):%Y-%m-%d}-gpu-predicted-memory{kind}.md")
    report = Report("Peak memory on a GPU, predicted", path, [HEADER.format(torch=torch.__version__)])
    for name, rows in SECTIONS.items():
        if name in wanted:
            for row in rows(options.smoke):
                report.add(name, row)
    sys.stdout.write(str(report))
    if options.write and not options.smoke:
        where = ("make bench-predicted-memory", "no GPU (predicted)")
        write(options.write, figures(report), *where, is_timed=False)
        write(options.write.with_name(PREDICTIONS.name), predictions(report), *where, is_timed=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
