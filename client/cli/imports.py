"""`octet import`: write a job file from another project's configuration."""

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.text import Text

from octet.api_schemas import JobSpec
from octet.client.job_file import check_spec, load_job_file
from octet.client.terminal import Terminal

_STEPS = 1000


def accelerate(
    config: Annotated[str, typer.Argument(help="Accelerate's config.yaml, or an fp8_config block; - for standard input.")],
    data: Annotated[str, typer.Option("--data", help="What to train on: an absolute path.")],
    preset: Annotated[str, typer.Option("--preset", help="The model.")] = "gpt-tiny",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps.")] = _STEPS,
    name: Annotated[str, typer.Option("--name", help="The job's name.")] = "from-accelerate",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write; default: standard output.")] = None,
) -> None:
    """Write the job that trains as an Accelerate configuration does: its precision, and one worker per process."""
    document = load_job_file(config)
    workers = int(document.get("num_processes", 1))
    spec = check_spec(
        {
            "name": name,
            "model": {"preset": preset},
            "precision": document,
            "data": {"path": data},
            "training": {"steps": steps, "global_batch_size": 16 * workers},
            "resources": {"workers": workers},
        },
        config,
    )
    text = yaml.safe_dump(_as_written(spec), sort_keys=False)
    if output is not None:
        output.write_text(text)
    else:
        Terminal().show(Text(text.rstrip()))


def _as_written(spec: JobSpec) -> dict[str, Any]:
    """Return the spec as a person would write it: without defaults, but with the whole recipe."""
    document = spec.model_dump(mode="json", exclude_defaults=True)
    recipe = spec.precision.resolved_recipe
    document["precision"] = {"level": spec.precision.level, **document.get("precision", {})}
    if recipe is not None:
        document["precision"]["recipe"] = recipe.model_dump(mode="json")
    return document
