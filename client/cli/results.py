"""Commands that fetch what was trained: download, export."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from octet.api_schemas import Checkpoint, Export
from octet.client.api import Client
from octet.client.cli.options import (
    DEFAULT_URL,
    REFUSED,
    AsJson,
    Commands,
    JobId,
    Url,
    connect,
    find_job,
    find_to_read,
    require_extras,
)
from octet.client.render import exports_table
from octet.client.terminal import Terminal
from octet.client.text import num_bytes

Layout = Annotated[
    Literal["compressed-tensors", "hf-fp8-block"], typer.Option("--layout", help="With fp8: the form, for servers.")
]
_ACTIVATIONS = "With fp8: dynamic and static let servers multiply in FP8."
_WORKER = "octet.worker.pretrained"
"""The module that exports. It runs in a process of its own: the client loads no torch."""


def download(
    job_id: JobId,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write to; it is made if it is missing.")],
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="ID", help="A checkpoint's id, ckpt_…; default: the newest.")
    ] = None,
    export: Annotated[
        str | None, typer.Option("--export", metavar="ID", help="An export's id or name, or newest, in place of a checkpoint.")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Download a checkpoint of a job, or an export, and check every file's SHA-256."""
    terminal = Terminal()
    if checkpoint is not None and export is not None:
        raise typer.BadParameter("name a checkpoint or an export, not both.", param_hint="--export")
    with connect(url) as client:
        job = find_job(client, job_id)
        chosen = _choose(client, job.id, checkpoint) if export is None else _choose_export(client, job.id, export)
        try:
            files = client.download(chosen, out)
        except OSError as error:
            terminal.complain(f"cannot write to {out}: {error.strerror or error}")
            raise typer.Exit(REFUSED) from error
    if as_json:
        terminal.show_json_array(files)
    else:
        size = num_bytes(sum(file.num_bytes for file in files))
        terminal.show(Text(f"{len(files)} files, {size}, of step {chosen.step} are in {out}."))
        if export is None:
            terminal.show(Text(f"Make a Hugging Face model of them with: octet export {out} --out FOLDER"))


def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's folder, such as one downloaded.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write to, new or empty.")],
    format: Annotated[
        Literal["bf16", "fp32", "fp8"] | None,
        typer.Option("--format", help="What the weights become; default: bf16, and adapters as they were trained."),
    ] = None,
    strategy: Annotated[
        Literal["tensor", "channel", "block"] | None,
        typer.Option("--strategy", help="With fp8: what shares a scale; default: as it was trained."),
    ] = None,
    layout: Layout = "compressed-tensors",
    activations: Annotated[Literal["none", "dynamic"], typer.Option("--activations", help=_ACTIVATIONS)] = "none",
    merge: Annotated[bool, typer.Option("--merge", help="Add adapters to the model that they belong to.")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face model, or adapters for peft. Needs the extra 'worker' on this machine."""
    require_extras("export", "worker")
    command = [sys.executable, "-m", _WORKER, str(checkpoint), "--out", str(out), *(["--merge"] if merge else [])]
    command += [] if format is None else ["--format", format]
    command += [] if strategy is None else ["--strategy", strategy]
    command += ["--layout", layout, "--activations", activations]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    terminal = Terminal()
    if ended.returncode:
        terminal.complain(ended.stderr.strip())
        raise typer.Exit(ended.returncode)
    terminal.show(Text(f"{out} holds what was trained."))


def exports(
    job_id: JobId,
    format: Annotated[
        Literal["bf16", "fp32", "fp8"] | None,
        typer.Option("--format", help="Ask for an export of a job that has succeeded, in this format."),
    ] = None,
    layout: Layout = "compressed-tensors",
    activations: Annotated[Literal["none", "dynamic", "static"], typer.Option("--activations", help=_ACTIVATIONS)] = "none",
    target: Annotated[
        str | None, typer.Option("--target", metavar="URL", help="With --format: also write it there, as s3://bucket/prefix.")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show the exports of a job, and how far each is from what was trained; or ask for one."""
    terminal = Terminal()
    if target is not None and format is None:
        raise typer.BadParameter("it says where an export is written that --format asks for.", param_hint="--target")
    with connect(url) as client:
        if format is not None:
            spec = {"format": format, "layout": layout, "activations": activations, "target": target}
            job = client.export(find_job(client, job_id).id, spec)
            show_job = Text(f"{job.id} is {job.state.value}, to be exported. Watch it with: octet watch {job.id}")
            terminal.show_json(job) if as_json else terminal.show(show_job)
            return
        found = list(client.exports(find_to_read(client, job_id).id))
    terminal.show_json_array(found) if as_json else terminal.show(exports_table(found))


def _choose_export(client: Client, job_id: str, wanted: str) -> Export:
    """Return the export with an id or a name, or the newest. Exits where there is none."""
    found = [each for each in client.exports(job_id) if wanted in ("newest", each.id, each.name)]
    if not found:
        Terminal().complain(f"{job_id} has no export {wanted}. List them with: octet exports {job_id}")
        raise typer.Exit(REFUSED)
    return max(found, key=lambda each: (each.step, each.created_at))


def _choose(client: Client, job_id: str, checkpoint_id: str | None) -> Checkpoint:
    """Return the checkpoint with an id, or the newest. Exits where there is none."""
    found = [each for each in client.checkpoints(job_id) if checkpoint_id in (None, each.id)]
    if not found:
        wanted = "no checkpoint yet" if checkpoint_id is None else f"no checkpoint {checkpoint_id}"
        Terminal().complain(f"{job_id} has {wanted}. List them with: octet checkpoints {job_id}")
        raise typer.Exit(REFUSED)
    return max(found, key=lambda each: each.step)


COMMANDS: Commands = {
    "download": download,
    "export": export,
    "exports": exports,
}
