"""Rows of a data set that Hugging Face's `datasets` saved, memory-mapped; `api_schemas/data/datasets.py` checks it.

Each Arrow file is opened by the rules for data (`Files`) and mapped from its open descriptor, so a link that leads elsewhere is
never followed. Only the rows that are read come into memory: of texts, 8 bytes a row are held; records are held as tokens.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from octet.api_schemas import ANY_FILE, Files, ImageInput, SpecConflict
from octet.api_schemas.data.datasets import DatasetsSpec, SavedDataset, read_saved
from octet.api_schemas.data.jsonl import Chat, Line, Prompted, Record, record_of
from octet.worker.common.errors import DataError
from octet.worker.data.image_parts import Parts
from octet.worker.data.jsonl import Completions
from octet.worker.data.order import seed_of
from octet.worker.data.source import Source
from octet.worker.data.tokenizer import RecordTokenizer, TokenizedRecords
from octet.worker.data.varied_images import VariedImages
from octet.worker.data.windows import DocumentWindows, TokenWindows, num_windows

MISSING = (
    'this node has no package "datasets", which reads saved data sets. Install octet-fp8[datasets], or save them as .jsonl.'
)


class RowBytes:
    """The texts of some rows as bytes, one token each, with a line feed after each text. Row: a number in the column."""

    def __init__(self, column: Any, rows: np.ndarray, num_bytes: np.ndarray) -> None:
        """column: a pyarrow ChunkedArray of strings. rows: ascending. num_bytes: of each of these rows' texts."""
        self._column, self._rows = column, rows
        self.starts = np.concatenate([[0], np.cumsum(num_bytes + 1)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> Tensor:
        """Return the bytes of a range, int64 (stop - start,)."""
        if stop <= start:
            return torch.empty(0, dtype=torch.int64)
        first, last = (int(np.searchsorted(self.starts, place, side="right")) - 1 for place in (start, stop - 1))
        texts = b"".join(self._column[int(row)].as_py().encode() + b"\n" for row in self._rows[first : last + 1])
        taken = texts[start - int(self.starts[first]) : stop - int(self.starts[first])]
        return torch.frombuffer(bytearray(taken), dtype=torch.uint8).to(torch.int64)

    def read_rows(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Return `length` bytes from each start on, (rows, length)."""
        return torch.stack([self.read(int(start), int(start) + length) for start in starts]).numpy()


@dataclass
class RowStock:
    """A `Stock` of the images in a column. labels_N: int64 (N,)."""

    folder: Path
    rows: Any = field(repr=False)
    column: str
    mode: str
    labels_N: Tensor = field(repr=False)

    def read(self, number: int) -> Image.Image:
        """Decode an image. Raises DataError with the number of a row whose image is not in the file or cannot be decoded."""
        content = self.rows[number][self.column]
        if content is None or content.get("bytes") is None:  # a path in it could name any file of this node
            raise DataError(f"row {number} of {self.folder} has no image in the file. Save the data set with its images.")
        try:
            with Image.open(io.BytesIO(content["bytes"])) as image:
                return image.convert(self.mode)
        except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
            raise DataError(f"cannot decode the image of row {number} of {self.folder}: {error}. Replace the row.") from error


def open_source(spec: DatasetsSpec, length_or_input: int | ImageInput, seed: int, files: Files = ANY_FILE) -> Source:
    """Open a saved data set. Raises DataError if it cannot be read, does not fit the spec, or holds too little."""
    folder, takes = spec.place, length_or_input if isinstance(length_or_input, ImageInput) else None
    try:
        saved = read_saved(folder, files)
        spec.check_columns(folder, saved, takes)
        rows = _mapped(folder, saved, spec, files)
        if len(rows) < 2:
            raise DataError(
                f"{folder} has {len(rows)} rows; allowed: at least two, one to train on, one to evaluate. Add rows."
            )
        if takes is not None:
            return _images(spec, rows, takes, seed)
        assert isinstance(length_or_input, int)
        return (_texts if spec.content == "text" else _records)(spec, rows, length_or_input, seed, files)
    except SpecConflict as conflict:
        raise DataError(str(conflict)) from None
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename or folder}: {error.strerror or error}. Save the data set again."
        ) from error


def _mapped(folder: Path, saved: SavedDataset, spec: DatasetsSpec, files: Files) -> Any:
    """Map the Arrow files, and return the columns that the spec names. Images stay bytes."""
    try:
        from datasets import Dataset, DatasetInfo, concatenate_datasets
        from datasets import Image as EncodedImage
    except ModuleNotFoundError as error:
        raise DataError(MISSING) from error
    info = DatasetInfo.from_dict({"features": dict(saved.columns)})
    with ExitStack() as stack:  # a mapping outlives its descriptor
        parts = []
        for name in saved.files:
            file = stack.enter_context(files.open(folder / name))
            try:
                parts.append(Dataset.from_file(f"/proc/self/fd/{file.fileno()}", info=info))
            except (ValueError, TypeError, KeyError) as error:  # of pyarrow and of datasets
                message = f"{folder / name} is not an Arrow file of the columns in dataset_info.json: {error}. Save it again."
                raise DataError(message) from error
    rows = concatenate_datasets(parts).select_columns(list(spec.columns))
    return rows if spec.image_column is None else rows.cast_column(spec.image_column, EncodedImage(decode=False))


def _divided(spec: DatasetsSpec, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the rows for training and for evaluation, int64, in random order."""
    shuffled = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed_of("evaluation rows")))
    num_evaluation = spec.num_evaluation(num_rows)
    return shuffled[num_evaluation:], shuffled[:num_evaluation]


def _texts(spec: DatasetsSpec, rows: Any, sequence_length: int, seed: int, _files: Files) -> TokenWindows:
    import pyarrow.compute as compute

    column = rows.data.column(spec.text_column)
    if column.null_count:
        raise DataError(f"{column.null_count} rows of {spec.path} have no text in {spec.text_column}. Remove them.")
    num_bytes_N = compute.binary_length(column).to_numpy().astype(np.int64)
    parts = []
    for name, numbers in zip(("training", "evaluation"), _divided(spec, len(rows)), strict=True):
        numbers_N = np.sort(numbers.numpy())
        if spec.packing:
            numbers_N = numbers_N[num_bytes_N[numbers_N] > 0]
        parts.append(RowBytes(column, numbers_N, num_bytes_N[numbers_N]))
        if num_windows(parts[-1], sequence_length) < 1:
            raise DataError(
                f"the {name} rows of {spec.path} must hold more than {sequence_length} bytes; got {len(parts[-1])}. Add rows, "
                "shorten training.sequence_length, or change data.evaluation_fraction."
            )
    train, evaluation = parts
    facts = {"train_bytes": float(len(train)), "evaluation_bytes": float(len(evaluation))}
    if not spec.packing:
        return TokenWindows(train, evaluation, sequence_length, seed, facts)
    starts = [torch.from_numpy(part.starts[:-1]) for part in parts]
    return DocumentWindows(train, evaluation, sequence_length, seed, facts, *starts)


def _records(spec: DatasetsSpec, rows: Any, sequence_length: int, seed: int, files: Files) -> Completions:
    assert spec.tokenizer is not None, "the job's model has completed the spec"
    tokenizer = RecordTokenizer(Path(spec.tokenizer), files)
    records = TokenizedRecords(tokenizer.encode(_lines(spec, rows)), sequence_length + 1)
    if len(records) < 2:
        raise DataError(
            f"{spec.path} has {len(records)} rows with a completion in their first {sequence_length + 1} tokens; "
            f"{records.num_left_out} more have none; allowed: at least two. Add rows, or raise training.sequence_length."
        )
    train, evaluation = _divided(spec, len(records))
    return Completions(records, train.tolist(), evaluation.tolist(), sequence_length, seed, spec.packing)


def _lines(spec: DatasetsSpec, rows: Any) -> Iterator[Line]:
    for number, row in enumerate(rows):
        try:
            yield Line(spec.place, number, _record(spec, row))
        except ValueError as error:
            raise DataError(f"row {number} of {spec.path}: {error}. Correct the row or remove it.") from None


def _record(spec: DatasetsSpec, row: dict[str, Any]) -> Record:
    if spec.messages_column is not None:
        record = record_of({"messages": row[spec.messages_column]})
        assert isinstance(record, Chat)
        return record
    assert spec.prompt_column is not None
    assert spec.completion_column is not None
    record = record_of({"prompt": row[spec.prompt_column], "completion": row[spec.completion_column]})
    assert isinstance(record, Prompted)
    return record


def _images(spec: DatasetsSpec, rows: Any, takes: ImageInput, seed: int) -> VariedImages:
    assert spec.image_column is not None
    labels = rows.data.column(spec.label_column)
    if labels.null_count:
        raise DataError(f"{labels.null_count} rows of {spec.path} have no class in {spec.label_column}. Remove them.")
    labels_N = torch.from_numpy(labels.to_numpy().astype(np.int64))
    if not 0 <= int(labels_N.min()) <= int(labels_N.max()) < takes.num_classes:
        raise DataError(
            f"the classes in {spec.label_column} of {spec.path} go from {labels_N.min()} to {labels_N.max()}; allowed: 0 to "
            f"{takes.num_classes - 1}, as the model has {takes.num_classes} classes. Change model.num_classes or the labels."
        )
    mode = "L" if takes.num_channels == 1 else "RGB"
    stock = RowStock(spec.place, rows, spec.image_column, mode, labels_N)
    return VariedImages(stock.labels_N, Parts(*_divided(spec, len(rows))), seed, stock, takes, spec.augmentation)
