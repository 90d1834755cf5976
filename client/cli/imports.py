"""`octet import`: write a job, or the part of one that a file describes, from another project's file.

Exit status 3: something that matters was left over, and standard error says what and why. What could be read is written.
"""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.text import Text

from octet.api_schemas.imports.accelerate import from_accelerate
from octet.api_schemas.imports.axolotl import from_axolotl
from octet.api_schemas.imports.deepspeed import from_deepspeed
from octet.api_schemas.imports.patch import Given, Patch
from octet.api_schemas.imports.torchtitan import from_torchtitan
from octet.api_schemas.imports.transformers import from_training_arguments
from octet.api_schemas.training import TrainingSpec
from octet.client.cli.options import LEFT_OVER, Commands
from octet.client.errors import JobFileError
from octet.client.job_file import check_part, check_spec, load_job_file, read_text
from octet.client.terminal import Terminal

_DEFAULT_BATCH = TrainingSpec.model_fields["global_batch_size"].default
_NO_BATCH = f"the job takes the default, {_DEFAULT_BATCH} samples a step: give --batch-size and --workers"

Reader = Callable[[Mapping[str, Any], Given], Patch]


def _command(project: str, reader: Reader, file: str, does: str) -> Callable[..., None]:
    """Return the command that reads a project's files. file: what to give. does: the command's help."""

    def run(
        source: Annotated[str, typer.Argument(metavar="FILE", help=f"{file}; - for standard input.")],
        data: Annotated[str | None, typer.Option("--data", help="Write a whole job, with this data: a path.")] = None,
        model: Annotated[
            str | None, typer.Option("--model", help="The job's model: a preset, or a saved one's folder.")
        ] = None,
        steps: Annotated[
            int | None, typer.Option("--steps", min=1, help="Optimizer steps, in the place of the file's.")
        ] = None,
        name: Annotated[
            str | None, typer.Option("--name", help=f"The job's name; of a whole job by default from-{project}.")
        ] = None,
        workers: Annotated[
            int | None, typer.Option("--workers", min=1, help="Number of processes, in the place of the file's.")
        ] = None,
        batch_size: Annotated[
            int | None, typer.Option("--batch-size", min=1, help="Samples of a process and forward pass, likewise.")
        ] = None,
        output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write; default: standard output.")] = None,
    ) -> None:
        try:
            patch = reader(_load(source, is_toml=project == "torchtitan"), Given(workers, batch_size, steps))
        except ValueError as error:
            raise JobFileError(f"{source}: {error}") from error
        whole = _with_options(patch.job, name=name, data=data, model=model, default_name=f"from-{project}")
        check_part(patch.job, source) if whole is None else check_spec(whole, source)
        _write(patch.job if whole is None else whole, output)
        if whole is not None and "global_batch_size" not in whole.get("training", {}):
            patch.leave("training.global_batch_size", "not set", _NO_BATCH, matters=True)
        _show_left_over(patch)
        if patch.left_something_that_matters:
            raise typer.Exit(LEFT_OVER)

    run.__doc__ = does
    return run


def _load(source: str, *, is_toml: bool) -> dict[str, Any]:
    if not is_toml:
        return load_job_file(source)
    try:
        return tomllib.loads(read_text(source, "a TOML file"))
    except tomllib.TOMLDecodeError as error:
        raise JobFileError(f"{source} is no TOML: {error}") from error


def _with_options(
    part: dict[str, Any], *, name: str | None, data: str | None, model: str | None, default_name: str
) -> dict[str, Any] | None:
    """Put name and model into a part of a job. Return the whole job; None without data, for a part alone."""
    if name is not None:
        part["name"] = name
    if model is not None:
        part["model"] = {"path": model} if model.startswith("/") else {"preset": model}
    if data is None:
        return None
    return {"name": default_name, **part, "data": {"path": data, **part.get("data", {})}}


def _write(document: dict[str, Any], output: Path | None) -> None:
    text = yaml.safe_dump(document, sort_keys=False)
    if output is not None:
        output.write_text(text)
    else:
        Terminal().show(Text(text.rstrip()))


def _show_left_over(patch: Patch) -> None:
    """Say on standard error what became no field of the job, first what matters."""
    terminal = Terminal()
    for left in patch.left:
        if left.matters:
            terminal.complain(f"left over: {left.setting}: {left.reason}")
    for left in patch.left:
        if not left.matters:
            terminal.note(f"not needed: {left.setting}: {left.reason}")


COMMANDS: Commands = {
    "accelerate": _command(
        "accelerate",
        from_accelerate,
        "Accelerate's config.yaml, or an fp8_config block",
        "Read Accelerate's configuration: precision, sharding, accumulation, compilation, one worker per process.",
    ),
    "deepspeed": _command(
        "deepspeed",
        from_deepspeed,
        "DeepSpeed's configuration",
        "Read DeepSpeed's configuration: ZeRO, precision, batch, clipping, optimizer and schedule; MS-AMP's section too.",
    ),
    "transformers": _command(
        "transformers",
        from_training_arguments,
        "TrainingArguments as JSON or YAML",
        "Read transformers' TrainingArguments: length, batch, optimizer and schedule, precision, FSDP and DeepSpeed.",
    ),
    "axolotl": _command(
        "axolotl",
        from_axolotl,
        "Axolotl's YAML",
        "Read an Axolotl configuration: as TrainingArguments, with adapters, packing and the length of a sequence.",
    ),
    "torchtitan": _command(
        "torchtitan",
        from_torchtitan,
        "torchtitan's TOML",
        "Read a torchtitan configuration: degrees, batch, optimizer and schedule, float8, compilation and checkpoints.",
    ),
}
