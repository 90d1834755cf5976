"""The training loop of one rank, top to bottom. It runs the same under Ray, under torchrun and alone.

`Trainer` declares its parts, then acts: `run` is the loop, `step` is one optimizer step. Losses are means over the global
batch in nats per token. A checkpoint holds everything that the next step depends on, so a resumed run is bit-identical.
"""

import logging
import math
import statistics
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from api_schemas import (
    CheckpointRef,
    CheckpointReport,
    EvaluationReport,
    EventReport,
    JobSummary,
    PhaseReport,
    ReportBody,
    StartedReport,
    StepReport,
)
from worker import checkpoint
from worker.config import TrainConfig
from worker.data import TextData, load_text
from worker.errors import Cancelled, NonFiniteLoss, Stopped
from worker.fp8.convert import ConversionReport
from worker.fp8.health import LayerDemoted
from worker.fp8.linear import Fallback, Float8Linear
from worker.metrics.activations import activations_counted_once
from worker.metrics.table import Metrics
from worker.models import GPT, GPTConfig
from worker.optim import build_optimizer
from worker.parallel import Ranks, average_gradients, broadcast_parameters, share_scaling
from worker.prepare import fp8_statistics, initialize, memory_report
from worker.reporting.reporter import Reporter

_MAX_NON_FINITE_STEPS = 10
_STEP_TIMES_KEPT = 1000

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """Where the run is; all of it is in the checkpoint."""

    step: int = 0
    position: int = 0
    train_time_s: float = 0.0
    num_non_finite: int = 0
    recent_losses: list[float] = field(default_factory=list)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    converted_memory_bytes: dict[str, int] = field(default_factory=dict)


class Trainer:
    """One rank's share of one job."""

    # What it was asked for
    config: TrainConfig
    ranks: Ranks
    reporter: Reporter
    metrics: Metrics
    folder: Path

    # What it trains
    data: TextData
    model: GPT
    conversion: ConversionReport
    optimizer: torch.optim.Optimizer
    progress: Progress
    step_times_s: deque[float]

    def __init__(
        self, config: TrainConfig, ranks: Ranks, reporter: Reporter, job_dir: Path, metrics: Metrics | None = None
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.reporter = reporter
        self.metrics = metrics or Metrics()
        self.folder = job_dir / "checkpoints"
        self.progress = Progress()
        self.step_times_s = deque(maxlen=_STEP_TIMES_KEPT)
        self.data = load_text(config.data, config.sequence_length, config.seed)
        torch.manual_seed(config.seed)
        model = GPT(GPTConfig(**config.sizes.model_dump()), seed=config.seed).to(ranks.device)
        optimizer = build_optimizer(_parameter_groups(model, config.optimizer.weight_decay), config.optimizer)
        converted, low_bit = initialize(
            model,
            optimizer,
            opt_level=config.precision,
            seed=config.seed,
            tokens=config.micro_batch_size * config.sequence_length,
            on_event=self._layer_demoted,
        )
        self.model, self.optimizer = cast(GPT, converted), cast(torch.optim.Optimizer, low_bit)
        self.conversion = cast(ConversionReport, converted.octet_report)
        broadcast_parameters(self.model, ranks)
        self._tell(PhaseReport(phase="model_built"))

    def run(self, checkpoints: tuple[CheckpointRef, ...] = ()) -> JobSummary:
        """Train to the last step, from the newest of `checkpoints` that passes its check."""
        self._resume(checkpoints)
        started_at_step = self.progress.step
        self._report_start()
        evaluation_loss: float | None = None
        while self.progress.step < self.config.steps:
            with self.metrics.timed("other"):
                self.step()
            if self.progress.step == started_at_step + 1:
                self._tell(PhaseReport(phase="first_step"))
            if self._is_due(self.config.eval_every):
                with self.metrics.timed("evaluation"):
                    evaluation_loss = self.evaluate()
            if self._is_due(self.config.checkpoint_every):
                with self.metrics.timed("checkpoint"):
                    self.save()
        if evaluation_loss is None:
            evaluation_loss = self.evaluate()
        return self._summary(evaluation_loss)

    def step(self) -> None:
        """One optimizer step over the global batch."""
        started_at = time.perf_counter()
        learning_rate = self._set_learning_rate()
        with self.metrics.timed("forward_backward"):
            rank_loss, data_wait_s = self._forward_backward()
        with self.metrics.timed("communication"):
            average_gradients(self.model.parameters(), self.ranks)
            share_scaling(self.model, self.ranks)
        with self.metrics.timed("optimizer"):
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.gradient_clip or math.inf)
            self.optimizer.step()
        if not self.progress.memory_bytes:
            self._count_memory()
        self.optimizer.zero_grad(set_to_none=True)

        stop = self._wants_to_stop()
        loss_sum, num_stopping = self.ranks.sum(rank_loss, float(stop is not None))
        loss = loss_sum / self.ranks.world_size
        step_time_s = time.perf_counter() - started_at
        self.progress.step += 1
        self.progress.position += self.config.global_batch_size
        self.progress.train_time_s += step_time_s
        self.step_times_s.append(step_time_s)
        self._note_loss(loss)
        self.metrics.observe_wire(self.ranks.sent_bytes)
        if self.config.precision.resolved_statistics_every and self.conversion.converted:
            self.metrics.observe_fp8(fp8_statistics(self.model))
        self._tell(
            StepReport(
                step=self.progress.step,
                loss=_finite(loss),
                gradient_norm=_finite(float(norm)),
                learning_rate=learning_rate,
                tokens=self.config.tokens_per_step,
                step_time_s=step_time_s,
                data_wait_s=data_wait_s,
            )
        )
        if num_stopping:
            raise stop or Cancelled("rank 0 was told to stop")

    def _forward_backward(self) -> tuple[float, float]:
        """Gradients of this rank's share, accumulated over its micro-batches; its mean loss, and seconds spent on data."""
        config = self.config
        first = self.progress.position + self.ranks.rank * config.rank_batch_size
        losses, data_wait_s = [], 0.0
        for index in range(config.num_micro_batches):
            with self.metrics.timed("data_wait") as wait:
                batch = self.data.train_batch(first + index * config.micro_batch_size, config.micro_batch_size)
                tokens_BT, targets_BT = (part.to(self.ranks.device) for part in batch)
            data_wait_s += wait.seconds
            with activations_counted_once(self.model, self.metrics):
                loss = self.model.loss(tokens_BT, targets_BT) / config.num_micro_batches
            loss.backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).sum()), data_wait_s

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the evaluation windows, on all ranks together."""
        self.model.eval()
        loss_sum, num_tokens = 0.0, 0
        for batch in self.data.evaluation_batches(
            self.config.global_batch_size, self.config.eval_batches, self.ranks.rank, self.ranks.world_size
        ):
            tokens_BT, targets_BT = (part.to(self.ranks.device) for part in batch)
            loss_sum += float(self.model.loss(tokens_BT, targets_BT)) * tokens_BT.numel()
            num_tokens += tokens_BT.numel()
        self.model.train()
        loss_sum, tokens = self.ranks.sum(loss_sum, num_tokens)
        loss = loss_sum / tokens
        self._tell(EvaluationReport(step=self.progress.step, loss=_finite(loss), tokens=int(tokens)))
        return loss

    def save(self) -> None:
        """Write a checkpoint from rank 0; the others hold the same state."""
        if not self.ranks.is_first:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
            "step_times_s": list(self.step_times_s),
            "random": checkpoint.random_state(),
        }
        saved = checkpoint.save(self.folder, self.progress.step, state)
        last_loss = self.progress.recent_losses[-1] if self.progress.recent_losses else None
        self._tell(CheckpointReport(step=self.progress.step, loss=last_loss, **asdict(saved)))

    def _resume(self, checkpoints: tuple[CheckpointRef, ...]) -> None:
        for ref in checkpoints:
            try:
                state: dict[str, Any] = checkpoint.load(self.folder, ref)
            except checkpoint.BadCheckpoint as error:
                message = f"{error}; trying the one before"
                self._tell(EventReport(type="checkpoint.rejected", message=message, data={"step": ref.step}))
                continue
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])
            self.step_times_s.extend(state["step_times_s"])
            checkpoint.set_random_state(state["random"])
            return

    def _report_start(self) -> None:
        self.metrics.observe_memory(self.progress.memory_bytes)
        self.metrics.describe_work(
            world_size=self.ranks.world_size,
            samples_per_step=self.config.global_batch_size,
            flops_per_token=self.config.sizes.flops_per_token(self.config.sequence_length),
        )
        fallbacks = Counter(layer.fallback for layer in self.model.modules() if isinstance(layer, Float8Linear))
        self._tell(
            StartedReport(
                resumed_from_step=self.progress.step,
                node=self.config.env.master_address,
                device=_device_name(self.ranks.device),
                world_size=self.ranks.world_size,
                num_parameters=_num_parameters(self.model),
                num_layers_converted=len(self.conversion.converted),
                num_layers_filtered=fallbacks[Fallback.FILTERED],
                num_layers_skipped=len(self.conversion.skipped),
            )
        )
        for _ in range(fallbacks[Fallback.DEMOTED]):
            self.metrics.observe_demotion()
        if self.conversion.filtered and not self.progress.step:
            message = f"layers that multiply in bf16, as FP8 gains nothing there: {self.conversion.why_filtered}"
            self._tell(
                EventReport(type="layers.filtered", message=message[:4096], data={"layers": len(self.conversion.filtered)})
            )

    def _summary(self, evaluation_loss: float) -> JobSummary:
        losses = self.progress.recent_losses
        cuda = self.ranks.device.type == "cuda"
        return JobSummary(
            steps=self.progress.step,
            final_loss=statistics.fmean(losses),
            evaluation_loss=evaluation_loss,
            evaluation_perplexity=math.exp(evaluation_loss),
            tokens=self.progress.step * self.config.tokens_per_step,
            tokens_per_s=self.config.tokens_per_step / statistics.median(self.step_times_s),
            train_time_s=self.progress.train_time_s,
            num_parameters=_num_parameters(self.model),
            num_converted_parameters=self.conversion.num_converted_parameters,
            memory_bytes=self.progress.memory_bytes,
            converted_memory_bytes=self.progress.converted_memory_bytes,
            peak_memory_bytes=torch.cuda.max_memory_allocated(self.ranks.device) if cuda else None,
            data=self.data.facts,
        )

    def _set_learning_rate(self) -> float:
        learning_rate = learning_rate_at(self.progress.step, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate

    def _note_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            self.progress.num_non_finite += 1
            if self.progress.num_non_finite >= _MAX_NON_FINITE_STEPS:
                raise NonFiniteLoss(
                    f"the loss was not finite for {_MAX_NON_FINITE_STEPS} steps in a row, up to step {self.progress.step}. "
                    "Lower training.optimizer.learning_rate or lengthen training.schedule.warmup_steps."
                )
            return
        self.progress.num_non_finite = 0
        self.progress.recent_losses.append(loss)
        del self.progress.recent_losses[: -max(10, self.config.steps // 10)]

    def _count_memory(self) -> None:
        """After the first step: every state exists and the gradients are still alive."""
        self.progress.memory_bytes = memory_report(self.model, self.optimizer)
        self.progress.converted_memory_bytes = memory_report(self.model, self.optimizer, converted_only=True)
        self.metrics.observe_memory(self.progress.memory_bytes)

    def _is_due(self, every: int) -> bool:
        step = self.progress.step
        return step == self.config.steps or (every > 0 and step % every == 0)

    def _wants_to_stop(self) -> Stopped | None:
        try:
            self.reporter.check()
        except Stopped as stop:
            return stop
        return None

    def _layer_demoted(self, event: LayerDemoted) -> None:
        self.metrics.observe_demotion()
        message = f"layer {event.layer!r} computes in bf16 from step {event.step} on: {event.operand} {event.reason}"
        self._tell(EventReport(type="layer.demoted", message=message, data={"layer": event.layer, "step": event.step}))

    def _tell(self, body: ReportBody) -> None:
        """Every rank keeps the numbers for its own metrics; facts that all ranks share are reported once."""
        self.metrics.observe(body)
        if self.ranks.is_first:
            self.reporter.send(body)


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """Linear from `learning_rate / warmup_steps`, then half a cosine to `final_fraction` of it; `step` counts from 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    low = config.final_fraction
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay the matrices; biases and LayerNorms are not decayed (Radford et al. 2018, section 4.1)."""
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
