"""Export a job's checkpoint: what `octet export` runs in a process of its own, because it needs torch.

python -m octet.worker.pretrained runs/first/checkpoints/step_0000000100 --format bf16 --out exported
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from octet.api_schemas.models import families_with
from octet.worker.checkpoint import BadCheckpoint, load_folder
from octet.worker.common.errors import RankError
from octet.worker.pretrained.adapter import export_adapter, export_merged
from octet.worker.pretrained.compressed import ACTIVATIONS, KINDS, LAYOUTS, Fp8Form
from octet.worker.pretrained.from_checkpoint import averaged, copy_settings, trained
from octet.worker.pretrained.write import FORMATS, PLAIN_DTYPES, export

WITHOUT_DATA = tuple(name for name in ACTIVATIONS if name != "static")
"""The ways to treat activations that need no calibration: there is no data here."""


def main(arguments: list[str] | None = None) -> int:
    """Export, and print the folder. Exit status: 0, or 2 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m octet.worker.pretrained", description="Export a checkpoint of a job.")
    parser.add_argument("checkpoint", type=Path, help="a folder step_…")
    parser.add_argument("--format", choices=FORMATS, help="default: bf16; of adapters, as they were trained")
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet, or is empty")
    parser.add_argument("--strategy", choices=KINDS, help="of FP8 scales; default: as the weights were trained")
    parser.add_argument("--plain-dtype", choices=PLAIN_DTYPES, default="bf16", help="with fp8: of everything that is not FP8")
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="of fp8, for servers")
    parser.add_argument("--activations", choices=WITHOUT_DATA, default="none", help="with fp8: how servers scale them")
    parser.add_argument("--merge", action="store_true", help="add the adapters to the model that they belong to")
    options = parser.parse_args(arguments)
    try:
        state = load_folder(options.checkpoint)
        if state.get("job", {}).get("adapter") is not None:
            export_adapters(state, options)
        else:
            export_model(state, options)
    except (BadCheckpoint, RankError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{options.out}\n")
    return 0


def export_model(state: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the model of a job that trained all of it."""
    if options.merge:
        raise ValueError("--merge was given and the job trained no adapters; allowed: with adapters. Leave it out.")
    if state.get("job", {}).get("model", {}).get("family") in families_with("users_code"):
        raise ValueError(
            "the model is of family python, which has no form in transformers and whose code is not run here; allowed: other "
            "families. Read the checkpoint's tensors.safetensors."
        )
    model = averaged(state, trained(state))
    plain_dtype, format = PLAIN_DTYPES[options.plain_dtype], options.format or "bf16"
    form = Fp8Form(options.layout, options.activations)
    export(model, None, options.out, format=format, strategy=options.strategy, plain_dtype=plain_dtype, form=form)
    copy_settings(state["job"]["model"], options.out)


def export_adapters(state: dict[str, Any], options: argparse.Namespace) -> None:
    """Write a job's adapters for peft, or the model that they are merged into."""
    if options.format == "fp8" or options.strategy is not None:
        raise ValueError("adapters are exported in fp8; allowed: bf16 or fp32, without --strategy. Change --format.")
    dtype = PLAIN_DTYPES.get(options.format)
    if options.merge:
        export_merged(state["job"], state["model"], options.out, dtype or torch.bfloat16)
    else:
        export_adapter(state["job"], state["model"], options.out, dtype)
    copy_settings(state["job"]["model"], options.out)


if __name__ == "__main__":
    sys.exit(main())
