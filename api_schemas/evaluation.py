"""Evaluations of what a job exports by a suite of tasks, and the tasks that a folder holds."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from octet.api_schemas.base import Contract, SpecConflict
from octet.api_schemas.data import DataSpec
from octet.api_schemas.data.files import Files, absolute_path
from octet.api_schemas.data.jsonl import check_tokenizer
from octet.api_schemas.models import ModelSpec

HALF_WIDTH = "_half_width"
"""A score's name and this is the name of half its 95 % interval: 1.96 standard errors over the samples of its task."""

TaskName = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$")]
_MAX_BYTES = 1 << 20
_TASK = re.compile(r"""^task:[ \t]*["']?([\w-]+)""", re.MULTILINE)


class EvaluationSpec(Contract):
    """Tasks that a suite runs on a job's exports, which it computes as a server would. Scores are metrics of the step."""

    suite: Literal["lm-eval"] = "lm-eval"
    path: str = Field(
        max_length=4096,
        description="absolute path of the folder with the YAML files of the tasks, as the workers see it; they name local data",
    )
    tasks: tuple[TaskName, ...] = Field(min_length=1, max_length=16)
    every: int = Field(
        default=0,
        ge=0,
        description="steps between evaluations, of export.when every_checkpoint; the last step has one too; 0: only the last",
    )
    limit: int | None = Field(default=None, ge=1, description="samples of each task, its first ones; null: all")

    tokenizer: str | None = Field(
        default=None,
        max_length=4096,
        description="absolute path of the folder of the tokenizer that writes the tasks' texts; default: that of data or model",
    )

    @field_validator("path", "tokenizer")
    @classmethod
    def _path_is_absolute(cls, path: str | None, info: ValidationInfo) -> str | None:
        return None if path is None else absolute_path(f"evaluation.{info.field_name}", path)

    def is_due(self, step: int, last_step: int) -> bool:
        """Return True if the export of a step is evaluated. Those of `export.when` end and best always are."""
        return step == last_step or (self.every > 0 and step % self.every == 0)

    def tokenizer_folder(self, model: ModelSpec, data: DataSpec) -> Path | None:
        """Return the folder of the tokenizer; None if texts are bytes, as those of the data. Raises SpecConflict."""
        own = self.tokenizer or getattr(data.with_model(model.files), "tokenizer", None)
        if own is None and data.source == "text":
            return None
        if own is None and model.files is None:
            allowed, change = "the absolute path of a tokenizer's folder", "Set it: neither data nor model names a tokenizer."
            raise SpecConflict("evaluation.tokenizer", None, allowed, change)
        return Path(own or str(model.files))

    def check(self, model: ModelSpec, data: DataSpec, files: Files) -> None:
        """Look for the tokenizer, and for each task in the YAML files below the folder. Raises SpecConflict, and OSError."""
        if (folder := self.tokenizer_folder(model, data)) is not None:
            check_tokenizer(folder, files)
        found = set[str]()
        for name, is_file in files.list_below(Path(self.path), _is_read):
            if is_file and name.endswith(".yaml"):
                content = files.read(Path(self.path) / name, _MAX_BYTES)
                found.update(_TASK.findall(content.decode("utf-8", "replace")))
        if missing := [name for name in self.tasks if name not in found]:
            there = f"tasks in {self.path}: {', '.join(sorted(found)[:32]) or 'none'}"
            change = "Correct evaluation.tasks, or put a .yaml file with `task: NAME` into the folder."
            raise SpecConflict("evaluation.tasks", missing[0], there, change)


def _is_read(folder: str) -> bool:
    return not folder.rpartition("/")[2].startswith((".", "__"))
