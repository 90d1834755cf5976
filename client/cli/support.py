"""Commands for when something is wrong: doctor, debug."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from octet.client.bundle import write_bundle
from octet.client.cli.options import DEFAULT_URL, FAILED, REFUSED, AsJson, Commands, JobId, Url, connect, find_to_read
from octet.client.doctor import check_machine
from octet.client.redact import Redactor
from octet.client.render import checkup_table
from octet.client.terminal import Terminal
from octet.client.text import num_bytes

DataDir = Annotated[Path, typer.Option("--data-dir", help="The folder of the server's data, whose disk is looked at.")]


def doctor(data_dir: DataDir = Path("octet-data"), url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Look at what is installed, devices, driver, server, pools, alerts, ports and disk; exit 1 if something is wrong."""
    terminal = Terminal()
    with connect(url) as client, terminal.spinner_on_stderr("looking"):
        checkup = check_machine(client, data_dir)
    terminal.show_json(checkup) if as_json else terminal.show(checkup_table(checkup))
    if not checkup.is_well:
        raise typer.Exit(FAILED)


def debug(
    job_id: JobId,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The archive, a .tar.gz that does not exist yet; default: here.")
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Write one archive about a job for an issue report: spec, events, log, curve; secrets are left out."""
    terminal, redactor = Terminal(), Redactor()
    with connect(url) as client:
        job = find_to_read(client, job_id)
        path = out or Path(f"octet-debug-{job.id}.tar.gz")
        try:
            with terminal.spinner_on_stderr("collecting"):
                names = write_bundle(client, job, check_machine(client, Path("octet-data")), path, redactor)
        except OSError as error:
            terminal.complain(f"cannot write {path}: {error.strerror or error}. Name another file with --out.")
            raise typer.Exit(REFUSED) from error
    size, left_out = num_bytes(path.stat().st_size), redactor.num_left_out
    terminal.show(Text(f"{path} ({size}) has {', '.join(names)}."))
    terminal.show(Text(f"{left_out} secrets were left out. Look through it before you publish it: names and paths are in it."))


COMMANDS: Commands = {"doctor": doctor, "debug": debug}
