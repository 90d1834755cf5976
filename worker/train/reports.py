"""Make the reports of a job as a whole: how it starts, what its steps cost, and how it ended."""

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from octet.api_schemas import EventReport, JobSummary, JsonScalar, MeasuredReport, PrecisionSpec, StartedReport, StepReport
from octet.api_schemas.measured import MAX_LAYERS, LayerHealth, MemoryBytes
from octet.worker.common.config import TrainConfig
from octet.worker.common.errors import LimitsBroken
from octet.worker.fp8.convert import ConversionReport
from octet.worker.fp8.experts import expert_loads, has_experts, mixtures_of
from octet.worker.fp8.fallback import Fallback
from octet.worker.fp8.linear import Float8Linear
from octet.worker.mesh import Mesh
from octet.worker.mesh.stragglers import Straggler
from octet.worker.metrics.device import no_peak_event
from octet.worker.metrics.memory import fp32_report, host_bytes, memory_report
from octet.worker.metrics.table import OperandSample
from octet.worker.models.blocks import repeated_blocks
from octet.worker.train.build import JobModel, MovingAverage
from octet.worker.train.log import FinishedStep
from octet.worker.train.progress import Progress, StepTimes

LARGEST_EXPONENT = math.log(sys.float_info.max)


def expert_loads_of(model: nn.Module) -> Callable[[], list[tuple[float, float]]]:
    """Return a function that reads the loads of a model's experts, see `expert_loads`."""
    return partial(expert_loads, [*mixtures_of(model).values()])


def num_demoted(model: nn.Module) -> int:
    """Count the layers of a model that were demoted to bf16."""
    return _count_fallbacks(model)[Fallback.DEMOTED]


def check_limits(precision: PrecisionSpec, mesh: Mesh, job: JobModel) -> None:
    """Raise LimitsBroken if more layers are demoted than may be, where the job has a level to go on at.

    Every rank calls it in the same steps.
    """
    most = precision.demotion.max_layers if precision.demotion is not None and precision.ladder else 1.0
    if most == 1.0:
        return
    demoted, converted = mesh.pipeline.sum(num_demoted(job.model), len(job.conversion.converted))
    if demoted > most * converted:
        raise LimitsBroken(
            f"{demoted:.0f} of {converted:.0f} layers left FP8, more than precision.demotion.max_layers allows ({most:.0%}). "
            "Their events layer.demoted name the limits that they broke."
        )


def _count_fallbacks(model: nn.Module) -> Counter[Fallback]:
    """Count the converted layers by the reason why they compute in bf16."""
    return Counter(layer.fallback for layer in model.modules() if isinstance(layer, Float8Linear))


def started(config: TrainConfig, mesh: Mesh, job: JobModel, step: int, num_steps: int) -> StartedReport:
    """Report where and with what the job trains from `step` to `num_steps`. All ranks call it together."""
    return StartedReport(
        resumed_from_step=step,
        steps=num_steps,
        node=config.env.master_address,
        device=torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu",
        world_size=mesh.world.size,
        num_parameters=num_parameters(job.model),
        num_layers_converted=len(job.conversion.converted),
        num_layers_filtered=int(*mesh.pipeline.sum(_count_fallbacks(job.model)[Fallback.TOO_SMALL])),
        num_layers_skipped=len(job.conversion.skipped),
    )


def count_memory(
    progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer, average: MovingAverage
) -> MeasuredReport:
    """Write into `progress` the bytes held on the device, by class, and in host memory; a moving average counts as `other`.

    Returns them as a report, beside those of fp32.
    """
    progress.memory_bytes = memory_report(model, optimizer)
    progress.memory_bytes["other"] += average.num_bytes
    progress.converted_memory_bytes = memory_report(model, optimizer, converted_only=True)
    progress.host_memory_bytes = host_bytes(model, optimizer)
    memory = MemoryBytes(
        held=progress.memory_bytes,
        fp32=fp32_report(model, optimizer),
        host=progress.host_memory_bytes,
        peak=_peak_bytes(next(model.parameters()).device),
    )
    return MeasuredReport(step=progress.step + 1, memory=memory)


def _peak_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _peak_reserved_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


class WorstLayers:
    """Reports of the layers that FP8 holds worst, at most one in `INTERVAL_S`."""

    INTERVAL_S = 5.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_at = clock()
        self._reported: Sequence[OperandSample] = ()

    def new(self, step: int, samples: Sequence[OperandSample]) -> MeasuredReport | None:
        """Return a report of new samples; None where there are none, or where it is too early."""
        if not samples or samples is self._reported or self._clock() < self._due_at:
            return None
        self._reported, self._due_at = samples, self._clock() + self.INTERVAL_S
        worst: dict[str, OperandSample] = {}
        for sample in sorted(samples, key=_badness):
            worst.setdefault(sample.layer, sample)
        return MeasuredReport(step=step, layers=tuple(map(_health_of, list(worst.values())[:MAX_LAYERS])))


def _badness(sample: OperandSample) -> float:
    """Return what the worst sample has least of."""
    return sample.sqnr_db if not math.isnan(sample.sqnr_db) else -math.inf


def _health_of(sample: OperandSample) -> LayerHealth:
    numbers = {name: finite(getattr(sample, name)) for name in LayerHealth.model_fields if name not in _NOT_NUMBERS}
    return LayerHealth(layer=sample.layer, operand=sample.operand, step=sample.step, **numbers)  # type: ignore[arg-type]


_NOT_NUMBERS = {"layer", "operand", "step"}


def step_report(step: FinishedStep, tokens: int) -> StepReport:
    """Report a finished step of so many tokens."""
    return StepReport(
        step=step.step,
        loss=finite(step.loss),
        gradient_norm=finite(step.gradient_norm),
        learning_rate=step.learning_rate,
        tokens=tokens,
        step_time_s=step.step_time_s,
        data_wait_s=step.data_wait_s,
    )


def straggler_event(straggler: Straggler) -> EventReport:
    """Name the rank that holds the others up."""
    data: dict[str, JsonScalar] = {"rank": straggler.rank, "busy_s": straggler.busy_s, "median_s": straggler.median_s}
    return EventReport(type="rank.straggler", message=str(straggler), data=data)


def start_events(config: TrainConfig, job: JobModel, device: torch.device) -> Iterator[EventReport]:
    """Yield what a person should know before the first step."""
    yield from conversion_events(job.conversion, job.model)
    yield from compile_events(config, job.model, device)
    yield from job.graph.start_events()
    if (event := no_peak_event(device)) is not None:
        yield event


def conversion_events(conversion: ConversionReport, model: nn.Module) -> Iterator[EventReport]:
    """Yield what a person should know of the conversion."""
    if left := stacked_matrices(model):
        num_left, share = sum(left.values()), sum(left.values()) / num_parameters(model)
        message = (
            f"{num_left:,} parameters ({share:.0%} of the model) stay in fp32: no nn.Linear holds them, as experts that "
            f"lie in one tensor: {', '.join(left)}"
        )
        yield EventReport(type="layers.not_linear", message=message[:4096], data={"parameters": num_left})
    if conversion.filtered:
        message = f"layers that multiply in bf16 because FP8 gains nothing there: {conversion.why_filtered}"
        yield EventReport(type="layers.filtered", message=message[:4096], data={"layers": len(conversion.filtered)})
    if conversion.borrowed_table:
        message = f"layers in FP8 are chosen by speedups {conversion.borrowed_table}"
        yield EventReport(type="layers.unmeasured_device", message=message[:4096])
    if conversion.nothing_converted:
        yield EventReport(type="layers.none_converted", message=conversion.nothing_converted[:4096])


def compile_events(config: TrainConfig, model: nn.Module, device: torch.device) -> Iterator[EventReport]:
    """Yield why a job does not compile the blocks of its model, on CUDA or where it asked for it."""
    compiling = config.training.compile
    reason = "the model repeats none" if compiling == "auto" and not repeated_blocks(model) else config.not_compiled
    if compiling != "off" and has_experts(model):
        reason = "the host reads how many tokens each expert has, in each pass of a block with experts"
    if reason is not None and (device.type == "cuda" or compiling == "on"):
        yield EventReport(type="training.not_compiled", message=f"blocks run without torch.compile: {reason}")


def summarize(
    config: TrainConfig,
    model: nn.Module,
    progress: Progress,
    step_times: StepTimes,
    evaluation: Mapping[str, float],
    facts: Mapping[str, float],
    sent_bytes: Mapping[tuple[str, str], int],
) -> JobSummary:
    """The result of a run that took all its steps.

    evaluation: the loss and the family's metrics, by name. sent_bytes: by collective and dtype.
    """
    return JobSummary(
        steps=progress.step,
        final_loss=statistics.fmean(progress.recent_losses),
        evaluation_loss=evaluation["loss"],
        evaluation_perplexity=math.exp(min(evaluation["loss"], LARGEST_EXPONENT)),
        evaluation_metrics={name: value for name, value in evaluation.items() if name != "loss"},
        tokens=progress.step * config.tokens_per_step,
        tokens_per_s=config.tokens_per_step / step_times.mean(progress),
        train_time_s=progress.train_time_s,
        step_time_s=step_times.median(),
        num_parameters=num_parameters(model),
        num_converted_parameters=num_converted_parameters(model),
        memory_bytes=progress.memory_bytes,
        converted_memory_bytes=progress.converted_memory_bytes,
        host_memory_bytes=progress.host_memory_bytes,
        peak_memory_bytes=_peak_bytes(next(model.parameters()).device),
        reserved_memory_bytes=_peak_reserved_bytes(next(model.parameters()).device),
        sent_bytes=_by_collective(sent_bytes),
        data=dict(facts),
    )


def stacked_matrices(model: nn.Module) -> dict[str, int]:
    """Elements of the parameters that hold several matrices outside torch's own modules, which no level converts, by name."""
    return {
        f"{name}.{parameter_name}" if name else parameter_name: parameter.numel()
        for name, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn")
        for parameter_name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and min(parameter.shape) > 1
    }


def _by_collective(sent_bytes: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (collective, dtype), num_bytes in sorted(sent_bytes.items()):
        found.setdefault(collective, {})[dtype] = num_bytes
    return found


def finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def num_parameters(model: nn.Module) -> int:
    """Elements of all parameters of the whole model; shared ones count once."""
    own = sum(parameter.numel() * getattr(parameter, "num_shards", 1) for parameter in model.parameters())
    return own + int(getattr(model, "num_parameters_elsewhere", 0))


def num_converted_parameters(model: nn.Module) -> int:
    """Elements of the weights that the level converted."""
    report = model.octet_report
    assert isinstance(report, ConversionReport)
    return report.num_converted_parameters
