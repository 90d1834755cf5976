"""Record what steps launch on a GPU: `python -m tests.golden.launches` writes launches.json.

A block's forward and backward pass, and an optimizer's step, are counted on the fake GPU of benchmarks/gpu, where nothing is
launched. Kernels of ours count by their names, and torch's ops by theirs.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.launches import OPTIMIZER_LEVELS, block, optimizer_step

LAUNCHES = Path(__file__).with_name("launches.json")
RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    "window of 4": {"scaling": "delayed", "amax_history_length": 4},
    "row": {"granularity": "row"},
    "block": {"granularity": "block"},
    "mx": {"granularity": "mx"},
    "output in bf16": {"high_precision_gemms": ["output"]},
    "grad_weight in bf16": {"high_precision_gemms": ["grad_weight"]},
}
ON_BLOCKS = [(level, "default") for level in OPTIMIZER_LEVELS] + [("O2", name) for name in RECIPES if name != "default"]


def count_all() -> dict[str, dict[str, Any]]:
    """Return launches by name, and bytes of activations, of each block and each optimizer's step."""
    found: dict[str, dict[str, Any]] = {}
    for family in ("gpt", "llama"):
        for level, recipe in ON_BLOCKS:
            for statistics_every in (0, 1):
                counted = block(family, level, RECIPES[recipe], statistics_every)
                name = f"{family}, {level}, {recipe}{', sampled' if statistics_every else ''}"
                found[name] = {"launches": dict(sorted(counted.by_name.items())), "bytes": counted.num_bytes}
    for level in OPTIMIZER_LEVELS:
        counted = optimizer_step(2, level)
        found[f"step, {level}"] = {"launches": dict(sorted(counted.by_name.items())), "bytes": counted.num_bytes}
    return found


def main() -> None:
    """Print the counts as JSON, or write them to launches.json."""
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(json.dumps(count_all()))
        return
    lines = [f" {json.dumps(name)}: {json.dumps(counted)}" for name, counted in count_all().items()]
    LAUNCHES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
