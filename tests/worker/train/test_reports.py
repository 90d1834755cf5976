"""Rank 0 reports what it holds after the first step, and the layers that FP8 holds worst, while the job runs."""

from pathlib import Path
from typing import Any

import torch

from octet.api_schemas import MeasuredReport, StartedReport, StepReport
from octet.worker.metrics.table import OperandSample
from octet.worker.train.reports import WorstLayers
from tests.kit.training import train, with_training


def test_memory_is_reported_with_the_first_step_beside_that_of_fp32(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    recorder, summary = train(with_training(spec_document, "O2", steps=3), tmp_path / "O2")
    memory = [report.memory for report in recorder.of(MeasuredReport) if report.memory is not None]
    assert len(memory) == 1
    assert memory[0].held == summary.memory_bytes
    assert recorder.reports.index(recorder.of(MeasuredReport)[0]) < recorder.reports.index(recorder.of(StepReport)[0])
    of_fp32, summary_of_fp32 = train(with_training(spec_document, "fp32", steps=1), tmp_path / "fp32")
    held = {name: summary_of_fp32.memory_bytes[name] for name in memory[0].fp32}
    assert memory[0].fp32 == of_fp32.of(MeasuredReport)[0].memory.fp32 == held
    assert recorder.of(StartedReport)[0].num_parameters * 4 == held["weights"]


def test_the_worst_layers_are_reported_at_levels_in_fp8(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    document = with_training(spec_document, "O2", steps=2)
    document["precision"]["statistics_every"] = 1
    recorder, _ = train(document, tmp_path)
    layers = [report.layers for report in recorder.of(MeasuredReport) if report.layers is not None]
    assert len(layers) == 1, "one in five seconds"
    decibels = [each.sqnr_db for each in layers[0]]
    assert decibels == sorted(decibels)
    assert 0 < len(decibels) <= 10
    assert len({each.layer for each in layers[0]}) == len(layers[0])


def test_worst_layers_are_chosen_by_their_worst_operand() -> None:
    def sample(layer: int, operand: str, sqnr_db: float) -> OperandSample:
        return OperandSample(7, f"h.{layer}", operand, float("inf"), 0.5, 0.0, 0.0, sqnr_db)

    now = 0.0
    worst = WorstLayers(lambda: now)
    samples = [sample(layer, operand, 30.0 - layer) for layer in range(12) for operand in ("input", "weight")]
    samples.append(sample(0, "grad_output", float("nan")))
    report = worst.new(8, samples)
    assert report is not None
    assert report.layers is not None
    assert [each.layer for each in report.layers] == ["h.0", *[f"h.{layer}" for layer in range(11, 2, -1)]]
    assert (report.layers[0].operand, report.layers[0].sqnr_db, report.layers[0].amax) == ("grad_output", None, None)
    assert worst.new(9, list(samples)) is None, "too early"
    now = 6.0
    assert worst.new(9, samples) is None, "the same"
    assert worst.new(9, list(samples)) is not None
