"""Jobs for the page to show: all states, several families and levels, with curves, logs, checkpoints and failures.

Reports go through the service as a rank's do; nothing writes into its tables.
"""

import math
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from octet.api_schemas import (
    CheckpointReport,
    EvaluationReport,
    EventReport,
    FailureReason,
    FinishedReport,
    JobSpec,
    JobState,
    JobSummary,
    LogReport,
    MeasuredReport,
    PhaseReport,
    PoolConfig,
    StartedReport,
    StepReport,
)
from octet.api_schemas.comparison import ComparisonSpec
from octet.api_schemas.job_plan import JobPlan
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.measured import LayerHealth, MemoryBytes
from octet.service.cluster.fake import FakeLauncher
from octet.service.db.engine import Database
from octet.service.jobs import comparisons, planned
from octet.service.settings import Settings
from octet.service.store.jobs import lock_job
from tests.service.world import Rank, TurnedClock, World
from tests.service.world import step as step_report

POOLS = (
    PoolConfig(name="cpu", node_label=("octet-pool", "cpu"), slots=4),
    PoolConfig(
        name="h100",
        node_label=("octet-pool", "h100"),
        slots=8,
        accelerator="cuda",
        memory_per_device_bytes=80 << 30,
        device="H100 80GB HBM3",
        slot_hour_price=2.5,
    ),
)
SPEC: dict[str, Any] = {
    "name": "gpt-tiny",
    "model": {"preset": "gpt-tiny"},
    "precision": {"level": "O2"},
    "data": {"path": "/data/corpus"},
    "training": {
        "steps": 200,
        "global_batch_size": 16,
        "sequence_length": 256,
        "optimizer": {"learning_rate": 3e-3},
        "eval_every": 25,
        "checkpoint_every": 50,
    },
}
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>'


def stage(folder: Path, *, begin: datetime | None = None) -> World:
    """Make a world without jobs: a new database in a folder, a clock, a fake cluster."""
    clock = TurnedClock()
    clock.moment = begin or datetime.now(UTC) - timedelta(hours=2)
    database = Database(f"sqlite:///{folder / 'octet.db'}", clock)
    database.migrate()
    settings = Settings(data_dir=folder / "data", pools=POOLS, port=0, planner=False)
    return World(database, clock, settings, FakeLauncher(POOLS), JobSpec.model_validate(SPEC))


def submit(world: World, name: str, level: str = "O2", preset: str = "gpt-tiny", **changes: Any) -> str:
    """Submit a job of the stage's spec."""
    return world.submit(
        name=name, precision={"level": level}, model={"preset": preset}, **{"steps": 200, "max_failures": 0} | changes
    )


def foresee(world: World, job_id: str, level: str, **changes: Any) -> JobPlan:
    """Store a plan of about the bytes that gpt-tiny holds at a level, in place of the planner."""
    states = memory_of(level).held
    held = sum(states.values())
    plan = JobPlan(
        asked_level=world.job(job_id).spec.precision.level,
        level=level,  # type: ignore[arg-type]
        verdict="yes",
        memory_per_device_bytes=80 << 30,
        micro_batch_size=16,
        largest_micro_batch=512,
        states=states,
        peak_bytes=3 * held,
        lower_bytes=3 * held,
        upper_bytes=3 * held + 700_000_000,
        planner_version="1",
    ).model_copy(update=changes)
    with world.database.write() as session:
        row = lock_job(session, job_id)
        assert row is not None
        planned.apply(session, row, plan, world.database.now(session))
    return plan


def begin(world: World, job_id: str, *, resumed_from_step: int = 0) -> Rank:
    """Place a job and bring its rank to the first step."""
    world.dispatch()
    rank = world.rank_of(job_id)
    for phase, seconds in (("process_up", 0.8), ("torch_imported", 2.1), ("model_built", 0.9)):
        world.clock.turn(seconds)
        rank.send(PhaseReport(phase=phase))
    rank.send(
        StartedReport(
            resumed_from_step=resumed_from_step,
            node="node-1",
            device="cpu",
            world_size=1,
            num_parameters=858_880,
            num_layers_converted=16,
            num_layers_skipped=2,
        )
    )
    world.clock.turn(0.6)
    rank.send(PhaseReport(phase="first_step"))
    rank.send(MeasuredReport(step=1, memory=memory_of(world.job(job_id).spec.precision.level)))
    return rank


def memory_of(level: str) -> MemoryBytes:
    """Return about the bytes that gpt-tiny holds at a level."""
    share = LEVELS[level].bytes_per_parameter / 16
    fp32 = {"weights": 3_435_520, "gradients": 3_435_520, "exp_avg": 3_435_520, "exp_avg_sq": 3_435_520}
    factors = {"weights": share, "gradients": share, "exp_avg": share**1.5, "exp_avg_sq": share}
    held = {name: round(size * factors[name]) for name, size in fp32.items()} | {"scales": 4_200, "master_weights": 0}
    return MemoryBytes(held=held, fp32=fp32, host=0, peak=None)


def layers(step: int) -> tuple[LayerHealth, ...]:
    """The worst layers of FP8."""
    names = ("blocks.3.mlp.down", "blocks.0.attention.qkv", "blocks.2.mlp.up", "head.proj")
    return tuple(
        LayerHealth(
            layer=name,
            operand=operand,
            step=step,
            amax=1.5 * place + 2.1,
            dequant_scale=0.004,
            overflow_ratio=1e-5 * place,
            underflow_ratio=4e-4 * (5 - place),
            sqnr_db=24.5 + 1.7 * place,
        )
        for place, (name, operand) in enumerate(zip(names, ("grad_output", "input", "weight", "input"), strict=True))
    )


def train(world: World, rank: Rank, steps: Sequence[int], *, seed: int = 0, floor: float = 1.9) -> None:
    """Report steps with a loss that falls, evaluations, checkpoints and a line of log now and then."""
    draw = random.Random(seed + steps[0])
    bodies: list[Any] = []
    for step in steps:
        world.clock.turn(0.25)
        loss = floor + 3.6 * math.exp(-step / 45) + draw.gauss(0, 0.05)
        report = StepReport(
            step=step,
            loss=loss,
            gradient_norm=0.4 + draw.random() / 4,
            learning_rate=3e-3 * min(1, step / 20),
            tokens=4096,
            step_time_s=0.25 + draw.random() / 50,
            data_wait_s=0.004,
        )
        bodies.append(report)
        if step % 25 == 0:
            bodies.append(EvaluationReport(step=step, loss=floor + 0.08 + 3.6 * math.exp(-step / 45), tokens=4096))
        if step % 10 == 0:
            bodies.append(LogReport(level="INFO", message=f"step {step} loss {loss:.4f}"))
        if step % 50 == 0:
            bodies.append(
                CheckpointReport(step=step, name=f"step_{step:010d}", num_bytes=5_324_800, sha256="5" * 64, loss=loss)
            )
        if step % 50 == 0:
            bodies.append(MeasuredReport(step=step, layers=layers(step)))
        if step % 50 == 0 or step == steps[-1]:
            rank.send(*bodies)
            bodies.clear()


def summary(steps: int = 200) -> JobSummary:
    """The result of a job at O2."""
    memory = {
        "weights": 1_830_000,
        "master_weights": 0,
        "gradients": 910_000,
        "exp_avg": 905_000,
        "exp_avg_sq": 1_790_000,
        "scales": 4_200,
        "other": 0,
    }
    return JobSummary(
        steps=steps,
        final_loss=1.94,
        evaluation_loss=2.02,
        evaluation_perplexity=math.exp(2.02),
        tokens=4096 * steps,
        tokens_per_s=15_900,
        train_time_s=0.26 * steps,
        num_parameters=858_880,
        num_converted_parameters=786_432,
        memory_bytes=memory,
        converted_memory_bytes=memory,
        peak_memory_bytes=None,
        data={"bytes": 1e6},
    )


def end(rank: Rank, outcome: str = "succeeded", **words: Any) -> None:
    """Report the end of an attempt."""
    rank.send(FinishedReport.model_validate({"outcome": outcome, **words}))


def furnish(world: World) -> dict[str, str]:
    """Submit jobs of all states; returns their ids by name."""
    jobs: dict[str, str] = {}
    for level, floor in (("fp32", 1.88), ("bf16-amp", 1.885), ("te", 1.89), ("O1", 1.90), ("O2", 1.91), ("O3", 1.95)):
        name = f"gpt-tiny-{level}"
        jobs[name] = submit(world, name, level)
        foresee(world, jobs[name], level)
        rank = begin(world, jobs[name])
        train(world, rank, range(1, 201), seed=len(jobs), floor=floor)
        end(rank, summary=summary())
        world.dispatch()
        world.clock.turn(40)
    jobs["diverged"] = submit(world, "deit-tiny-hot", "O1")
    rank = begin(world, jobs["diverged"])
    train(world, rank, range(1, 41), floor=4)
    rank.send(LogReport(level="ERROR", message=HOSTILE))
    rank.send(EventReport(type="layer.demoted", message=f"layer blocks.3.mlp.down {HOSTILE}", data={"sqnr_db": 11.2}))
    message = "the loss rose from 4.12 to 61.40 in 20 steps"
    end(rank, "failed", reason=FailureReason.DIVERGED, message=message)
    world.dispatch()
    jobs["cancelled"] = submit(world, "swin-sweep-3", "fp16-amp")
    world.cancel(jobs["cancelled"])
    jobs["resumed"] = submit(world, "llama-nightly", "O3-split", max_failures=3)
    rank = begin(world, jobs["resumed"])
    train(world, rank, range(1, 121), seed=7)
    end(rank, "failed", reason=FailureReason.WORKER_LOST, message="rank 0 was killed by signal 9")
    world.dispatch()
    world.clock.turn(30)
    rank = begin(world, jobs["resumed"], resumed_from_step=100)
    train(world, rank, range(101, 131), seed=8)
    jobs["running"] = submit(world, "gpt-on-source-code", "O2", steps=400)
    foresee(world, jobs["running"], "O2", verdict="tight", remedies=("training.fused_loss True",))
    rank = begin(world, jobs["running"])
    train(world, rank, range(1, 151), seed=9)
    jobs["starting"] = submit(world, "roberta-base", "te", workers=2)
    world.dispatch()
    for place in range(3):
        jobs[f"queued-{place}"] = submit(world, f"wide-{place}", "O2-8bit", workers=4)
    world.dispatch()
    return jobs


SHIFT = {"fp32": 0.0, "O1": -0.0004, "O2": 0.02, "noise": 0.0001}
"""The gap of each arm's loss."""
SWEEP = {"training.optimizer.learning_rate": [1e-4, 3e-4, 1e-3], "training.gradient_clip": [None, 1.0]}


def compare(world: World, name: str, **options: Any) -> str:
    """Submit a comparison of the stage's spec."""
    spec = ComparisonSpec.model_validate({"job": SPEC | {"name": name}, "levels": ["fp32", "O1", "O2"], "seeds": 4, **options})
    with world.database.write() as session:
        row, _ = comparisons.submit(session, spec, b"{}", None, "default", world.database.now(session))
        return row.id


def end_children(world: World, most: int, shift: dict[str, float] = SHIFT, failing: str | None = None) -> None:
    """Let children end one after the other, as long as there are some. failing: an arm whose jobs fail."""
    for _ in range(most):
        world.dispatch()
        world.dispatch()
        live = [row.id for row in world.all_jobs() if row.state is JobState.STARTING]
        if not live:
            return
        child = world.job(min(live))
        rank, arm, seed = begin(world, child.id), child.labels["arm"], int(child.labels["seed"])
        draw = random.Random(f"{arm} {seed}")
        for step in range(25, 201, 25):
            share = shift.get(arm, 0.001) * step / 200 + draw.gauss(0, 0.00005)
            loss = (2.0 + 3.6 * math.exp(-step / 45) + seed / 100) * (1 + share)
            evaluation = EvaluationReport(step=step, loss=loss, tokens=4096, metrics={"accuracy": 0.4 - share})
            rank.send(step_report(step, loss), evaluation)
        if arm == failing:
            end(rank, "failed", reason=FailureReason.WORKER_ERROR, message=HOSTILE)
        else:
            memory = memory_of(child.spec.precision.level).held
            end(rank, summary=summary().model_copy(update={"evaluation_loss": loss, "memory_bytes": memory}))
        world.launcher.exit(rank.ref)
        world.dispatch()
        world.turn(20)


def furnish_comparisons(world: World) -> dict[str, str]:
    """Submit comparisons of all states; returns their ids by name."""
    found = {"finished": compare(world, "which-level")}
    end_children(world, 99)
    found["failing"] = compare(world, "with-a-failing-arm")
    end_children(world, 99, failing="O1")
    found["wild"] = compare(world, "too-wild")
    end_children(world, 99, SHIFT | {"noise": 0.03})
    found["baseline"] = compare(world, "baseline-fails")
    end_children(world, 99, failing="fp32")
    found["paused"] = compare(world, "paused")
    with world.database.write() as session:
        comparisons.pause(session, found["paused"], world.database.now(session), None)
    found["sweep"] = compare(world, "sweep", levels=[], vary=SWEEP, tolerance=0.05)
    end_children(world, 12)
    with world.database.write() as session:
        comparisons.cancel(session, found["sweep"], world.database.now(session), None)
    world.dispatch()
    found["running"] = compare(world, "still-running")
    end_children(world, 7)
    world.dispatch()
    live = [row.id for row in world.all_jobs() if row.state is JobState.STARTING]
    train(world, begin(world, live[0]), range(1, 121))
    return found
