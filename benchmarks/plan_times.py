"""Time plans as `POST /v1/plans` answers them: from a planner whose process has not started, and from one that runs.

    python -m benchmarks.plan_times [--rounds 3] [--write]

No job repeats another's trace: those of the first plans have other lengths of sequences. "Cold" holds the start of the
process, which warms itself before the plan that is next and not timed. "Asked" is the job's own level, which comes first: its
peak, and then the largest micro-batch. Of the rest the last peak is timed; what is not there within the deadline of a plan is
asked for again.
"""

import argparse
import statistics
import time
from typing import Any

from benchmarks.figures import Figure, add_write_option, show
from octet.api_schemas import JobSpec
from octet.api_schemas.levels import LEVELS
from octet.api_schemas.plan import Plan, PlanRequest, PlanRow
from octet.service.jobs.planning import Planning
from octet.service.settings import Settings

JOBS: dict[str, dict[str, Any]] = {
    "Llama 8 B, ZeRO 3 on 8 ranks": {
        "model": {"preset": "llama-8b"},
        "training": {"sequence_length": 4096, "global_batch_size": 16, "micro_batch_size": 1},
        "resources": {"workers": 8},
        "parallelism": {"zero_stage": 3},
    },
    "GPT 175 B, tensor 8 × pipeline 8": {
        "model": {"preset": "gpt-175b"},
        "training": {"sequence_length": 2048, "global_batch_size": 16, "micro_batch_size": 1},
        "resources": {"workers": 64},
        "parallelism": {"tensor": 8, "pipeline": 8},
    },
}


def job_of(name: str, shorter: int = 1) -> JobSpec:
    """Return a job of the table at O2, which no preset's peaks answer. shorter: divides the length of its sequences."""
    spec = {"name": "planned", "precision": {"level": "O2"}, "data": {"source": "tokens", "path": "/data"}, **JOBS[name]}
    training = {"steps": 100} | spec["training"]
    training["sequence_length"] //= shorter
    return JobSpec.model_validate(spec | {"training": training})


def timed(planning: Planning, request: PlanRequest) -> tuple[float, float]:
    """Return the seconds until all peaks that were asked for are known, and until all is, asking again as reasons say."""
    asked = tuple(LEVELS) if request.peaks == "all" else (request.job.precision.level,)
    began, known = time.perf_counter(), list[float]()

    def rows_of(plan: Plan) -> list[PlanRow]:
        return [row for row in plan.rows if row.level in asked and row.possible]

    def note(plan: Plan) -> None:
        if all(row.peak_bytes is not None for row in rows_of(plan)):
            known.append(time.perf_counter() - began)

    while True:
        plan = planning.plan(request, note).result()
        note(plan)
        missing = [row for row in rows_of(plan) if row.reason is not None]
        if not missing:
            return known[0], time.perf_counter() - began
        if not all(str(row.reason).endswith("ask again later") for row in missing):
            raise RuntimeError(f"no peak: {missing}")


def measure(name: str) -> dict[str, float]:
    """Plan a job with a process of its own; returns seconds by what was planned."""
    planning = Planning(Settings())
    try:
        cold, cold_all = timed(planning, PlanRequest(job=job_of(name, shorter=2), peaks="own"))
        timed(planning, PlanRequest(job=job_of(name, shorter=4), peaks="own"))
        warm, warm_all = timed(planning, PlanRequest(job=job_of(name), peaks="own"))
        others, _ = timed(planning, PlanRequest(job=job_of(name)))
        return {
            "asked level, cold": cold,
            "asked level with its largest micro-batch, cold": cold_all,
            "asked level, warm": warm,
            "asked level with its largest micro-batch, warm": warm_all,
            f"the other {len(LEVELS) - 1} levels, warm": others,
        }
    finally:
        planning.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_times", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    add_write_option(parser)
    options = parser.parse_args()
    goals = {"asked level, cold": "<= 10", "asked level, warm": "<= 2"}
    figures = []
    for name in JOBS:
        rounds = [measure(name) for _ in range(options.rounds)]
        for what in rounds[0]:
            found = [each[what] for each in rounds]
            figures.append(
                Figure(
                    f"plan: {name}: {what} (s)",
                    f"{statistics.median(found):.1f}",
                    f"{min(found):.1f} to {max(found):.1f}",
                    goals.get(what, ""),
                )
            )
    show(figures, "benchmarks.plan_times", options.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
