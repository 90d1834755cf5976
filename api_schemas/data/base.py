"""What every source of data has in common: where it lies, and what can be said of it before a rank reads it.

A source is a contract here (which files it selects, how they are divided, what is checked at submission) and a module of the
same name in `worker/data/`, which reads by the same methods.
"""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from api_schemas.base import Contract, refusal


class Unfit(ValueError):
    """A source does not hold what a job needs: the field to change, what was got, what is allowed, what to change."""

    def __init__(self, field: str, got: object, allowed: str, change: str) -> None:
        super().__init__(f"{field}: got {got}; allowed: {allowed}. {change}")
        self.field, self.got, self.allowed, self.change = field, str(got), allowed, change


@dataclass(frozen=True)
class Needs:
    """What a job needs of its data."""

    sequence_length: int
    vocab_size: int


class SourceSpec(Contract):
    """Base of all sources that lie under a path."""

    min_vocab_size: ClassVar[int] = 1
    """The smallest vocabulary of a model that can read this source, as far as the spec alone says it."""

    source: str
    path: str = Field(min_length=1, max_length=4096, description="absolute path of a file or folder, as the workers see it")

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        if "\0" in path or not path.startswith("/"):
            raise refusal("", got=path, allowed="an absolute path without a zero byte", change="Change data.path.")
        return path

    @abstractmethod
    def check(self, path: Path, needs: Needs) -> None:
        """Raise Unfit, or OSError, where the files under `path`, the resolved `self.path`, cannot feed the job.

        Reads as a rank will, but not everything: a large folder is taken to be large enough.
        """
