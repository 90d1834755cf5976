"""Peaks of presets on one rank, which the package ships so that their plans need no trace.

`python -m octet.worker.planning.presets` writes `preset_peaks.json`: for each preset and each of `SHIPPED` the lines of a step
without accumulation, traced at one size and twice that. They serve all levels with the same passes, and are straight from
that size on, in the tokens of a forward pass, as long as the same layers gain by FP8.
"""

import json
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from octet.api_schemas.inputs import ImageInput, tokens_per_sample
from octet.api_schemas.job import JobSpec
from octet.api_schemas.levels import AUTOMATIC, LEVELS
from octet.api_schemas.models import FAMILIES, PRESETS
from octet.api_schemas.peak import Peak

FILE = Path(__file__).with_name("preset_peaks.json")
SHIPPED = {LEVELS[level].passes: level for level in reversed(AUTOMATIC)}
"""The level whose peaks are shipped, by the passes of the levels that they serve: the most precise that `auto` may choose."""
NUM_TOKENS, WIDE, LONGEST = 8192, 4096, 2048
"""Tokens of the traced pass, at most; hidden size from which it has one sequence; longest traced sequence."""

_NO_MATTER = {
    *("preset", "steps", "epochs", "global_batch_size", "micro_batch_size", "sequence_length", "optimizer", "schedule"),
    *("gradient_clip", "eval_every", "eval_batches", "checkpoint_every", "checkpoint_every_minutes", "keep", "compile"),
    *("attention_kernel", "collective_timeout_s", "seed", "start_change"),
}
_OF_ADAMW = {"learning_rate", "weight_decay", "betas", "eps", "momentum"}
"""Fields of the optimizer that change no size of AdamW's tensors."""


def preset_job(preset: str, level: str) -> JobSpec:
    """Return the job whose peak is shipped."""
    family = next(name for name, spec in FAMILIES.items() if preset in getattr(spec, "presets", {}))
    sizes = PRESETS[preset]
    training: dict[str, Any] = {"steps": 1}
    if not isinstance(sizes.takes, ImageInput):
        training["sequence_length"] = min(LONGEST, sizes.takes.max_sequence_length or LONGEST)
    num_tokens = tokens_per_sample(sizes.takes, training.get("sequence_length", 0))
    is_wide = getattr(sizes, "hidden_size", 0) >= WIDE
    training["global_batch_size"] = 1 if is_wide else 1 << (NUM_TOKENS // num_tokens).bit_length() - 1
    source = (
        {"source": "images", "path": "/data.npz"}
        if isinstance(sizes.takes, ImageInput)
        else {"source": "tokens", "path": "/data"}
    )
    return JobSpec.model_validate(
        {
            "name": "preset",
            "model": {"family": family, "preset": preset},
            "precision": {"level": level},
            "data": source,
            "training": training,
        }
    )


def preset_peak(job: JobSpec) -> Peak | None:
    """Return the peak of a job from the shipped lines, with the states of their level; None where they do not hold for it."""
    found = _read().get(job.model.preset or "", {}).get(SHIPPED.get(job.precision.storage.passes))
    if found is None or job.batch.num_micro_batches > 1 or job.data.is_packed:
        return None
    traced = preset_job(job.model.preset or "", job.precision.level)
    num_tokens = tokens_of(job)
    if not tokens_of(traced) <= num_tokens <= (found["most_tokens"] or num_tokens) or _rest(job) != _rest(traced):
        return None
    return Peak.model_validate(found["peak"]).at(Fraction(num_tokens, tokens_of(traced)))


def tokens_of(job: JobSpec) -> int:
    """Return the tokens of a rank's forward pass."""
    return job.batch.micro_batch_size * tokens_per_sample(job.model.sizes.takes, job.training.sequence_length)


def _rest(job: JobSpec) -> tuple[Any, ...]:
    """Return what the peak of a preset depends on, besides tokens, as far as a job says it."""
    training, optimizer = job.training.model_dump(exclude=_NO_MATTER), job.training.optimizer.model_dump(exclude=_OF_ADAMW)
    parts = (job.model, job.precision, job.adapter, job.parallelism, job.resources.workers)
    return (*parts, training, optimizer, job.training.gradient_clip is None)


@cache
def _read() -> Any:
    return json.loads(FILE.read_text()) if FILE.exists() else {}
