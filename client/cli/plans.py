"""The command that plans a job: `octet plan`, by a server or without one."""

from collections.abc import Sequence
from typing import Annotated, get_args

import typer

from octet.api_schemas.devices import DEVICES
from octet.api_schemas.plan import Candidate as PlanCandidate
from octet.api_schemas.plan import (
    Plan,
    PlanRequest,
    PlanRow,
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
    levels: Annotated[
        str | None, typer.Option("--levels", help="Levels to compare, as O2,O3. Default: all, and the peak of the job's own.")
    ] = None,
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
    with terminal.spinner_on_stderr("tracing"):
        if offline:
            found = _planned_here(request, memory_gb, device)
        else:
            with connect(url) as client:
                found = client.plan(spec, request.levels)
    terminal.show_json(found) if as_json else terminal.show(render.plan_details(found))


def _levels(text: str | None) -> tuple[LevelName, ...]:
    names = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    known: tuple[LevelName, ...] = get_args(LevelName)
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"got {unknown[0]}; allowed: {', '.join(known)}", param_hint="--levels")
    return tuple(name for name in known if name in names)


def _planned_here(request: PlanRequest, memory_gb: float | None, device: str | None) -> Plan:
    """Plan without a server."""
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
    rows = _rows(candidates(request), pools)
    changes = _rows(changes_of(job), pools) if needs_changes(job, rows) else []
    missing = []
    if memory_gb is None:
        missing.append("No memory is stated: set --memory-gb to see if the job fits.")
    if device is None:
        missing.append("No device is named: set --memory-gb and --device to see times.")
    return plan_of(job, rows, changes, missing)


def _rows(found: Sequence[PlanCandidate], pools: Sequence[PoolConfig]) -> list[PlanRow]:
    return rows_of(found, pools, trace_here(traces_of(found)))


COMMANDS: Commands = {"plan": plan}
