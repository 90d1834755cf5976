"""A folder as `datasets.Dataset.save_to_disk` of Hugging Face writes it: Arrow files, their list, and the columns' types.

The control plane reads the two JSON files alone; ranks read rows through the package `datasets` (`worker/data/datasets.py`).
Nothing is downloaded and no code of a data set is run.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from octet.api_schemas.base import SpecConflict, refusal
from octet.api_schemas.data.augmentation import AugmentationSpec
from octet.api_schemas.data.base import Needs
from octet.api_schemas.data.files import ANY_FILE, Files
from octet.api_schemas.data.jsonl import RecordsSpec, check_tokenizer
from octet.api_schemas.inputs import BatchKind, ImageInput

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
MAX_JSON_BYTES = 16 << 20
LABEL_DTYPES = ("uint8", "uint16", "uint32", "int8", "int16", "int32", "int64")
Content = Literal["text", "messages", "prompts", "images"]
Column = Field(default=None, min_length=1, max_length=256)


class SavedDataset(NamedTuple):
    """The Arrow files of a folder, in order, and the JSON of the columns' types."""

    files: tuple[str, ...]
    info: Mapping[str, Any]

    @property
    def columns(self) -> Mapping[str, Any]:
        """The type of each column."""
        features: Mapping[str, Any] = self.info["features"]
        return features


class DatasetsSpec(RecordsSpec):
    """Rows of a saved data set: texts, conversations, prompts with completions, or images with classes.

    Columns say which: `text_column` (bytes, as source `text`; each row is a document), `messages_column`, `prompt_column` with
    `completion_column` (records, as source `jsonl`), or `image_column` with `label_column`. The share `evaluation_fraction` of
    the rows (at least one) is kept for evaluation; it is chosen at random, the same in every job.
    """

    reads_stores = False

    source: Literal["datasets"] = "datasets"
    text_column: str | None = Column
    messages_column: str | None = Column
    prompt_column: str | None = Column
    completion_column: str | None = Column
    image_column: str | None = Column
    label_column: str | None = Column
    evaluation_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    packing: bool = Field(default=False, description="keep rows in a sequence apart; records: several in one sequence")
    augmentation: AugmentationSpec = AugmentationSpec()

    @model_validator(mode="after")
    def _one_kind_of_columns(self) -> Self:
        named = {name for name in type(self).model_fields if name.endswith("_column") and getattr(self, name) is not None}
        kinds = ({"text_column"}, {"messages_column"}, {"prompt_column", "completion_column"}, {"image_column", "label_column"})
        if named not in kinds:
            allowed = " or ".join(" with ".join(sorted(kind)) for kind in kinds)
            raise refusal(
                "", got=", ".join(sorted(named)) or "no column", allowed=allowed, change="Name the columns to train on."
            )
        if self.content == "images" and self.packing:
            raise refusal("packing", got=True, allowed="false with images", change="Remove data.packing.")
        if self.content != "images" and self.augmentation != AugmentationSpec():
            raise refusal("augmentation", got="one", allowed="with images", change="Remove data.augmentation.")
        if self.content in ("text", "images") and self.tokenizer is not None:
            allowed = "with messages_column or prompt_column; text is read as bytes"
            raise refusal("tokenizer", got=self.tokenizer, allowed=allowed, change="Remove data.tokenizer.")
        return self

    @property
    def content(self) -> Content:
        """The kind of rows, as the named columns say."""
        if self.text_column is not None:
            return "text"
        if self.image_column is not None:
            return "images"
        return "prompts" if self.messages_column is None else "messages"

    @property
    def gives(self) -> BatchKind:
        """Images or tokens, by the named columns."""
        return "images" if self.content == "images" else "tokens"

    @property
    def min_vocab_size(self) -> int:
        """Text is read as bytes."""
        return 256 if self.content == "text" else 1

    @property
    def has_targets(self) -> bool:
        """Records say which tokens count."""
        return self.content in ("messages", "prompts")

    @property
    def is_packed(self) -> bool:
        """True if the spec sets `packing`."""
        return self.packing

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are read."""
        names = (getattr(self, name) for name in type(self).model_fields if name.endswith("_column"))
        return tuple(name for name in names if name is not None)

    def num_evaluation(self, num_rows: int) -> int:
        """Return how many rows are kept for evaluation."""
        return min(num_rows - 1, math.ceil(num_rows * self.evaluation_fraction))

    def check(self, path: Path, needs: Needs, files: Files = ANY_FILE) -> None:
        """Check as `SourceSpec.check` says: the files that the folder lists, the columns' types, and the tokenizer."""
        saved = read_saved(path, files)
        for name in saved.files:
            files.num_bytes(path / name)
        self.check_columns(path, saved, needs.images)
        if self.has_targets:
            assert self.tokenizer is not None
            if not check_tokenizer(Path(self.tokenizer), files) and self.content == "messages":
                allowed = f"a column of prompts and one of completions: the tokenizer in {self.tokenizer} has no chat template"
                raise SpecConflict(
                    "data.messages_column", self.messages_column, allowed, "Add a chat template to the tokenizer."
                )

    def check_columns(self, path: Path, saved: SavedDataset, takes: ImageInput | None) -> None:
        """Raise SpecConflict for a column that is missing or of another type, and for more classes than the model has."""
        for field in ("text_column", "prompt_column", "completion_column"):
            if (name := getattr(self, field)) is not None:
                self._require(saved, path, field, name, "of strings", _is_text)
        if self.messages_column is not None:
            allowed = "of lists of objects with the strings role and content"
            self._require(saved, path, "messages_column", self.messages_column, allowed, _is_messages)
        if self.image_column is None:
            return
        assert takes is not None
        assert self.label_column is not None
        self._require(saved, path, "image_column", self.image_column, "of images (Image)", _is_image)
        self._require(saved, path, "label_column", self.label_column, "of classes (ClassLabel) or whole numbers", _is_label)
        num_names = len(saved.columns[self.label_column].get("names") or ())
        if num_names > takes.num_classes:
            allowed = f"at least {num_names}, the number of classes in {self.label_column}"
            raise SpecConflict("model.num_classes", takes.num_classes, allowed, "Raise model.num_classes.")
        if takes.num_channels not in (1, 3):
            allowed = "1 (grey) or 3 (RGB) with source datasets"
            raise SpecConflict(
                "model.num_channels", takes.num_channels, allowed, "Change model.num_channels, or use a .npz file."
            )

    def _require(self, saved: SavedDataset, path: Path, field: str, name: str, allowed: str, fits: Any) -> None:
        found = saved.columns.get(name)
        if found is None:
            raise SpecConflict(
                f"data.{field}", name, f"a column of {path}: {', '.join(saved.columns)}", f"Change data.{field}."
            )
        if not fits(found):
            kind = found.get("dtype", found.get("_type", "another type")) if isinstance(found, dict) else "a list"
            raise SpecConflict(f"data.{field}", f"{name}, of {kind}", f"a column {allowed}", f"Change data.{field}.")


def read_saved(folder: Path, files: Files = ANY_FILE) -> SavedDataset:
    """Read the JSON of a saved data set. Raises SpecConflict if it is missing or wrong, and OSError."""
    change = "Save the data set with Dataset.save_to_disk."
    if (splits := _read_json(folder / SPLITS, files)) is not None:
        found = ", ".join(map(str, splits.get("splits", ())))
        raise SpecConflict("data.path", folder, f"the folder of one split: {found}", "Add the split's name to data.path.")
    state, info = _read_json(folder / STATE, files), _read_json(folder / INFO, files)
    if state is None or info is None:
        raise SpecConflict("data.path", folder, f"a folder with {STATE} and {INFO}", change)
    listed = state.get("_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in listed] if isinstance(listed, list) else []
    if not names or not all(isinstance(name, str) and name and "/" not in name and "\0" not in name for name in names):
        raise SpecConflict("data.path", folder / STATE, "a list of at least one Arrow file in this folder", change)
    if not isinstance(info.get("features"), dict):
        raise SpecConflict("data.path", folder / INFO, "the types of the columns (features)", change)
    return SavedDataset(tuple(map(str, names)), info)


def _read_json(path: Path, files: Files) -> dict[str, Any] | None:
    try:
        document = json.loads(files.read(path, MAX_JSON_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        if isinstance(error, SpecConflict):
            raise
        raise SpecConflict("data.path", path, "JSON", "Save the data set again.") from None
    if not isinstance(document, dict):
        raise SpecConflict("data.path", path, "an object", "Save the data set again.")
    return document


def _is_text(column: Any) -> bool:
    return isinstance(column, dict) and column.get("dtype") in ("string", "large_string")


def _is_messages(column: Any) -> bool:
    if isinstance(column, dict) and column.get("_type") in ("List", "LargeList", "Sequence"):
        column = [column.get("feature")]
    parts = column[0] if isinstance(column, list) and column else None
    return isinstance(parts, dict) and all(_is_text(parts.get(name)) for name in ("role", "content"))


def _is_image(column: Any) -> bool:
    return isinstance(column, dict) and column.get("_type") == "Image"


def _is_label(column: Any) -> bool:
    return isinstance(column, dict) and (column.get("_type") == "ClassLabel" or column.get("dtype") in LABEL_DTYPES)
