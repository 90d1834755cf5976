"""The base of all sources of data: where the data lies, and how a spec is checked before any rank reads the data.

A source has a contract here (which files it selects, how they are divided, what is checked at submission) and a module of
the same name in `worker/data/`, which reads the files by the contract's methods.
"""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, field_validator

from octet.api_schemas.base import Contract, refusal
from octet.api_schemas.data.files import ANY_FILE, Files, absolute_path
from octet.api_schemas.data.stores import check_url, is_url, place_of
from octet.api_schemas.inputs import BatchKind, ImageInput


@dataclass(frozen=True)
class Needs:
    """The properties of a job that its data must satisfy. images: of a model that takes images; the others are of tokens."""

    sequence_length: int
    vocab_size: int
    images: ImageInput | None = None


class SourceSpec(Contract):
    """Base of all sources that are files under a path."""

    reads_stores: ClassVar[bool] = True
    """True if `path` may be a URL in an object store."""

    source: str
    path: str = Field(
        min_length=1,
        max_length=4096,
        description="absolute path of a file or folder, as the workers see it, or a URL in an object store that the operator "
        "allows (OCTET_DATA_STORES)",
    )

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        if is_url(path) and cls.reads_stores:
            try:
                return check_url(path)
            except ValueError as error:
                raise refusal("", got=path, allowed=f"a URL: {error}", change="Change data.path.") from None
        return absolute_path("data.path", path)

    @property
    def place(self) -> Path:
        """The place that `path` names: a `StorePath` in an object store, any other path in the file system."""
        return place_of(self.path)

    @property
    def is_stored(self) -> bool:
        """True if the data lies in an object store, which only ranks read."""
        return is_url(self.path)

    @property
    def gives(self) -> BatchKind:
        """The kind of batches that models are given from this source."""
        return "tokens"

    @property
    def min_vocab_size(self) -> int:
        """The smallest vocabulary of a model that can read this source, if the spec alone determines it."""
        return 1

    @property
    def has_targets(self) -> bool:
        """True if the source says which tokens count, so that none can be hidden for a masked model."""
        return False

    @property
    def reads_tokenizer(self) -> bool:
        """True if the source needs a tokenizer, of its own or of the model's folder. It then has a field `tokenizer`."""
        return False

    @property
    def is_varied(self) -> bool:
        """True if images are changed at random, as only grey and coloured ones can be."""
        return False

    @property
    def is_packed(self) -> bool:
        """True if a sequence may hold several documents, which the model has to keep apart."""
        return False

    def with_model(self, model_folder: str | None) -> Self:
        """Return this spec with what it takes from the model's folder (None: the model has none)."""
        return self

    def check_local_parts(self, files: Files = ANY_FILE) -> None:
        """Raise SpecConflict, or OSError, for a wrong local file that the source reads besides its data in an object store."""

    @abstractmethod
    def check(self, path: Path, needs: Needs, files: Files = ANY_FILE) -> None:
        """Raise SpecConflict, or OSError, if the files under `path` (the resolved `self.path`) cannot feed the job.

        `files` opens and lists them. Applies the rank's own rules but does not read everything: a large folder is assumed to be
        large enough.
        """
