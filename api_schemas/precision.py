"""In which formats a job computes and stores."""

from typing import Literal

from api_schemas.base import Contract

LevelName = Literal["fp32", "bf16-amp", "O2"]


class PrecisionSpec(Contract):
    """A row of the level table (`api_schemas.levels`), by name."""

    level: LevelName = "O2"
