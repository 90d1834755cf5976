"""The training loop of one rank, top to bottom. It runs the same under Ray, under torchrun and alone.

`Trainer.run` is the loop. Losses are means over the global batch, in nats. A checkpoint holds all that the next step depends
on, so a resumed run is bit-identical. On an accelerator the host never waits in a step: a thread reads batches ahead; losses,
norms and samples are read when the device has computed them (`step_log.py`). So a divergence takes effect an interval late.
"""

import logging
import math
from contextlib import closing, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from api_schemas import CheckpointRef, EvaluationReport, EventReport, JobSummary, PhaseReport, ReportBody
from worker import checkpoint, train_reports
from worker.adapters import add_adapters, attach_adapters, trained_state, with_frozen
from worker.blocks import WARM_UP_STEPS, CompileWatch, eagerly, is_compiling_fault
from worker.config import TrainConfig, trained_job
from worker.data import Source, loss_divisor, open_source
from worker.data.order import seed_of
from worker.data.prefetch import Prefetcher, on_device
from worker.deterministic import deterministic
from worker.errors import Cancelled, InvalidConfig, Stopped
from worker.fp8.accelerator import is_accelerator
from worker.fp8.convert import ConversionReport
from worker.fp8.fallback import Fallback
from worker.fp8.health import LayerDemoted, StepKeeper
from worker.mesh import Mesh
from worker.metrics.readback import Late, Mark
from worker.metrics.table import Metrics
from worker.models.flops import flops_per_token
from worker.moving_average import MovingAverage
from worker.optim import build_optimizer
from worker.optim.schedule import learning_rate_at, parameter_groups, set_learning_rate
from worker.parallel import Parallel, on_mesh
from worker.parallel.draws import seed_draws
from worker.prepare import prepare
from worker.pretrained.start import StartedModel, start_job
from worker.progress import Progress, StepTimes
from worker.reporting.reporter import Reporter, order_to_stop
from worker.resume import resume
from worker.saved_progress import SavedProgress
from worker.savings import prepare_steps
from worker.staged_steps import staged_step
from worker.step_graph import StepGraph, step_graph_of
from worker.step_log import Reading, StepLog, TakenStep, now

logger = logging.getLogger(__name__)


class Trainer:
    """One rank's share of one job."""

    # Given by the caller
    config: TrainConfig
    mesh: Mesh
    reporter: Reporter
    metrics: Metrics
    folder: Path

    # Created by `__init__` and `_prepare`
    source: Source
    batches: Prefetcher
    writer: checkpoint.CheckpointWriter
    log: StepLog
    num_steps: int
    model: nn.Module
    conversion: ConversionReport
    optimizer: torch.optim.Optimizer
    parallel: Parallel
    average: MovingAverage
    health: StepKeeper | None
    compiling: CompileWatch | None
    graph: StepGraph
    flops_per_token: float
    progress: Progress
    step_times: StepTimes

    def __init__(
        self, config: TrainConfig, mesh: Mesh, reporter: Reporter, job_dir: Path, metrics: Metrics | None = None
    ) -> None:
        self.config, self.mesh, self.reporter = config, mesh, reporter
        self.metrics = metrics or Metrics()
        self.folder = job_dir / "checkpoints"
        self.progress = Progress()
        files, takes, smoothing = config.readable_files, config.sizes.takes, config.training.label_smoothing
        self.source = open_source(config.data, config.sequence_length, config.seed, files, takes, smoothing)
        self.batches = Prefetcher(self.source, config.batch, mesh.data.rank, mesh.device)
        self.writer = checkpoint.CheckpointWriter(self.folder, mesh.world, self._tell)
        self.log = StepLog(mesh, is_late=is_accelerator(mesh.device), is_writing=lambda: self.writer.is_writing)
        self.num_steps = config.training.steps_for(self.source.num_train_samples)
        if unfit := config.schedule.misfit(self.num_steps):
            raise InvalidConfig(str(unfit))
        torch.manual_seed(config.seed)
        self._prepare(start_job(config, mesh.device))
        self.step_times = StepTimes(num_skipped=self.graph.num_warm_up_steps or (WARM_UP_STEPS if self.compiling else 1))
        self._tell(PhaseReport(phase="model_built"))

    def run(self, checkpoints: tuple[CheckpointRef, ...] = ()) -> JobSummary:
        """Train to the last step, starting from the newest of `checkpoints` that passes its check."""
        with closing(self.batches), self.writer, deterministic(self.config.training.deterministic), self.graph.stream():
            return self._run(checkpoints)

    def _run(self, checkpoints: tuple[CheckpointRef, ...]) -> JobSummary:
        self._resume(checkpoints)
        started_at_step = self.progress.step
        if self.compiling is not None and self.health is not None:
            self.health.rehearse()
        self._report_start()
        evaluation: dict[str, float] = {}
        while self.progress.step < self.num_steps:
            with self.metrics.timed("other"):
                self.step()
            if self.progress.step == started_at_step + 1:
                self._report(self.log.flush())
                self._tell(PhaseReport(phase="first_step"))
            if self._is_due(self.config.eval_every):
                self._report(self.log.flush())
                with self.metrics.timed("evaluation"):
                    evaluation = self.evaluate()
            if self._is_due(self.config.checkpoint_every):
                with self.metrics.timed("checkpoint"):
                    self.save()
        self._report(self.log.flush())
        evaluation = evaluation or self.evaluate()
        self.progress.check_end(evaluation["loss"])
        facts, sent_bytes, mean_step_s = self.source.facts, self.mesh.sent_bytes, self.step_times.mean(self.progress)
        return train_reports.summarize(self.config, self.model, self.progress, evaluation, mean_step_s, facts, sent_bytes)

    def step(self) -> None:
        """Take one optimizer step over the global batch. Its loss is reported when the log has read it."""
        began = Mark(self.mesh.device)
        config, step = self.config, self.progress.step
        learning_rate = learning_rate_at(step, config.optimizer.learning_rate, config.schedule, self.num_steps)
        set_learning_rate(self.optimizer, learning_rate)
        self.graph.begin_step()
        if config.training.gradient_release:  # which steps parameters in the backward pass
            self.writer.before_change()
        with self.metrics.timed("forward_backward"):
            rank_loss, data_wait_s = self._forward_backward()
        with self.metrics.timed("communication"):
            self.parallel.synchronize()
        with self.metrics.timed("optimizer"):
            self.writer.before_change()
            norm = self.graph.update(self.parallel.clip_grad_norm_, self.config.gradient_clip or math.inf)
            self.parallel.publish()
            self.average.update(self.model)
        if not self.progress.memory_bytes:  # every state exists now, and the gradients are still alive
            train_reports.count_memory(self.progress, self.model, self.optimizer, self.average)
            self.metrics.observe_memory(self.progress.memory_bytes)
        self.optimizer.zero_grad(set_to_none=True)

        self.progress.step += 1
        self.progress.position += self.config.batch.global_batch_size
        ended = Mark(self.mesh.device)
        self.log.add(TakenStep(self.progress.step, learning_rate, data_wait_s, began, ended, now()), rank_loss, norm)
        for report in (*(self.compiling.after_step() if self.compiling is not None else ()), *self.graph.after_step()):
            self._tell(report, is_sent=self.mesh.stage.is_first and is_compiling_fault(report))
        stop = order_to_stop(self.reporter)
        if self.log.is_due or (stop is not None and self.mesh.world.size == 1):
            reading = self.log.end_interval(wants_to_stop=stop is not None)
            self._report(reading, stop)

    def _report(self, reading: Reading, stop: Stopped | None = None) -> None:
        """Report the steps that were read. Raises what stops the run: a rank's order to stop, or a loss that makes no sense."""
        is_stopping = reading.num_stopping > 0 or (stop is not None and self.mesh.world.size == 1)
        steps = (*reading.steps, *self.log.flush().steps) if is_stopping else reading.steps
        self.metrics.observe_wire(self.mesh.sent_bytes)
        self.metrics.observe_busy(self.mesh.waits.last_busy_s)
        if self.health is not None:
            self.metrics.observe_fp8(self.health.samples)
        for step in steps:
            self.progress.train_time_s += step.step_time_s
            self.step_times.add(step.step_time_s)
            self._tell(train_reports.step_report(step, self.config.tokens_per_step), at=step.at)
            if warning := self.progress.note_loss(step.step, step.loss, self.num_steps):
                self._tell(EventReport(type="training.diverging", message=warning, data={"loss": step.loss}))
        if straggler := self.mesh.new_straggler():
            self._tell(train_reports.straggler_event(straggler))
        if reading.all_written:
            self.writer.finish()
        if is_stopping:
            raise stop or order_to_stop(self.reporter) or Cancelled("rank 0 was told to stop")

    def _forward_backward(self) -> tuple[Tensor, float]:
        """Accumulate this rank's gradients over its micro-batches. Returns its mean loss () and the seconds spent on data."""
        batch = self.config.batch
        losses, data_wait_s = [], 0.0
        if self.parallel.pipeline is not None:
            return staged_step(self.parallel, self.source, self.batches, batch, self.progress.position, self.metrics)
        for index in range(batch.num_micro_batches):
            first = batch.first_sample(self.progress.position, self.mesh.data.rank, index)
            with self.metrics.timed("data_wait") as wait:
                samples = self.batches.take(self.progress.position, index)
            data_wait_s += wait.seconds
            seed_draws(self.mesh.device, seed_of("draws of the model", self.config.seed, first))  # drop path, on any ranks
            divisor = loss_divisor(self.source, batch, self.progress.position, first)
            with self.parallel.no_sync(index < batch.num_micro_batches - 1):
                losses.append(self.graph.forward_backward(samples, divisor, self.metrics, is_first=index == 0))
        return torch.stack(losses).sum(), data_wait_s

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the mean loss, and the family's metrics, over the evaluation samples of all data ranks."""
        model = self.average.best(self.model).eval()
        names = ("loss", *self.config.sizes.metrics)
        totals = torch.zeros(len(names) + 1, dtype=torch.float64, device=self.mesh.device)
        data, batch_size = self.mesh.data, self.config.batch.global_batch_size
        batches = self.source.evaluation_batches(batch_size, self.config.eval_batches, data.rank, data.size)
        for samples in self.parallel.as_many_passes(batches):
            with eagerly() if self.compiling is not None else nullcontext():  # the last batch has a shape of its own
                losses = self.parallel.losses(model, on_device(samples, self.mesh.device))
            values = [{"loss": losses.loss, **losses.metrics}[name] for name in names]
            totals += torch.stack([*(value.double() for value in values), totals.new_ones(())]) * losses.num_targets
        model.train()
        *sums, num_targets = self.mesh.pipeline.sum_(self.mesh.replicas.sum_(totals)).tolist()
        means = {name: total / num_targets for name, total in zip(names, sums, strict=True)}
        measured, tokens = {name: train_reports.finite(value) for name, value in means.items()}, int(num_targets)
        self._tell(EvaluationReport(step=self.progress.step, loss=measured.pop("loss"), tokens=tokens, metrics=measured))
        return means

    def save(self) -> None:
        """Start to write a checkpoint: each rank what it alone holds. The thread that writes waits for the device."""
        self._report(self.log.read_saved())
        progress = SavedProgress(self.progress, self.step_times, self.log.begin_save(), self.num_steps)
        model, optimizer = self.parallel.state_dicts()
        state = {
            "job": trained_job(self.config),
            "model": trained_state(self.model, model),
            "optimizer": optimizer,
            **progress.late(),
            "average": self.average.state_dict(),
            "random": checkpoint.random_state(self.mesh.world),
        }
        self.writer.start(self.progress.step, state, Late(progress.last_loss))

    def _prepare(self, started: StartedModel) -> None:
        """Convert the model, put it on the mesh, and give it the values that it lacks."""
        config, model = self.config, started.model
        for event in started.events:
            self._tell(event)
        add_adapters(model, config.adapter, config.precision, config.seed, self.mesh.device)
        self.flops_per_token = flops_per_token(config.sizes, model, config.sequence_length)
        optimizer = build_optimizer(parameter_groups(model, config.optimizer), config.optimizer, config.gradient_clip)
        options: dict[str, Any] = {"seed": config.seed, "tokens": config.tokens_per_pass, "on_event": self._layer_demoted}
        prepared = prepare(model, optimizer, config.precision, source=started.source, **options)
        started.make_masters(prepared.model, prepared.optimizer)
        attach_adapters(prepared.model)
        assert prepared.optimizer is not None
        self.model, self.optimizer, self.health = prepared.model, prepared.optimizer, prepared.health
        self.conversion = prepared.report
        self.average = MovingAverage(self.model, config.training.ema_decay)
        self.compiling = prepare_steps(self.model, self.optimizer, config.training, self.mesh.device)
        self.parallel = on_mesh(self.model, self.optimizer, self.mesh, config.parallelism)
        started.fill(self.parallel, self.mesh.replicas)
        self.writer.copies.copy_buffers_at_once(self.model)
        self.graph = step_graph_of(config, self.model, self.optimizer, self.health, self.mesh.device)

    def _resume(self, checkpoints: tuple[CheckpointRef, ...]) -> None:
        for ref in checkpoints:
            try:
                state = checkpoint.load_together(self.folder, ref, self.mesh.world, self.mesh.tensor)
            except checkpoint.BadCheckpoint as error:
                message = f"{error}; trying the previous checkpoint"
                self._tell(EventReport(type="checkpoint.rejected", message=message, data={"step": ref.step}))
                continue
            own = self.parallel.own_part(with_frozen(self.model, state["model"]), state["optimizer"])
            resume(self.model, self.optimizer, *own, dtypes=self.parallel.dtypes())
            self.average.load_state_dict(state.get("average", {}))
            self.progress = Progress(**state["progress"])
            self.step_times.resume(state["step_times_s"])
            checkpoint.set_random_state(state["random"], self.mesh.world)
            return

    def _report_start(self) -> None:
        self.metrics.observe_memory(self.progress.memory_bytes)
        share, samples = 1 / self.mesh.world.size, self.config.batch.global_batch_size
        self.metrics.describe_work(rank_share=share, samples_per_step=samples, flops_per_token=self.flops_per_token)
        steps = self.progress.step, self.num_steps
        self._tell(train_reports.started(self.config, self.mesh, self.model, self.conversion, *steps))
        for _ in range(train_reports.count_fallbacks(self.model)[Fallback.DEMOTED]):
            self.metrics.observe_demotion()
        if not self.progress.step:
            known = self.config, self.conversion, self.model, self.mesh.device
            for event in (*train_reports.start_events(*known), *self.graph.start_events()):
                self._tell(event)

    def _is_due(self, every: int) -> bool:
        return self.progress.step == self.num_steps or (every > 0 and self.progress.step % every == 0)

    def _layer_demoted(self, event: LayerDemoted) -> None:
        self.metrics.observe_demotion()
        message = f"layer {event.layer!r} computes in bf16 from step {event.step} on: {event.operand} {event.reason}"
        body = EventReport(type="layer.demoted", message=message, data={"layer": event.layer, "step": event.step})
        self._tell(body, is_sent=self.mesh.stage.is_first)

    def _tell(self, body: ReportBody, at: datetime | None = None, *, is_sent: bool = False) -> None:
        """Update this rank's metrics. Rank 0 also sends the report, since all ranks share its facts. is_sent: so does this."""
        self.metrics.observe(body)
        if self.mesh.reports or is_sent:
            self.reporter.send(body, at=at)
