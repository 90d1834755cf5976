"""`octet data`: prepare what jobs read."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from octet.client.cli.options import require_extras

_WORKER = "octet.worker.data.tokenize"
"""The module that tokenizes. It runs in a process of its own, whose progress and errors are this command's."""


def tokenize(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A text file, or a folder of them, in UTF-8.")],
    tokenizer: Annotated[Path, typer.Option("--tokenizer", "-t", help="A folder with a tokenizer of transformers.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write to, new or empty.")],
    processes: Annotated[int | None, typer.Option("--processes", min=1, help="At a time; default: one for each core.")] = None,
    include: Annotated[list[str] | None, typer.Option("--include", help="A glob of files to read; may be repeated.")] = None,
    exclude: Annotated[list[str] | None, typer.Option("--exclude", help="A glob to leave out; may be repeated.")] = None,
    evaluation_fraction: Annotated[float, typer.Option("--evaluation-fraction", help="The share that is held out.")] = 0.1,
) -> None:
    """Write text as shards of tokens, for source 'tokens'. Needs the extras 'worker' and 'models' on this machine."""
    require_extras("data tokenize", "worker", "models")
    command = [sys.executable, "-m", _WORKER, str(path), "--tokenizer", str(tokenizer), "--out", str(out)]
    command += ["--evaluation-fraction", str(evaluation_fraction)]
    command += [] if processes is None else ["--processes", str(processes)]
    for option, globs in (("--include", include), ("--exclude", exclude)):
        command += [word for glob in globs or () for word in (option, glob)]
    ended = subprocess.run(command, check=False)
    if ended.returncode:
        raise typer.Exit(ended.returncode)
