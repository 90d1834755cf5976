"""The training loop of one rank, top to bottom.

It runs the same under Ray, under torchrun and alone.

`Trainer.run` is the loop. Losses are means over the global batch, in nats. A checkpoint holds all
that the next step depends on, so a resumed run is bit-identical. On an accelerator the host never
waits in a step: a thread reads batches ahead; losses, norms and samples are read when the device
has computed them (`log.py`). So a divergence takes effect an interval late.
"""

import logging
import math
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from octet.api_schemas import (
    CheckpointRef,
    CheckpointReport,
    EvaluationReport,
    EventReport,
    JobSummary,
    PhaseReport,
    ReportBody,
    check_schedule,
)
from octet.worker.checkpoint import CheckpointWriter
from octet.worker.common.config import TrainConfig
from octet.worker.common.errors import Cancelled, InvalidConfig, Stopped
from octet.worker.data import Source, open_source
from octet.worker.data.prefetch import Prefetcher, on_device, pinned
from octet.worker.fp8.accelerator import is_accelerator
from octet.worker.mesh import Mesh
from octet.worker.metrics.readback import DeferredValue, Mark
from octet.worker.metrics.table import Metrics
from octet.worker.optim.schedule import learning_rate_at, set_learning_rate
from octet.worker.prepare.blocks import eagerly, is_compiling_fault
from octet.worker.pretrained.job_export import JobExporter
from octet.worker.reporting.reporter import Reporter, order_to_stop
from octet.worker.train import reports as train_reports
from octet.worker.train.build import JobModel, build
from octet.worker.train.log import Reading, StepLog, TakenStep, now
from octet.worker.train.passes import deterministic, forward_backward
from octet.worker.train.progress import Progress, StepTimes
from octet.worker.train.resume import SavedProgress, load_newest, state_of_run

logger = logging.getLogger(__name__)


class Trainer:
    """One rank's share of one job."""

    # Given by the caller
    config: TrainConfig
    mesh: Mesh
    reporter: Reporter
    metrics: Metrics
    folder: Path

    # The data, the model, and what trains it
    source: Source
    batches: Prefetcher
    num_steps: int
    job: JobModel
    model: nn.Module
    optimizer: torch.optim.Optimizer

    # What follows the run
    progress: Progress
    worst_layers: train_reports.WorstLayers
    expert_loads: Callable[[], list[tuple[float, float]]]
    step_times: StepTimes
    log: StepLog
    writer: CheckpointWriter
    exporter: JobExporter | None = None
    """On the rank that writes the job's exports."""
    stop: Stopped | None = None
    """Why the run ends after this step, and a checkpoint of it."""
    is_save_due = False
    """True once it is time for a checkpoint, until it begins."""
    saved_step = 0
    saved_at: float
    """When the newest checkpoint began, or the run; by `time.monotonic`."""

    def __init__(
        self, config: TrainConfig, mesh: Mesh, reporter: Reporter, job_dir: Path, metrics: Metrics | None = None
    ) -> None:
        self.config, self.mesh, self.reporter = config, mesh, reporter
        self.metrics = metrics or Metrics()
        self.folder = job_dir / "checkpoints"

        training, files = config.training, config.readable_files
        self.source = open_source(
            config.data, config.sequence_length, config.seed, files, config.sizes.takes, training.label_smoothing
        )
        self.batches = Prefetcher(self.source, config.batch, mesh.data.rank, mesh.device)
        self.num_steps = training.steps_for(self.source.num_train_samples)
        if conflict := check_schedule(training.in_steps(self.num_steps)):
            raise InvalidConfig(str(conflict))

        self.writer = CheckpointWriter(self.folder, mesh.world, self._saved)
        self.job = build(config, mesh, self.writer.copies, self._tell, self.metrics)
        self.model, self.optimizer = self.job.model, self.job.optimizer
        if config.spec.export is not None and mesh.world.is_first:
            self.exporter = JobExporter(config, config.spec.export, job_dir, self.source, reporter, self._tell)

        self.progress = Progress()
        self.worst_layers = train_reports.WorstLayers()
        self.expert_loads = train_reports.expert_loads_of(self.model)
        self.step_times = StepTimes(num_skipped=self.job.num_warm_up_steps)
        is_late = is_accelerator(mesh.device)
        self.log = StepLog(mesh, is_late=is_late, is_writing=lambda: self.writer.is_writing, is_save_due=self._is_time_to_save)
        self.saved_at = time.monotonic()
        self._tell(PhaseReport(phase="model_built"))

    def run(self, checkpoints: tuple[CheckpointRef, ...] = ()) -> JobSummary:
        """Train to the last step, starting from the newest of `checkpoints` that passes its check."""
        with (
            closing(self.batches),
            self.writer,
            deterministic(self.config.training.deterministic),
            closing(self.job.graph),
            self.job.graph.stream(),
        ):
            self._start(checkpoints)
            evaluation = self._take_steps()
            self.writer.finish()
            if self.exporter is not None:
                self.exporter.finish(self.progress.step, self.progress.best_saved_step)
            facts, sent_bytes = self.source.facts, self.mesh.sent_bytes
            summary = train_reports.summarize(
                self.config, self.model, self.progress, self.step_times, evaluation, facts, sent_bytes
            )
            if self.exporter is None:
                return summary
            metrics = {**summary.evaluation_metrics, **self.exporter.scores}
            return summary.model_copy(update={"mismatch": self.exporter.newest, "evaluation_metrics": metrics})

    def _start(self, checkpoints: tuple[CheckpointRef, ...]) -> None:
        """Load the newest checkpoint, if there is one, and report where the run begins."""
        level = self.config.precision.level
        self.progress = load_newest(self.job, self.mesh, self.folder, checkpoints, self.step_times, self._tell, level=level)
        if self.job.compiling is not None and self.job.health is not None:
            self.job.health.rehearse()
        self.metrics.observe_memory(self.progress.memory_bytes)
        self.metrics.describe_work(
            rank_share=1 / self.mesh.world.size,
            samples_per_step=self.config.batch.global_batch_size,
            flops_per_token=self.job.flops_per_token,
        )
        self._tell(train_reports.started(self.config, self.mesh, self.job, self.progress.step, self.num_steps))
        self.metrics.observe_demotions(train_reports.num_demoted(self.model))
        if self.exporter is not None:  # an attempt may have ended before it exported one
            self.exporter.add_all(ref.step for ref in checkpoints if ref.step <= self.progress.step)
        if not self.progress.step:
            for event in train_reports.start_events(self.config, self.job, self.mesh.device):
                self._tell(event)

    def _take_steps(self) -> dict[str, float]:
        """Take all steps that are left, with the evaluations and checkpoints between them.

        Returns the last evaluation.
        """
        started_at_step = self.progress.step
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
            self.is_save_due |= self._is_due(self.config.checkpoint_every)
            if self.is_save_due and self._is_worth_saving():
                with self.metrics.timed("checkpoint"):
                    self.save()
            if self.stop is not None and self.progress.step < self.num_steps:
                self._save_and_stop(self.stop)
            if self.exporter is not None:
                self.exporter.export_pending()
        self._report(self.log.flush())
        return evaluation or self.evaluate()

    def step(self) -> None:
        """Take one optimizer step over the global batch.

        Its loss is reported when the log has read it.
        """
        began = Mark(self.mesh.device)
        config, job = self.config, self.job
        learning_rate = learning_rate_at(self.progress.step, config.optimizer.learning_rate, config.schedule, self.num_steps)
        set_learning_rate(self.optimizer, learning_rate)
        job.graph.begin_step()
        if config.training.gradient_release:  # which steps parameters in the backward pass
            self.writer.before_change()
        with self.metrics.timed("forward_backward"):
            rank_loss, data_wait_s = forward_backward(
                job, self.batches, config, self.progress.position, self.mesh, self.metrics
            )
        with self.metrics.timed("communication"):
            job.graph.exchange(job.parallel.synchronize)
        with self.metrics.timed("optimizer"):
            self.writer.before_change()
            norm = job.graph.update(job.parallel.clip_grad_norm_, config.gradient_clip or math.inf)
            if job.parallel.publishes:
                job.graph.publish(job.parallel.publish)
            job.average.update(self.model)
        if not self.progress.memory_bytes:  # every state exists now, and the gradients are still alive
            self._tell(train_reports.count_memory(self.progress, self.model, self.optimizer, job.average))
            self.metrics.observe_memory(self.progress.memory_bytes)
        self.optimizer.zero_grad(set_to_none=True)

        self.progress.step += 1
        self.progress.position += config.batch.global_batch_size
        ended = Mark(self.mesh.device)
        self.log.add(TakenStep(self.progress.step, learning_rate, data_wait_s, began, ended, now()), rank_loss, norm)
        for report in (*(job.compiling.after_step() if job.compiling is not None else ()), *job.graph.after_step()):
            self._tell(report, is_sent=self.mesh.stage.is_first and is_compiling_fault(report))
        stop = order_to_stop(self.reporter)
        if self.log.is_due or (stop is not None and self.mesh.world.size == 1):
            self._report(self.log.end_interval(stop), stop)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the mean loss, and the family's metrics, over all ranks' evaluation samples."""
        model = self.job.average.best(self.model).eval()
        names = ("loss", *self.config.sizes.metrics)
        totals = torch.zeros(len(names) + 1, dtype=torch.float64, device=self.mesh.device)
        data, batch_size = self.mesh.data, self.config.batch.global_batch_size
        batches = self.source.evaluation_batches(batch_size, self.config.eval_batches, data.rank, data.size)
        for samples in self.job.parallel.as_many_passes(pinned(batch, self.mesh.device) for batch in batches):
            with eagerly() if self.job.compiling is not None else nullcontext():  # the last batch has a shape of its own
                losses = self.job.parallel.losses(model, on_device(samples, self.mesh.device))
            values = [{"loss": losses.loss, **losses.metrics}[name] for name in names]
            totals += torch.stack([*(value.double() for value in values), totals.new_ones(())]) * losses.num_targets
        model.train()
        *sums, num_targets = self.mesh.pipeline.sum_(self.mesh.replicas.sum_(totals)).tolist()
        means = {name: total / num_targets for name, total in zip(names, sums, strict=True)}
        measured, tokens = {name: train_reports.finite(value) for name, value in means.items()}, int(num_targets)
        self._tell(EvaluationReport(step=self.progress.step, loss=measured.pop("loss"), tokens=tokens, metrics=measured))
        self.progress.evaluated = means | {"step": self.progress.step}
        if self.progress.step == self.num_steps:
            self.progress.check_end(means["loss"], stops=self._stops)
        return means

    def save(self) -> None:
        """Start to write a checkpoint: each rank what it alone holds.

        The thread that writes waits for the device.
        """
        self._report(self.log.read_saved())
        self.progress.note_saved()
        unread = self.log.begin_save()
        progress = SavedProgress(self.progress, self.step_times, unread, self.num_steps, stops=self._stops)
        state = state_of_run(self.job, self.config, self.mesh, progress)
        self.writer.start(self.progress.step, state, DeferredValue(progress.last_loss))
        self.is_save_due, self.saved_step, self.saved_at = False, self.progress.step, time.monotonic()

    def _saved(self, checkpoint: CheckpointReport) -> None:
        """Report a complete checkpoint, which may be exported after this step."""
        self._tell(checkpoint)
        if self.exporter is not None:
            self.exporter.add_all([checkpoint.step])

    @property
    def _stops(self) -> bool:
        return self.config.training.on_divergence == "stop"

    def _is_worth_saving(self) -> bool:
        """Return False while the loss is off and may stop the run, whose newest checkpoint is then from before it."""
        return not self._stops or self.progress.is_sound or self.progress.step == self.num_steps

    def _is_time_to_save(self) -> bool:
        minutes = self.config.training.checkpoint_every_minutes
        return minutes > 0 and time.monotonic() - self.saved_at >= 60 * minutes

    def _is_due(self, every: int) -> bool:
        return self.progress.step == self.num_steps or (every > 0 and self.progress.step % every == 0)

    def _report(self, reading: Reading, stop: Stopped | None = None) -> None:
        """Report the steps that were read.

        Raises what stops the run: a rank's order to stop, a loss that makes no sense, or too few layers in FP8. Notes an order
        that lets the ranks save a checkpoint first.
        """
        is_stopping = reading.num_stopping > 0 or (stop is not None and self.mesh.world.size == 1)
        steps = (*reading.steps, *self.log.flush().steps) if is_stopping else reading.steps
        self.metrics.observe_wire(self.mesh.sent_bytes)
        self.metrics.observe_busy(self.mesh.waits.last_busy_s)
        self.metrics.observe_experts(self.expert_loads())
        if self.job.health is not None:
            self.metrics.observe_fp8(self.job.health.samples)
            if worst := self.worst_layers.new(self.progress.step, self.job.health.samples):
                self._tell(worst)
        for step in steps:
            self.progress.train_time_s += step.step_time_s
            self.step_times.add(step.step_time_s)
            self._tell(train_reports.step_report(step, self.config.tokens_per_step), at=step.at)
            if warning := self.progress.note_loss(step.step, step.loss, self.num_steps, stops=self._stops):
                loss = train_reports.finite(step.loss)
                self._tell(EventReport(type="training.diverging", message=warning, data={"loss": loss}))
        if self.job.health is not None:
            train_reports.check_limits(self.config.precision, self.mesh, self.job)
        if straggler := self.mesh.new_straggler():
            self._tell(train_reports.straggler_event(straggler))
        self.is_save_due |= reading.is_save_due
        if reading.all_written:
            self.writer.finish()
        if is_stopping:
            stop = stop or order_to_stop(self.reporter) or Cancelled("rank 0 has to stop", saves=True)
            if not stop.saves or reading.num_saving < reading.num_stopping:
                raise stop
            self.stop = stop

    def _save_and_stop(self, stop: Stopped) -> NoReturn:
        """Complete a checkpoint of this step, unless it has one, and raise."""
        if self.saved_step != self.progress.step:
            with self.metrics.timed("checkpoint"):
                self.save()
        self.writer.finish()
        raise stop

    def _tell(self, body: ReportBody, at: datetime | None = None, *, is_sent: bool = False) -> None:
        """Update this rank's metrics.

        Rank 0 also sends the report, since all ranks share its facts. is_sent: so does this.
        """
        self.metrics.observe(body)
        if self.mesh.reports or is_sent:
            self.reporter.send(body, at=at)
