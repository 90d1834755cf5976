"""The command that plans a job: `octet plan`, by a server or without one."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Annotated, get_args

import typer
from rich.live import Live

from octet.api_schemas.devices import DEVICES
from octet.api_schemas.plan import Candidate as PlanCandidate
from octet.api_schemas.plan import (
    Plan,
    PlanRequest,
    PlanRow,
    being_traced,
    candidates,
    changes_of,
    needs_changes,
    plan_of,
    rows_of,
    traces_of,
)
from octet.api_schemas.precision import LevelName
from octet.api_schemas.resources import PoolConfig
from octet.client import render
from octet.client.cli.options import DEFAULT_URL, AsJson, Commands, JobFile, Settings, Url, connect
from octet.client.job_file import apply_settings, check_spec, load_job_file
from octet.client.planner import trace_here
from octet.client.terminal import Terminal


def plan(
    file: JobFile,
    levels: Annotated[str | None, typer.Option("--levels", help="Levels to compare, as O2,O3. Default: all.")] = None,
    settings: Settings = None,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no server; peaks need octet-fp8[worker] here.")] = False,
    memory_gb: Annotated[
        float | None, typer.Option("--memory-gb", min=0.001, help="With --offline: memory of a device, in 10^9 bytes.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="With --memory-gb: the GPU, as 'H100 SXM5', for the least time of a step.")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Predict the bytes of a job at each level, the pools that it fits, and what would make it fit."""
    if memory_gb is not None and not offline:
        raise typer.BadParameter("a server knows its pools' memory; allowed: with --offline", param_hint="--memory-gb")
    if device is not None and (memory_gb is None or device not in DEVICES):
        allowed = f"with --memory-gb, one of {', '.join(DEVICES)}"
        raise typer.BadParameter(f"got {device}; allowed: {allowed}", param_hint="--device")
    document = load_job_file(file)
    apply_settings(document, settings or [])
    spec, terminal = check_spec(document, file), Terminal()
    request = PlanRequest(job=spec, levels=_levels(levels))
    with nullcontext() if offline else connect(url) as client:
        plans = _planned_here(request, memory_gb, device) if client is None else client.plans(spec, request.levels)
        if terminal.is_live and not as_json:
            with Live(console=terminal.out) as live:
                for known in plans:
                    live.update(render.plan_details(known, spec.precision.level))
            return
        with terminal.spinner_on_stderr("tracing"):
            *_, found = plans
    terminal.show_json(found) if as_json else terminal.show(render.plan_details(found, spec.precision.level))


def _levels(text: str | None) -> tuple[LevelName, ...]:
    names = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    known: tuple[LevelName, ...] = get_args(LevelName)
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"got {unknown[0]}; allowed: {', '.join(known)}", param_hint="--levels")
    return tuple(name for name in known if name in names)


def _planned_here(request: PlanRequest, memory_gb: float | None, device: str | None) -> Iterator[Plan]:
    """Plan without a server: yield the plan as far as it is known, and again with each peak."""
    job, pools = request.job, []
    if memory_gb is not None:
        memory = round(memory_gb * 1e9)
        pool = job.resources.pool
        pools = [
            PoolConfig(
                name=pool,
                node_label=("pool", pool),
                slots=job.resources.workers,
                accelerator="cuda",
                memory_per_device_bytes=memory,
                device=device,
            )
        ]
    missing = []
    if memory_gb is None:
        missing.append("No memory is stated: set --memory-gb to see if the job fits.")
    if device is None:
        missing.append("No device is named: set --memory-gb and --device to see times.")
    rows: list[PlanRow] = []
    for rows in _rows(candidates(request), pools, job.precision.level):
        yield plan_of(job, rows, (), missing)
    if needs_changes(job, rows):
        *_, changes = _rows(changes_of(job), pools)
        yield plan_of(job, rows, changes, missing)


def _rows(found: Sequence[PlanCandidate], pools: Sequence[PoolConfig], first: str | None = None) -> Iterator[list[PlanRow]]:
    requests = traces_of(found, first)
    replies = being_traced(requests)
    yield rows_of(found, pools, list(replies.values()))
    for reply in trace_here(requests):
        replies[reply.id] = reply
        yield rows_of(found, pools, list(replies.values()))


COMMANDS: Commands = {"plan": plan}
