"""Text files: which ones, in which order, and the evaluation part. Control plane and ranks share this rule."""

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from octet.api_schemas.base import SpecConflict, refusal
from octet.api_schemas.data.base import Needs, SourceSpec
from octet.api_schemas.data.files import ANY_FILE, Files
from octet.api_schemas.data.jsonl import absolute_tokenizer, check_tokenizer, has_tokenizer

Glob = Annotated[str, Field(min_length=1, max_length=256)]

MAX_FILES_CHECKED = 2_000
_BINARY_PROBE_BYTES = 8192


class TextSpec(SourceSpec):
    """Text files read as bytes (256 tokens), or as a tokenizer's tokens. Evaluation files are never trained on.

    `path` is a file or a folder, as the workers see it. In a folder, the files that match `include` and not `exclude`
    are ordered by the hash of their relative path. The first `evaluation_fraction` of them (at least one) is kept for
    evaluation; a single file keeps its last part for evaluation. Hidden files and folders (a name that begins with a dot),
    links, and binary files (a zero byte in the first 8 KiB) are left out.
    With `packing` each file of a folder is a document: no token sees another file, positions begin again at 0, and the last
    token of a file, a line feed, predicts nothing. Empty files are left out.
    With `tokenizer` files are UTF-8. Each begins as the tokenizer begins a text and ends with its end-of-text token, in place
    of the line feed; a rank tokenizes everything when it starts, and keeps 4 bytes a token in memory.
    """

    source: Literal["text"] = "text"
    include: tuple[Glob, ...] = Field(default=("**/*",), min_length=1, max_length=64)
    exclude: tuple[Glob, ...] = Field(default=(), max_length=64)
    evaluation_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    packing: bool = Field(default=False, description="keep the files in a sequence apart, as documents")
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="absolute path of a folder with a tokenizer, as the workers see it; default: bytes",
    )
    _model_folder: str | None = PrivateAttr(None)

    @field_validator("tokenizer")
    @classmethod
    def _tokenizer_is_absolute(cls, path: str | None) -> str | None:
        return absolute_tokenizer(path)

    @model_validator(mode="after")
    def _globs_stay_inside(self) -> Self:
        for field, globs in (("include", self.include), ("exclude", self.exclude)):
            for position, glob in enumerate(globs):
                if glob.startswith("/") or ".." in glob.split("/") or "\0" in glob:
                    allowed = "a glob relative to data.path that does not leave it, such as **/*.py"
                    raise refusal(f"{field}.{position}", got=glob, allowed=allowed, change="Remove '/' at its start and '..'.")
        return self

    @property
    def min_vocab_size(self) -> int:
        """256, one for each byte. A tokenizer's vocabulary is known when its files are read."""
        return 256 if self.tokenizer is None else 1

    @property
    def is_packed(self) -> bool:
        """True if the spec sets `packing`."""
        return self.packing

    def selects(self, relative_path: str) -> bool:
        """Return True if a file of the folder is read. relative_path: relative to `path`, with '/' between the parts."""
        if any(part.startswith(".") for part in relative_path.split("/")):
            return False
        is_included = any(matches(glob, relative_path) for glob in self.include)
        return is_included and not any(matches(glob, relative_path) for glob in self.exclude)

    def selects_nothing_below(self, relative_folder: str) -> bool:
        """Return True for a folder that need not be entered: it is hidden, or an exclude glob ending in `/**` covers it."""
        if relative_folder.rpartition("/")[2].startswith("."):
            return True
        covering = [glob for glob in self.exclude if glob.endswith("/**")]
        return any(matches(glob, f"{relative_folder}/") for glob in covering)

    def entries(self, folder: Path, files: Files = ANY_FILE) -> Iterator[tuple[str, bool]]:
        """Yield every visited entry below a folder: its relative path, and True if it is a file to read.

        Names that are not UTF-8 use Python's surrogate escapes. Links are not followed, so nothing outside is read.
        """
        for name, is_file in files.list_below(folder, lambda subfolder: not self.selects_nothing_below(subfolder)):
            yield name, is_file and self.selects(name)

    def divide_files(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the files for training and the files for evaluation, each in reading order."""
        ordered = sorted(names, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
        num_evaluation = min(len(ordered) - 1, math.ceil(len(ordered) * self.evaluation_fraction))
        return ordered[num_evaluation:], ordered[:num_evaluation]

    def divide_bytes(self, num_bytes: int) -> int:
        """Return how many bytes at the start of a single file are for training; the rest is for evaluation."""
        return num_bytes - math.ceil(num_bytes * self.evaluation_fraction)

    @staticmethod
    def is_binary(content: bytes) -> bool:
        """Return True if a file that begins with `content` is binary and therefore left out."""
        return b"\0" in content[:_BINARY_PROBE_BYTES]

    def with_model(self, model_folder: str | None) -> Self:
        """Remember the model's folder: if it has a tokenizer, the model's tokens are not bytes."""
        if model_folder is None:
            return self
        spec = self.model_copy()
        spec._model_folder = model_folder
        return spec

    def check_local_parts(self, files: Files = ANY_FILE) -> None:
        """Check the tokenizer's files, or that there need not be a tokenizer."""
        if self.tokenizer is not None:
            check_tokenizer(Path(self.tokenizer), files)
        elif self._model_folder is not None and has_tokenizer(Path(self._model_folder), files):
            allowed = f"a tokenizer's folder: the model in {self._model_folder} has a tokenizer, so its tokens are not bytes"
            raise SpecConflict("data.tokenizer", None, allowed, f"Set data.tokenizer to {self._model_folder}.")

    def check(self, path: Path, needs: Needs, files: Files = ANY_FILE) -> None:
        """Check as `SourceSpec.check` says; a folder of more than `MAX_FILES_CHECKED` text files is assumed large enough.

        A tokenizer's tokens are at most as many as bytes, so what is too short in bytes is too short.
        """
        self.check_local_parts(files)
        if not files.is_folder(path):
            self.refuse_to_pack_one_file()
            num_bytes = files.num_bytes(path)
            self._check_length(self.divide_bytes(num_bytes), num_bytes - self.divide_bytes(num_bytes), needs)
            return
        sizes: dict[str, int] = {}
        for name, is_read in self.entries(path, files):
            if len(sizes) >= MAX_FILES_CHECKED:
                return
            if is_read and not self.is_binary(files.read(path / name, _BINARY_PROBE_BYTES)):
                num_bytes = files.num_bytes(path / name)
                if num_bytes or not self.packing:
                    sizes[name] = num_bytes
        if len(sizes) < 2:
            raise self.too_few_files(len(sizes))
        train, evaluation = self.divide_files(sizes)
        self._check_length(_joined_bytes(sizes, train), _joined_bytes(sizes, evaluation), needs)

    def refuse_to_pack_one_file(self) -> None:
        """Raise SpecConflict if the only file should be packed."""
        if self.packing:
            allowed = f"false: {self.path} is a single file, so a single document"
            raise SpecConflict("data.packing", True, allowed, "Remove data.packing, or give a folder of files.")

    def too_few_files(self, num_files: int) -> SpecConflict:
        """Build the error for a folder with fewer than two selected text files."""
        return SpecConflict(
            "data.include",
            ", ".join(self.include),
            "globs that select at least two text files, one to train on and one to evaluate",
            f"{num_files} of the files in {self.path} are selected. Change data.include, data.exclude or data.path.",
        )

    def _check_length(self, num_train_bytes: int, num_evaluation_bytes: int, needs: Needs) -> None:
        for part, num_bytes in (("training", num_train_bytes), ("evaluation", num_evaluation_bytes)):
            if num_bytes <= needs.sequence_length:
                raise SpecConflict(
                    "training.sequence_length",
                    needs.sequence_length,
                    f"less than the {part} text of {self.path}, which has {num_bytes} bytes",
                    "Shorten training.sequence_length, add text, or change data.evaluation_fraction.",
                )


def _joined_bytes(sizes: dict[str, int], names: list[str]) -> int:
    return sum(sizes[name] for name in names) + len(names) - 1  # one line feed between files


# Globs over relative paths, matched in time that grows with name × glob and never exponentially.
#
# `**/` matches any folders or none, `**` anything, `*` and `?` stay within one part of the path; `**` does not match a line
# feed. A match follows all possibilities at once: the positions of the name that the glob's beginning can reach are the bits
# of one integer. A backtracking regular expression would need minutes for `**/**/**/…q`, and cannot be interrupted.


class _Name:
    """A name, and sets of its positions: a bit for each character."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._positions: dict[str, int] = {}
        self.slashes = self.positions("/")
        everywhere = (1 << len(name)) - 1
        self.within_parts = everywhere ^ self.slashes
        self.within_lines = everywhere ^ self.positions("\n")

    def positions(self, text: str) -> int:
        """Return the positions at which the text begins."""
        if (known := self._positions.get(text)) is not None:
            return known
        found, start = 0, -1
        while (start := self.name.find(text, start + 1)) >= 0:
            found |= 1 << start
        self._positions[text] = found
        return found


_Step = Callable[[_Name, int], int]
"""A part of a glob: takes a name and the set of positions before the part; returns the set of positions after it."""


def matches(glob: str, name: str) -> bool:
    """Return True if the glob matches the whole name. name: parts separated by '/'."""
    reached, known = 1, _known(name)
    for step in _steps(glob):
        reached = step(known, reached)
        if not reached:
            return False
    return bool(reached >> len(name) & 1)


@lru_cache(maxsize=2)
def _known(name: str) -> _Name:
    """One name is matched with many globs, one after the other."""
    return _Name(name)


@lru_cache(maxsize=1024)
def _steps(glob: str) -> tuple[_Step, ...]:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    return tuple(_WILDCARDS.get(part) or _literally(part) for part in parts if part)


def _literally(text: str) -> _Step:
    return lambda name, reached: (reached & name.positions(text)) << len(text)


def _run_on(reached: int, passable: int) -> int:
    """Add the positions that follow a reached one without leaving the passable characters.

    The sum carries from each reached position to the end of its run (MatchStar in Cameron et al., "Bitwise data parallelism
    in regular expression matching", PACT 2014).
    """
    return (((reached & passable) + passable) ^ passable) | reached


_WILDCARDS: dict[str, _Step] = {
    "**/": lambda name, reached: reached | (_run_on(reached, name.within_lines) & name.slashes) << 1,
    "**": lambda name, reached: _run_on(reached, name.within_lines),
    "*": lambda name, reached: _run_on(reached, name.within_parts),
    "?": lambda name, reached: (reached & name.within_parts) << 1,
}
