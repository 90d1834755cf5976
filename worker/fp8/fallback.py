"""Why a layer does without FP8."""

from enum import IntEnum


class Fallback(IntEnum):
    """Why all of a layer's products are in bf16. Saved in checkpoints by its number."""

    NONE = 0
    DEMOTED = 1  # its operands broke a limit
    FILTERED = 2  # its shape gains nothing in FP8
