"""One rank, from its order to its last report. Under Ray, the rank's actor calls `run_rank`. Without a service:

    python -m octet.worker job.yaml --job-dir runs/first                          one rank
    torchrun --nproc-per-node 2 -m octet.worker job.yaml --job-dir runs/first     several; with --resume also after a death

torch is imported inside the functions, because it takes seconds and the control plane should hear of the process earlier.
"""

import argparse
import hashlib
import json
import logging
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octet.api_schemas import (
    CheckpointRef,
    FailureReason,
    FinishedReport,
    JobSpec,
    JobSummary,
    LaunchOrder,
    PhaseReport,
    PoolConfig,
    explain,
)
from octet.api_schemas.data import ANY_FILE, Files
from octet.api_schemas.tracking import TrackersSpec
from octet.worker.common.config import ALLOCATOR, RankEnv, TrainConfig, resolve
from octet.worker.common.errors import (
    Cancelled,
    Fenced,
    InvalidConfig,
    LeaseLost,
    RankError,
    WrongNode,
    message_of_rank,
    reason_of,
)
from octet.worker.metrics.exporter import exported
from octet.worker.metrics.table import Metrics
from octet.worker.reporting.reporter import HttpReporter, LogReporter, Reporter, ReportHandler, StepLines
from octet.worker.reporting.trackers import check_packages, make_trackers
from octet.worker.reporting.trackers.feed import TrackedReporter, TrackedRun

if TYPE_CHECKING:
    import torch

TRACE_VARIABLE = "TRACEPARENT"
"""The name under which OpenTelemetry passes on a span to a process."""
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """The end of a rank. `finished` is None if it may not report any more (lease lost, or fenced)."""

    finished: FinishedReport | None
    message: str

    @property
    def succeeded(self) -> bool:
        return self.finished is not None and self.finished.outcome == "succeeded"


def run_rank(order: LaunchOrder, env: RankEnv, placed_at: datetime) -> Outcome:
    """Run one rank of an attempt and report to the control plane."""
    enter_trace(order.traceparent)
    metrics = Metrics()
    with HttpReporter(order, env.rank) as reporter, exported(metrics, reporter.send, order.report_url):
        handler = ReportHandler(reporter)
        _log_to(handler)
        try:
            if env.reports and order.traceparent is not None:
                logger.info("traceparent: %s", order.traceparent)
            if env.reports:
                reporter.send(PhaseReport(phase="placed"), at=placed_at)
                reporter.send(PhaseReport(phase="process_up"))
            run = Run(
                StepLines(reporter), metrics, Path(order.job_dir), order.checkpoints, order.pool, order.files, order.trackers
            )
            outcome = _track(order.job_id, order.spec, env, run)
            if outcome.succeeded and env.reports:
                logger.info("%s", outcome.message)
            if outcome.finished is not None and is_reported(outcome.finished, env):
                reporter.send(outcome.finished)
            return outcome
        finally:
            logging.getLogger().removeHandler(handler)


def is_reported(finished: FinishedReport, env: RankEnv) -> bool:
    """Return True if this rank reports the attempt's end itself.

    If others of several nodes are gone it does not: the supervisor finds out if they died or their node did, which Ray knows.
    """
    if finished.outcome != "failed":
        return env.reports
    return finished.reason is not FailureReason.WORKER_LOST or env.num_nodes == 1


def enter_trace(traceparent: str | None) -> None:
    """Put the job's span into the environment, where instruments look for their parent; a server's own is none of the job."""
    os.environ.pop(TRACE_VARIABLE, None)
    if traceparent is not None:
        os.environ[TRACE_VARIABLE] = traceparent


@dataclass(frozen=True)
class Run:
    """The parts that a rank is given in addition to its spec and environment. files: those that it may read."""

    reporter: Reporter
    metrics: Metrics
    job_dir: Path
    checkpoints: tuple[CheckpointRef, ...] = ()
    pool: PoolConfig | None = None
    files: Files = ANY_FILE
    trackers: TrackersSpec = field(default_factory=TrackersSpec)


def _track(run_id: str, spec: JobSpec, env: RankEnv, run: Run) -> Outcome:
    """Train, while trackers get what rank 0 reports. run_id: the same in all attempts of the job."""
    if not env.reports or not run.trackers.kinds:
        return _train(spec, env, run)
    tracked = TrackedRun.of(run_id, spec, run.job_dir / "trackers")
    reporter = TrackedReporter(run.reporter, make_trackers(run.trackers), tracked)
    outcome = _train(spec, env, replace(run, reporter=reporter))
    reporter.close(outcome.finished)
    return outcome


def _train(spec: JobSpec, env: RankEnv, run: Run) -> Outcome:
    """Train, and return how it ended. This is the only place that turns errors into outcomes."""
    try:
        if env.reports:
            check_packages(run.trackers)
        from octet.worker.mesh import Mesh
        from octet.worker.metrics.device import bf16_peak, device_readings
        from octet.worker.train.loop import Trainer
        from octet.worker.train.passes import attention_kernel

        if env.reports:
            run.reporter.send(PhaseReport(phase="torch_imported"))
        with ExitStack() as stack:
            device = rank_device(env, run.pool)
            run.metrics.describe_device(device_readings(device), bf16_peak(device))
            try:
                config = resolve(spec, env, run.files)
            except ValueError as error:
                raise InvalidConfig(str(error)) from error
            for line in run_lines(config, device):
                logger.info("%s", line)
            stack.enter_context(attention_kernel(config.training.attention_kernel, device))
            mesh = stack.enter_context(Mesh(env, device, config.layout, config.training.collective_timeout_s))
            summary = Trainer(config, mesh, run.reporter, run.job_dir, run.metrics).run(run.checkpoints)
        return Outcome(FinishedReport(outcome="succeeded", summary=summary), _describe(summary))
    except Cancelled as stop:
        return Outcome(FinishedReport(outcome="cancelled", message=str(stop)), str(stop))
    except (LeaseLost, Fenced) as stop:
        logger.warning("stopping: %s", stop)
        return Outcome(None, str(stop))
    except Exception as error:
        message = message_of_rank(error, env.rank, env.world_size)
        logger.error("%s", message, exc_info=None if isinstance(error, RankError) else error)
        return Outcome(FinishedReport(outcome="failed", reason=reason_of(error), message=message[:16_384]), message)


def rank_device(env: RankEnv, pool: PoolConfig | None) -> "torch.device":
    """Return this rank's device after checking that it is what the pool promises. Raises WrongNode.

    Segments of the memory of a CUDA device grow from now on, unless the environment sets up torch's allocator.
    """
    import torch

    torch.set_num_threads(env.num_threads)
    if env.accelerator == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        from octet.worker.metrics.driver import why_no_device

        raise WrongNode(f"the pool promises a CUDA device: {why_no_device()}")
    # The largest models that benchmarks/gpu/largest.py finds fit with segments that grow. torch's own default leaves gaps.
    # Not by the environment: a rank has torch imported already, and a warm one had it before it had its environment.
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        from octet.worker.kernels.torch_private import set_allocator

        set_allocator(ALLOCATOR)
    device = torch.device("cuda", env.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    needed = pool.min_compute_capability if pool else None
    found = torch.cuda.get_device_capability(device)
    if needed is not None and found < needed:
        raise WrongNode(
            f"the pool promises compute capability {needed[0]}.{needed[1]} or later; {torch.cuda.get_device_name(device)} "
            f"has {found[0]}.{found[1]}. Correct the node's label or the pool."
        )
    return device


def run_lines(config: TrainConfig, device: "torch.device") -> tuple[str, ...]:
    """Return what a rank logs first: on rank 0 the run in a few lines, on others their place in it."""
    env, batch, training, layout = config.env, config.batch, config.training, config.layout
    if not env.reports:
        return (f"rank {env.rank} of {env.world_size} on {device}",)
    counted = config.sizes.num_parameters
    parameters = "parameters counted when it is built" if counted is None else f"{counted:,} parameters"
    recipe = config.precision.resolved_recipe
    length = f"{training.steps:,} steps" if training.steps is not None else f"{training.epochs:g} epochs"
    degrees = {"data": layout.data, "tensor": layout.tensor, "context": layout.context, "pipeline": layout.pipeline}
    divided = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    zero = f", ZeRO {config.parallelism.zero_stage}" if config.parallelism.zero_stage else ""
    return (
        f"model: {config.model.title} ({config.model.family}), {parameters}{', with adapters' if config.adapter else ''}",
        f"level: {config.precision.level}{'' if recipe is None else f': {recipe}'}",
        f"data: {config.data.source}, {config.data.path}",
        f"batch: {batch.global_batch_size} samples of {config.sequence_length} tokens a step, in {batch.num_micro_batches} "
        f"micro-batches of {batch.micro_batch_size} on each of {layout.data} data ranks",
        f"steps: {length}, {config.optimizer.name} at learning rate {config.optimizer.learning_rate:g}, "
        f"{config.schedule.name}, seed {config.seed}",
        f"attention: {'FlashAttention-3' if training.attention_kernel == 'fa3' else 'what torch chooses'}",
        f"ranks: {env.world_size}{f' ({divided})' if divided else ''}{zero}, this one on {device}",
    )


def _describe(summary: JobSummary) -> str:
    return (
        f"finished {summary.steps} steps: training loss {summary.final_loss:.4f}, evaluation loss "
        f"{summary.evaluation_loss:.4f}, {summary.tokens_per_s:.0f} tokens/s"
    )


def _log_to(handler: logging.Handler) -> None:
    handler.setFormatter(logging.Formatter("%(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)


# Without a service: torchrun, or one process alone.


def main(arguments: list[str] | None = None) -> int:
    """Run a spec file as the rank of this process. Exit status: 0 succeeded, 1 failed, 2 the spec was refused."""
    parser = argparse.ArgumentParser(prog="python -m octet.worker", description="Train a job spec without a service.")
    parser.add_argument("spec", type=Path, help="job spec, YAML or JSON; the number of ranks overrides resources.workers")
    parser.add_argument("--job-dir", type=Path, required=True, help="folder for checkpoints and the summary")
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per rank")
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint in the folder")
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.Formatter.converter = time.gmtime
    env = _env_from_torchrun(options.accelerator, options.threads)
    spec = _read_spec(options.spec, env)
    if spec is None:
        return 2
    checkpoints = _found(options.job_dir) if options.resume else ()
    reporter = LogReporter(options.job_dir / "checkpoints", spec.training.keep)
    # Without a service a folder is a job.
    folder_hash = hashlib.sha256(str(options.job_dir.resolve()).encode()).hexdigest()[:12]
    run = Run(reporter, Metrics(), options.job_dir, checkpoints, trackers=spec.trackers)
    outcome = _track(f"{spec.name}-{folder_hash}", spec, env, run)
    logger.info("%s", outcome.message)
    if outcome.succeeded and env.reports:
        assert outcome.finished is not None
        summary: Any = outcome.finished.summary
        options.job_dir.mkdir(parents=True, exist_ok=True)
        (options.job_dir / "summary.json").write_text(summary.model_dump_json(indent=1))
    return 0 if outcome.succeeded else 1


def _found(job_dir: Path) -> tuple[CheckpointRef, ...]:
    from octet.worker.checkpoint import complete_in

    return complete_in(job_dir / "checkpoints")


def _read_spec(path: Path, env: RankEnv) -> JobSpec | None:
    """Read a spec file for a world of this size. Returns None, after logging the reasons, if the spec is refused."""
    from pydantic import ValidationError

    try:
        document = _read_document(path)
    except (OSError, ValueError) as error:
        logger.error("cannot read the job spec %s: %s", path, error)
        return None
    resources = document.get("resources") or {}
    if isinstance(resources, dict):
        asked = resources.get("workers", 1)
        if env.reports and asked != env.world_size:
            logger.info("the spec asks for resources.workers %s; running with %d ranks", asked, env.world_size)
        document["resources"] = resources | {"workers": env.world_size, "min_workers": None}
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        for violation in explain(error, JobSpec) if env.reports else ():
            logger.error("%s: got %s; allowed: %s. %s", *violation.model_dump().values())
        return None


def _read_document(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML or JSON file. Raises ValueError with what is wrong with the file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in {".yaml", ".yml"}:
        import yaml

        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"not YAML: {error}") from error
    else:
        document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError(f"a job spec is a mapping of fields; got {type(document).__name__}")
    return document


def _env_from_torchrun(accelerator: str, num_threads: int) -> RankEnv:
    """Read torchrun's environment variables. Without them this process is the only rank."""
    return RankEnv(
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        master_address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(os.environ.get("MASTER_PORT", "0")),
        accelerator=accelerator,
        num_threads=num_threads,
    )
