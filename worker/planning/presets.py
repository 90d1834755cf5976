"""Write the peaks of presets that the package ships: `python -m octet.worker.planning.presets [PRESET …]`.

All presets take a quarter of an hour of a core. Those that are named replace theirs in the file.
"""

import json
import sys
from typing import Any

from octet.api_schemas import JobSpec
from octet.api_schemas.inputs import tokens_per_sample
from octet.api_schemas.models import PRESETS
from octet.api_schemas.preset_peaks import FILE, SHIPPED, preset_job, tokens_of
from octet.worker.fp8.speedups import load_tables, table_for, why_bf16
from octet.worker.planning.fake_gpu import CHIP
from octet.worker.planning.moments import counts, peak_of, traces_of


def peak_of_preset(preset: str, level: str) -> dict[str, Any]:
    """Return the content of the file for a preset at a level."""
    job = preset_job(preset, level)
    _, sequences = counts(job)
    peak = peak_of(job, [traces_of(job, number) for number in sequences])
    return {"most_tokens": most_tokens(job), "peak": peak.model_dump(mode="json")}


def most_tokens(job: JobSpec) -> int | None:
    """Return the most tokens of a forward pass at which the same layers gain by FP8 as at the job's; None without an end."""
    precision, recipe = job.precision, job.resolved_precision.resolved_recipe
    if recipe is None or not precision.storage.has_own_fp8:
        return None
    shapes = {each.shape for each in job.model.sizes.parameters() or () if each.is_linear}

    def left(num_tokens: int) -> set[tuple[int, ...]]:
        return {
            shape for shape in shapes if why_bf16(shape[1], shape[0], num_tokens, precision.storage, recipe, CHIP) is not None
        }

    own, last = left(tokens_of(job)), table_for(CHIP, load_tables()).tokens[-1]
    step = tokens_per_sample(job.model.sizes.takes, job.training.sequence_length)
    others = (num_tokens for num_tokens in range(tokens_of(job), last + step, step) if left(num_tokens) != own)
    first = next(others, None)
    return None if first is None else first - step


def main(presets: list[str]) -> int:
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    for preset in presets or PRESETS:
        found[preset] = {level: peak_of_preset(preset, level) for level in reversed(SHIPPED.values())}
        lines = (f"{json.dumps(name)}: {json.dumps(found[name], separators=(',', ':'))}" for name in PRESETS if name in found)
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        sys.stderr.write(f"{preset}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
