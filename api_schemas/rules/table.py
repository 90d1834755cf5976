"""The table of what cannot be combined. Every rule that ties fields of a job together stands here, and nowhere else.

A contract checks the sections of its own fields when it is read; `JobSpec` checks those that tie its parts together. Ranks,
the control plane and the docs use the same rules.
"""

import itertools
from collections.abc import Mapping

from octet.api_schemas.base import SpecConflict
from octet.api_schemas.inputs import ImageInput, TokenInput
from octet.api_schemas.rules.data import MODEL_AND_DATA, SCHEDULE, TARGETS, TOKENIZER
from octet.api_schemas.rules.exports import EVALUATION, EXPORT
from octet.api_schemas.rules.options import (
    ADAPTER,
    ATTENTION_KERNEL,
    CUDA_GRAPHS,
    DIVERGENCE,
    LOOP_ONLY,
    MEMORY,
    MOVING_AVERAGE,
)
from octet.api_schemas.rules.parallelism import (
    BATCHES,
    COMPILING,
    ELASTIC,
    STRATEGIES,
)
from octet.api_schemas.rules.parts import LEARNING_RATE, OPTIMIZER, PIPELINE_SCHEDULE, RECIPE, TRAINING
from octet.api_schemas.rules.precision import PRECISION
from octet.api_schemas.rules.rule import Facts, Rule, Table

SECTIONS: Mapping[str, tuple[Rule, ...]] = {
    "Model and data": (*TOKENIZER, *MODEL_AND_DATA, *TARGETS),
    "Length and schedule": (*SCHEDULE, DIVERGENCE),
    **STRATEGIES,
    "Compiled blocks": COMPILING,
    "Batches": BATCHES,
    "Elastic jobs": ELASTIC,
    "Adapters and averages": (*ADAPTER, *MOVING_AVERAGE),
    "Options that save memory": MEMORY,
    "Attention": ATTENTION_KERNEL,
    "Exports": (*EXPORT, *EVALUATION),
}
"""The rules that tie the parts of a job together. A job with several conflicts is refused for the first one."""

SECTIONS_OF_PARTS: Mapping[str, tuple[Rule, ...]] = {
    "Precision": (*PRECISION, *RECIPE),
    "Training": TRAINING.rules,
    "Optimizer and schedule": (*OPTIMIZER, *LEARNING_RATE),
    "Schedule of a pipeline": PIPELINE_SCHEDULE.rules,
    "Only in a loop of one's own": LOOP_ONLY.rules,
    "CUDA graphs": CUDA_GRAPHS,
}
"""The rules that one part of a job checks by itself, and those that are read elsewhere."""

JOB = Table(*itertools.chain(*SECTIONS.values()))
RULES = (*JOB, *itertools.chain(*SECTIONS_OF_PARTS.values()))


def check_job(job: object) -> SpecConflict | None:
    """Return the first conflict between the parts of a job, or None."""
    return JOB.first_conflict(Facts(job))


def check_data(takes: TokenInput | ImageInput, data: object, sequence_length: int) -> SpecConflict | None:
    """Return the first conflict of a model with its data, or None. takes: what the model reads, by its files too."""
    known = {"model.sizes.takes": takes, "data": data, "training.sequence_length": sequence_length}
    return MODEL_AND_DATA.first_conflict(Facts(known=known))


def check_schedule(training: object) -> SpecConflict | None:
    """Return the first conflict of a schedule with the number of steps, or None. training: with `steps`."""
    return SCHEDULE.first_conflict(Facts(known={"training": training}))


def check_without_effect(job: object) -> SpecConflict | None:
    """Return the option that a job would ignore, or None. Stored jobs may have one."""
    return LOOP_ONLY.first_conflict(Facts(job))


def reason_against(field: str, job: object) -> str | None:
    """Return why a field that a job leaves to us, such as training.compile, is off for it; None if nothing forbids it.

    job: anything with the fields that the rules of this field name, as a job or a rank's configuration.
    """
    facts = Facts(job)
    return next((rule.reason(facts) for rule in RULES if rule.field == field and facts.hold(rule.when)), None)
