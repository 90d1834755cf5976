"""Reasons why a layer computes without FP8."""

from enum import IntEnum


class Fallback(IntEnum):
    """The reason why all of a layer's products are in bf16. Saved in checkpoints by its number."""

    NONE = 0
    DEMOTED = 1  # its operands broke a limit
    TOO_SMALL = 2  # its shape gains nothing in FP8
