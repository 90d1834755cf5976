"""The table of a rank's metrics, and their present values.

The training loop only writes numbers into `Metrics`; `octet.worker.metrics.exporter` formats them
when Prometheus scrapes, on another thread. Loads no torch. Labels that identify ranks (job, attempt,
rank, pool, tenant, level) come from service discovery.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from octet.api_schemas import CheckpointReport, EvaluationReport, ReportBody, StartedReport, StepReport

PHASES = ("data_wait", "forward_backward", "communication", "optimizer", "evaluation", "checkpoint", "other")
OPERANDS = ("input", "weight", "grad_output")


@dataclass(frozen=True)
class Family:
    """One metric: its name, its help text, the names of its labels and the most series that a rank has of it."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    most_series: int = 1

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        return "counter" if self.name.endswith("_total") else "gauge"


FAMILIES = (
    Family("octet_train_step", "optimizer steps done, over all attempts of the job"),
    Family("octet_train_loss", "training loss of the last step, mean over the global batch, nats per token"),
    Family("octet_train_gradient_norm", "global L2 norm of the gradients before clipping, last step"),
    Family("octet_train_learning_rate", "learning rate of the last step"),
    Family("octet_train_step_duration_seconds", "wall time of the last step"),
    Family("octet_train_busy_seconds", "time of the last step that this rank computed: without its waits for other ranks"),
    Family("octet_train_last_step_timestamp_seconds", "when the last step ended, unix time"),
    Family("octet_train_steps_total", "optimizer steps taken by this process"),
    Family("octet_train_tokens_total", "tokens this rank trained on; the sum over ranks is the job's"),
    Family("octet_train_samples_total", "sequences this rank trained on; the sum over ranks is the job's"),
    Family("octet_train_flops_total", "model FLOPs of this rank's tokens, forward and backward, without recomputation"),
    Family("octet_train_non_finite_steps_total", "steps whose loss or gradient norm was NaN or infinite"),
    Family(
        "octet_train_seconds_total",
        "host wall time by phase; on cuda, work queued in one phase may be waited for in the next",
        ("phase",),
        len(PHASES),
    ),
    Family(
        "octet_train_flops_utilization_ratio", "model FLOP/s of the last step over the peak that the label names", ("peak",)
    ),
    Family("octet_train_evaluation_loss", "loss of the last evaluation, nats per target: a token or an image"),
    Family("octet_train_evaluation_perplexity", "exp of the loss of the last evaluation"),
    Family(
        "octet_train_evaluation_metric",
        "what the model's family measures besides the loss, such as accuracy, last evaluation",
        ("metric",),
        2,
    ),
    Family("octet_memory_bytes", "bytes of live tensors at the end of the first step's backward pass, by class", ("class",), 8),
    Family("octet_memory_used_bytes", "memory in use now: on cuda by the whole device, on cpu by this process (resident)"),
    Family("octet_memory_peak_bytes", "highest use so far: on cuda allocated by torch, on cpu resident in this process"),
    Family("octet_memory_limit_bytes", "memory available: on cuda the device's, on cpu the control group's or the machine's"),
    Family(
        "octet_expert_load_ratio",
        "tokens of the expert that has fewest or most, over the mean of its mixture: the most uneven mixture, last pass",
        ("expert",),
        2,
    ),
    Family("octet_layers", "linear layers by state: converted to FP8, skipped, filtered or demoted", ("state",), 4),
    Family("octet_fp8_amax", "largest magnitude in the last sample, over the layers", ("operand",), len(OPERANDS)),
    Family("octet_fp8_dequant_scale", "largest dequant_scale in the last sample, over the layers", ("operand",), len(OPERANDS)),
    Family(
        "octet_fp8_overflow_ratio",
        "share of elements clamped to the format's maximum, worst layer",
        ("operand",),
        len(OPERANDS),
    ),
    Family(
        "octet_fp8_underflow_ratio", "share of non-zero elements that became zero, worst layer", ("operand",), len(OPERANDS)
    ),
    Family("octet_fp8_sqnr_decibels", "signal to quantization noise, worst layer", ("operand",), len(OPERANDS)),
    Family(
        "octet_wire_sent_bytes_total",
        "bytes of gradients, weights and scales that this rank sent to others, by collective and by dtype on the wire",
        ("collective", "dtype"),
        14,
    ),
    Family("octet_checkpoints_total", "checkpoints written by this process"),
    Family("octet_checkpoint_bytes", "size of the last checkpoint"),
    Family("octet_checkpoint_last_success_timestamp_seconds", "when the last checkpoint was complete, unix time"),
    Family("octet_gpu_power_watts", "power draw of this rank's GPU, from NVML"),
    Family("octet_gpu_sm_clock_hertz", "multiprocessor clock of this rank's GPU, from NVML"),
    Family("octet_gpu_temperature_celsius", "temperature of this rank's GPU, from NVML"),
    Family("octet_gpu_utilization_ratio", "share of the last sample period in which a kernel ran, from NVML"),
)
_BY_NAME = {family.name: family for family in FAMILIES}


@dataclass(frozen=True)
class OperandSample:
    """The error of one operand of one layer in FP8, in an optimizer step that samples it: some of its rows, or all.

    A matrix of at most 131,072 elements is read whole. overflow_ratio: share of elements clamped to the format's maximum.
    underflow_ratio: share of non-zero elements that became zero. sqnr_db: signal to quantization noise; 31.5 dB for E4M3 and
    25.5 dB for E5M2 where nothing is out of range. dequant_scale: the largest, where there are several.
    """

    step: int
    layer: str
    operand: str
    amax: float
    dequant_scale: float
    overflow_ratio: float
    underflow_ratio: float
    sqnr_db: float


class Lap:
    """The duration of a timed phase, known when the phase is over."""

    seconds = 0.0


class Metrics:
    """The present values of one rank's metrics. The training thread writes, a scrape reads."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._lock = threading.Lock()
        self._inner_s = 0.0
        self._rank_share = 1.0
        self._samples_per_step = 0
        self._flops_per_token = 0.0
        self._last_samples: Sequence[OperandSample] = ()
        self._peak_flops: float | None = None
        self._read_device: Callable[[], Iterable[tuple[str, float]]] = tuple

    def read(self) -> list[tuple[Family, tuple[str, ...], float]]:
        """Return every known value in the table's order: family, values of its labels, value."""
        with self._lock:
            values = dict(self._values)
        values |= {(name, ()): value for name, value in self._read_device()}
        return sorted(
            ((_BY_NAME[name], labels, value) for (name, labels), value in values.items()),
            key=lambda entry: FAMILIES.index(entry[0]),
        )

    def knows(self, name: str, *labels: str) -> bool:
        return (name, labels) in self._values

    def set(self, name: str, value: float, *labels: str) -> None:
        assert len(_BY_NAME[name].labels) == len(labels), (name, labels)
        with self._lock:
            self._values[name, labels] = value

    def add(self, name: str, value: float, *labels: str) -> None:
        assert len(_BY_NAME[name].labels) == len(labels), (name, labels)
        with self._lock:
            self._values[name, labels] = self._values.get((name, labels), 0.0) + value

    @contextmanager
    def timed(self, phase: str) -> Iterator[Lap]:
        """Add the time spent inside to `phase`. Time in a nested phase is not counted in the outer phase."""
        assert phase in PHASES, phase
        lap = Lap()
        outer_inner_s, self._inner_s = self._inner_s, 0.0
        began = time.perf_counter()
        try:
            yield lap
        finally:
            lap.seconds = time.perf_counter() - began
            self.add("octet_train_seconds_total", lap.seconds - self._inner_s, phase)
            self._inner_s = outer_inner_s + lap.seconds

    def describe_work(self, *, rank_share: float, samples_per_step: int, flops_per_token: float) -> None:
        """Describe a step over all ranks. flops_per_token: FLOPs of the model, forward and backward."""
        self._rank_share = rank_share
        self._samples_per_step = samples_per_step
        self._flops_per_token = flops_per_token

    def describe_device(self, read: Callable[[], Iterable[tuple[str, float]]], peak_flops: float | None) -> None:
        """Describe the device. read: called at each scrape. peak_flops: dense bf16 FLOP/s of the device, None if unknown."""
        self._read_device = read
        self._peak_flops = peak_flops

    def observe(self, body: ReportBody) -> None:
        """Take the numbers from a report. Every rank calls this, also ranks that do not send the report."""
        match body:
            case StartedReport():
                self.set("octet_train_step", body.resumed_from_step)
                self.set("octet_train_non_finite_steps_total", 0.0)
                self.set("octet_layers", body.num_layers_converted - body.num_layers_filtered, "converted")
                self.set("octet_layers", body.num_layers_filtered, "filtered")
                self.set("octet_layers", body.num_layers_skipped, "skipped")
            case StepReport():
                self._observe_step(body)
            case EvaluationReport() if not body.tokens:
                pass  # an export's: it repeats the loss of its step, which may be an old one, and the server shows scores
            case EvaluationReport():
                self.set("octet_train_evaluation_loss", _number(body.loss))
                self.set("octet_train_evaluation_perplexity", _perplexity(body.loss))
                for name, value in body.metrics.items():
                    self.set("octet_train_evaluation_metric", _number(value), name)
            case CheckpointReport():
                self.add("octet_checkpoints_total", 1)
                self.set("octet_checkpoint_bytes", body.num_bytes)
                self.set("octet_checkpoint_last_success_timestamp_seconds", time.time())
            case _:
                pass  # phases, logs and events are not numbers

    def observe_demotions(self, number: int) -> None:
        """Count so many layers fewer in FP8 and as many more demoted; below 0: that came back."""
        self.add("octet_layers", -number, "converted")
        self.add("octet_layers", number, "demoted")

    def observe_memory(self, num_bytes: Mapping[str, int]) -> None:
        for kind, value in num_bytes.items():
            self.set("octet_memory_bytes", value, kind)

    def observe_busy(self, seconds: float) -> None:
        """Set the time that this rank computed in the last step; 0 is no step yet."""
        if seconds > 0:
            self.set("octet_train_busy_seconds", seconds)

    def observe_wire(self, sent_bytes: Mapping[tuple[str, str], int]) -> None:
        """Set the bytes sent since the process started. sent_bytes: by collective and dtype."""
        for (collective, dtype), value in sent_bytes.items():
            self.set("octet_wire_sent_bytes_total", value, collective, dtype)

    def observe_experts(self, loads: Sequence[tuple[float, float]]) -> None:
        """Set the loads of the most uneven mixture. loads: of each, the fewest and most tokens of an expert, over the mean."""
        if loads:
            self.set("octet_expert_load_ratio", min(fewest for fewest, _ in loads), "fewest")
            self.set("octet_expert_load_ratio", max(most for _, most in loads), "most")

    def observe_fp8(self, samples: Sequence[OperandSample]) -> None:
        """Set each operand's worst value of each number over the layers of one sample."""
        if samples is self._last_samples:
            return
        self._last_samples = samples
        by_operand: dict[str, list[OperandSample]] = {}
        for sample in samples:
            by_operand.setdefault(sample.operand, []).append(sample)
        for operand, found in by_operand.items():
            self.set("octet_fp8_amax", max(sample.amax for sample in found), operand)
            self.set("octet_fp8_dequant_scale", max(sample.dequant_scale for sample in found), operand)
            self.set("octet_fp8_overflow_ratio", max(sample.overflow_ratio for sample in found), operand)
            self.set("octet_fp8_underflow_ratio", max(sample.underflow_ratio for sample in found), operand)
            self.set("octet_fp8_sqnr_decibels", min(sample.sqnr_db for sample in found), operand)

    def _observe_step(self, body: StepReport) -> None:
        self.set("octet_train_step", body.step)
        self.set("octet_train_loss", _number(body.loss))
        self.set("octet_train_gradient_norm", _number(body.gradient_norm))
        self.set("octet_train_learning_rate", body.learning_rate)
        self.set("octet_train_step_duration_seconds", body.step_time_s)
        self.set("octet_train_last_step_timestamp_seconds", time.time())
        self.add("octet_train_steps_total", 1)
        self.add("octet_train_tokens_total", body.tokens * self._rank_share)
        self.add("octet_train_samples_total", self._samples_per_step * self._rank_share)
        self.add("octet_train_flops_total", self._flops_per_token * body.tokens * self._rank_share)
        if self._peak_flops:
            achieved = self._flops_per_token * body.tokens * self._rank_share / body.step_time_s
            peak = f"{self._peak_flops / 1e12:.0f} TFLOP/s dense bf16"
            self.set("octet_train_flops_utilization_ratio", achieved / self._peak_flops, peak)
        if body.loss is None or body.gradient_norm is None:
            self.add("octet_train_non_finite_steps_total", 1)


def _perplexity(loss: float | None) -> float:
    """exp(loss); infinite if that is too large for a float, NaN for a loss that is not finite."""
    if loss is None:
        return math.nan
    return math.exp(loss) if loss < 700 else math.inf


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
