"""A rank's metrics: their values in a real run, their number of series, and the address where they are served."""

import math
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from octet.api_schemas import CheckpointRef, CheckpointReport, EventReport, ExporterReport, JobSpec, ReportBody, StepReport
from octet.worker.common.config import RankEnv, resolve
from octet.worker.fp8.convert import FilteredLayer
from octet.worker.fp8.fallback import Fallback
from octet.worker.mesh import Mesh
from octet.worker.metrics.exporter import DROPPED, MAX_SERIES, Exporter, MetricsCollector, exported, local_address_towards
from octet.worker.metrics.table import FAMILIES, OPERANDS, PHASES, Metrics, OperandSample
from octet.worker.reporting.reporter import LogReporter
from octet.worker.train.loop import Trainer
from tests.kit.waiting import LONG_S

Scrape = Callable[[Metrics], dict[tuple[str, str], float]]


@pytest.fixture(scope="module")
def scrape() -> Scrape:
    """Return a function that scrapes metrics over HTTP, as Prometheus does: values by name and label value."""

    def over_http(metrics: Metrics) -> dict[tuple[str, str], float]:
        with Exporter(metrics, "127.0.0.1") as exporter:
            return parse(exporter.address)

    return over_http


def parse(address: str) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=LONG_S) as answer:
        text = answer.read().decode()
    return {
        (sample.name, " ".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def step(number: int, loss: float | None = 2.0) -> StepReport:
    return StepReport(
        step=number, loss=loss, gradient_norm=1.0, learning_rate=0.1, tokens=128, step_time_s=0.5, data_wait_s=0.1
    )


def test_a_real_run_fills_the_metrics(spec_document: dict[str, object], tmp_path: Path, scrape: Scrape) -> None:
    config = resolve(JobSpec.model_validate(spec_document), RankEnv())
    metrics = Metrics()
    with Mesh(config.env, torch.device("cpu")) as mesh:
        trainer = Trainer(config, mesh, LogReporter(), tmp_path, metrics)
        summary = trainer.run()
    values = scrape(metrics)

    assert values["octet_train_step", ""] == values["octet_train_steps_total", ""] == 4
    assert values["octet_train_tokens_total", ""] == summary.tokens == 4 * 4 * 32
    assert values["octet_train_samples_total", ""] == 4 * 4
    assert values["octet_train_evaluation_loss", ""] == pytest.approx(summary.evaluation_loss)
    assert values["octet_train_evaluation_perplexity", ""] == pytest.approx(summary.evaluation_perplexity)
    measured = {name: values["octet_train_evaluation_metric", name] for name in summary.evaluation_metrics}
    assert measured == summary.evaluation_metrics
    assert values["octet_checkpoints_total", ""] == 1
    assert {name: values["octet_memory_bytes", name] for name in summary.memory_bytes} == summary.memory_bytes
    # One micro-batch keeps at least the inputs of the 4 linear layers of each block: 4*32 tokens, 32 or 128 wide, fp32.
    assert values["octet_memory_bytes", "activations"] > 4 * 32 * (3 * 32 + 128) * 4
    phases = {phase: values["octet_train_seconds_total", phase] for phase in PHASES}
    # A step's time holds its four phases; "other" holds the rest of the step, and its report.
    inside_s = sum(phases[phase] for phase in ("data_wait", "forward_backward", "communication", "optimizer"))
    assert 0 < inside_s <= summary.train_time_s <= inside_s + phases["other"]
    # 6 FLOPs per parameter in a product (learned positions are in none), plus the products of attention.
    flops = 6 * (summary.num_parameters - 64 * 32) + 12 * 32 * 32
    assert values["octet_train_flops_total", ""] == pytest.approx(flops * summary.tokens)


def test_an_fp8_run_tells_how_well_the_codes_hold(spec_document: dict[str, object], tmp_path: Path, scrape: Scrape) -> None:
    precision = {"level": "O2", "statistics_every": 2, "demotion": {"min_sqnr_db": 100, "patience": 1}}
    config = resolve(JobSpec.model_validate(spec_document | {"precision": precision}), RankEnv())
    metrics, heard = Metrics(), Heard()
    with Mesh(config.env, torch.device("cpu")) as mesh:
        Trainer(config, mesh, heard, tmp_path, metrics).run()
    values = scrape(metrics)
    for operand in OPERANDS:
        assert values["octet_fp8_amax", operand] > 0
        assert 10 < values["octet_fp8_sqnr_decibels", operand] < 60
        assert values["octet_fp8_overflow_ratio", operand] == 0
    assert values["octet_layers", "filtered"] == 0
    num_demoted = len([body for body in heard.bodies if isinstance(body, EventReport) and body.type == "layer.demoted"])
    assert values["octet_layers", "demoted"] == num_demoted > 0  # nothing reaches 100 dB


def test_layers_in_bf16_are_counted_by_their_reason_after_a_resume_too(
    spec_document: dict[str, object], tmp_path: Path, scrape: Scrape
) -> None:
    """Set by hand what a GPU's table and samples would decide: of 4 converted layers, one is filtered and one demoted."""
    config = resolve(JobSpec.model_validate(spec_document | {"precision": {"level": "O2"}}), RankEnv())
    states = ("converted", "filtered", "demoted", "skipped")
    metrics, heard, resumed_metrics = Metrics(), Heard(), Metrics()
    with Mesh(config.env, torch.device("cpu")) as mesh:
        trainer = Trainer(config, mesh, heard, tmp_path, metrics)
        trainer.model.blocks[0].mlp.up.fallback = Fallback.TOO_SMALL
        trainer.model.blocks[0].mlp.down.fallback = Fallback.DEMOTED
        trainer.job.conversion = replace(trainer.job.conversion, filtered=(FilteredLayer("blocks.0.mlp.up", "too small"),))
        trainer.run()
        (saved,) = [body for body in heard.bodies if isinstance(body, CheckpointReport)]
        resumed = Trainer(config, mesh, LogReporter(), tmp_path, resumed_metrics)
        resumed.run((CheckpointRef(step=saved.step, name=saved.name, sha256=saved.sha256),))
    for each in (metrics, resumed_metrics):
        values = scrape(each)
        assert [values["octet_layers", state] for state in states] == [2, 1, 1, 1]
    (event,) = [body for body in heard.bodies if isinstance(body, EventReport)]
    assert event.type == "layers.filtered"
    assert event.message == "layers that multiply in bf16 because FP8 gains nothing there: 1 of too small"


def test_a_phase_inside_another_counts_once(scrape: Scrape) -> None:
    metrics = Metrics()
    with metrics.timed("other") as whole:
        with metrics.timed("forward_backward"), metrics.timed("data_wait"):
            torch.ones(10_000).sum()
        with metrics.timed("optimizer"):
            torch.ones(10_000).sum()
    values = scrape(metrics)
    assert sum(value for (name, _), value in values.items() if name == "octet_train_seconds_total") == pytest.approx(
        whole.seconds
    )


def test_a_loss_that_is_not_a_number_is_seen_and_counted(scrape: Scrape) -> None:
    metrics = Metrics()
    metrics.observe(step(1))
    metrics.observe(step(2, loss=None))
    values = scrape(metrics)
    assert math.isnan(values["octet_train_loss", ""])
    assert values["octet_train_non_finite_steps_total", ""] == 1


def test_fp8_health_shows_the_worst_layer(scrape: Scrape) -> None:
    metrics = Metrics()
    metrics.observe_fp8(
        [
            OperandSample(1, "layer", "input", amax, 1.0, overflow_ratio=0.0, underflow_ratio=0.1, sqnr_db=decibels)
            for amax, decibels in ((3.0, 30.0), (7.0, 20.0))
        ]
    )
    values = scrape(metrics)
    assert values["octet_fp8_amax", "input"] == 7.0
    assert values["octet_fp8_sqnr_decibels", "input"] == 20.0


def full_metrics() -> Metrics:
    """Return metrics with every family, and every value of its label that the code can set."""
    labels = {
        "octet_train_seconds_total": PHASES,
        "octet_memory_bytes": (
            "weights", "master_weights", "gradients", "exp_avg", "exp_avg_sq", "scales", "other", "activations",
        ),
        "octet_expert_load_ratio": ("fewest", "most"),
        "octet_layers": ("converted", "filtered", "skipped", "demoted"),
        "octet_wire_sent_bytes_total": (
            "exchange float32", "exchange float8_e4m3fn", "gather float32", "gather float8_e4m3fn", "gather float16",
            "gather uint8", "gather int8", "max float32", "sum float64",
            "broadcast float32", "broadcast float16", "broadcast float8_e4m3fn", "broadcast int8", "broadcast float64",
        ),
        "octet_train_evaluation_metric": ("top1_accuracy", "top5_accuracy"),
        "octet_train_flops_utilization_ratio": ("989 TFLOP/s dense bf16",),
    }  # fmt: skip
    metrics = Metrics()
    for family in FAMILIES:
        default = OPERANDS if family.labels == ("operand",) else ("",)
        for label in labels.get(family.name, default):
            values = label.split(maxsplit=len(family.labels) - 1) if family.labels else []
            metrics.set(family.name, 1.0, *values)
    return metrics


def test_all_series_of_a_rank_fit_the_budget(scrape: Scrape) -> None:
    values = scrape(full_metrics())
    assert len(values) <= MAX_SERIES < 100  # docs/operations.md
    assert values[DROPPED, ""] == 0


def test_a_family_over_the_budget_is_left_out_and_counted() -> None:
    metrics = Metrics()
    metrics.observe(step(1))
    for number in range(20):
        metrics.set("octet_wire_sent_bytes_total", 1.0, "exchange", f"dtype_{number}")
    collector = MetricsCollector(metrics, max_series=15)
    for scrapes in (1, 2):
        metrics = list(collector.collect())
        samples = [sample for metric in metrics for sample in metric.samples]
        assert len(samples) <= 15
        assert not [sample for sample in samples if sample.name == "octet_wire_sent_bytes_total"]
        assert samples[-1].name == DROPPED
        assert samples[-1].value == 20 * scrapes


class Heard(LogReporter):
    def __init__(self) -> None:
        self.bodies: list[ReportBody] = []

    def send(self, body: ReportBody, at: datetime | None = None) -> None:
        self.bodies.append(body)


def test_the_control_plane_is_told_where_and_nothing_listens_afterwards() -> None:
    reporter, metrics = Heard(), Metrics()
    metrics.observe(step(7))
    with exported(metrics, reporter.send, "http://127.0.0.1:8000"):
        (body,) = reporter.bodies
        assert isinstance(body, ExporterReport)
        assert body.address.startswith("127.0.0.1:")
        assert parse(body.address)["octet_train_step", ""] == 7
    with pytest.raises(OSError, match="refused"):
        parse(body.address)


def test_a_rank_without_a_way_to_the_control_plane_still_runs_and_says_so() -> None:
    reporter = Heard()
    with exported(Metrics(), reporter.send, "http://no-such-host.invalid:8000"):
        (body,) = reporter.bodies
    assert isinstance(body, EventReport)
    assert body.type == "exporter.failed"


def test_the_address_is_the_one_on_the_way_to_the_control_plane() -> None:
    assert local_address_towards("http://127.0.0.1:8000") == "127.0.0.1"
    assert local_address_towards("http://[::1]:8000/path") == "::1"
    with Exporter(Metrics(), "::1") as exporter:
        assert exporter.address.startswith("[::1]:")
        assert (DROPPED, "") in parse(exporter.address)
