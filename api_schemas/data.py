"""What a job trains on."""

import re
from functools import lru_cache
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from api_schemas.base import Contract, refusal

Glob = Annotated[str, Field(min_length=1, max_length=256)]


class DataSpec(Contract):
    """Text files read as bytes (256 tokens). Evaluation files are never trained on.

    `path` is a file or a folder, as the workers see it. In a folder, the files that match `include` and not `exclude`
    are ordered by the hash of their relative path, and the first `evaluation_fraction` of them (at least one) is kept
    for evaluation; of a single file, the last part. Left out are hidden files and folders (a name that begins with a
    dot), links, and binary files (a zero byte in the first 8 KiB).
    """

    source: Literal["text"] = "text"
    path: str = Field(min_length=1, max_length=4096, description="absolute path of a file or folder, as the workers see it")
    include: tuple[Glob, ...] = Field(default=("**/*",), min_length=1, max_length=64)
    exclude: tuple[Glob, ...] = Field(default=(), max_length=64)
    evaluation_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        if "\0" in path or not path.startswith("/"):
            raise refusal("", got=path, allowed="an absolute path without a zero byte", change="Change data.path.")
        return path

    @model_validator(mode="after")
    def _globs_stay_inside(self) -> Self:
        for field, globs in (("include", self.include), ("exclude", self.exclude)):
            for position, glob in enumerate(globs):
                if glob.startswith("/") or ".." in glob.split("/") or "\0" in glob:
                    allowed = "a glob relative to data.path that does not leave it, such as **/*.py"
                    raise refusal(f"{field}.{position}", got=glob, allowed=allowed, change="Remove '/' at its start and '..'.")
        return self

    def selects(self, relative_path: str) -> bool:
        """Whether a file of the folder, by its path relative to `path` with '/' between the parts, is read."""
        if any(part.startswith(".") for part in relative_path.split("/")):
            return False
        matches = [_pattern(glob).fullmatch(relative_path) for glob in self.include]
        return any(matches) and not any(_pattern(glob).fullmatch(relative_path) for glob in self.exclude)

    def selects_nothing_below(self, relative_folder: str) -> bool:
        """Whether a folder need not be entered: it is hidden, or an exclude glob that ends in `/**` covers it."""
        if relative_folder.rpartition("/")[2].startswith("."):
            return True
        covering = [glob for glob in self.exclude if glob.endswith("/**")]
        return any(_pattern(glob).fullmatch(f"{relative_folder}/") for glob in covering)


@lru_cache(maxsize=1024)
def _pattern(glob: str) -> re.Pattern[str]:
    """`**/` any folders or none, `**` anything, `*` and `?` within one part of the path."""
    translated = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    return re.compile("".join(translated.get(part, re.escape(part)) for part in parts))
