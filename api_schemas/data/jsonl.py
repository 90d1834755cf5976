"""Prompts with completions, and conversations: one JSON object a line. Only completions count in the loss.

    {"prompt": "The capital of France is", "completion": " Paris."}
    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}

A conversation is written by the tokenizer's chat template, and each message of the assistant is a completion. Service and ranks
read a line by the same rules (`read_record`). The service reads the first `MAX_CHECKED_BYTES`, a rank reads everything.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, field_validator

from octet.api_schemas.base import SpecConflict
from octet.api_schemas.data.base import Needs, SourceSpec
from octet.api_schemas.data.files import ANY_FILE, Files, absolute_path

MAX_LINE_BYTES = 16 << 20
MAX_CHECKED_BYTES = 16 << 20
MAX_TOKENIZER_BYTES = 256 << 20
SUFFIX = ".jsonl"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
"""A tokenizer has at least one of these files."""
TOKENIZER_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Further files that a tokenizer may have."""
UNREAD_FIELDS = ("tools", "functions", "tool_calls", "function_call")


class Prompted(NamedTuple):
    """A prompt and the completion to learn."""

    prompt: str
    completion: str


class Chat(NamedTuple):
    """A conversation; each message has the keys role and content."""

    messages: list[dict[str, str]]


Record = Prompted | Chat


class Line(NamedTuple):
    """A record and where it stands. number: of the line, from 1."""

    file: Path
    number: int
    record: Record


class RecordsSpec(SourceSpec):
    """Base of the sources whose records a tokenizer encodes."""

    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="absolute path of a folder with a tokenizer, as the workers see it; default: model.path",
    )

    @field_validator("tokenizer")
    @classmethod
    def _tokenizer_is_absolute(cls, path: str | None) -> str | None:
        return absolute_tokenizer(path)

    def with_model(self, model_folder: str | None) -> Self:
        """Take the model's tokenizer if the spec reads one and names none."""
        if self.tokenizer is not None or not self.reads_tokenizer:
            return self
        return self.model_copy(update={"tokenizer": model_folder})

    @property
    def reads_tokenizer(self) -> bool:
        """Records are text."""
        return self.has_targets


class JsonlSpec(RecordsSpec):
    """Prompts with completions, or conversations, from a .jsonl file or the .jsonl files of a folder.

    The share `evaluation_fraction` of the records (at least one) is kept for evaluation; it is chosen at random, the same in
    every job. A record longer than `training.sequence_length` is cut at its end, a shorter one is padded.
    With `packing` a sample is a row of `training.sequence_length` tokens with as many records as fit. No record sees another:
    attention and positions begin again at each.
    """

    source: Literal["jsonl"] = "jsonl"
    evaluation_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    packing: bool = Field(default=False, description="several records in one sequence, which do not see each other")

    @property
    def has_targets(self) -> bool:
        """Records say which tokens count."""
        return True

    @property
    def is_packed(self) -> bool:
        """True if the spec sets `packing`."""
        return self.packing

    def num_evaluation(self, num_records: int) -> int:
        """Return how many records are kept for evaluation."""
        return min(num_records - 1, math.ceil(num_records * self.evaluation_fraction))

    def check_local_parts(self, files: Files = ANY_FILE) -> None:
        """Check the tokenizer's files."""
        assert self.tokenizer is not None
        check_tokenizer(Path(self.tokenizer), files)

    def check(self, path: Path, needs: Needs, files: Files = ANY_FILE) -> None:
        """Check as `SourceSpec.check` says: the tokenizer's files, and the lines at the beginning of the data."""
        assert self.tokenizer is not None
        has_template = check_tokenizer(Path(self.tokenizer), files)
        num_records = 0
        for line in self.lines(path, files, MAX_CHECKED_BYTES):
            num_records += 1
            if isinstance(line.record, Chat) and not has_template:
                raise no_template(line, Path(self.tokenizer))
        if num_records < 2:
            allowed = "at least two records: one to train on, one to evaluate"
            raise SpecConflict("data.path", f"{path} with {num_records} records", allowed, "Add records.")

    def lines(self, path: Path, files: Files = ANY_FILE, max_bytes: int | None = None) -> Iterator[Line]:
        """Yield the records of the files, in order of their names. Blank lines are left out.

        max_bytes: stop after so many bytes. Raises SpecConflict, which names file and line, for a line that is no record.
        """
        num_bytes = 0
        for file in self._files(path, files):
            with files.open(file) as opened:
                number = 0
                while text := opened.readline(MAX_LINE_BYTES + 1):
                    number, num_bytes = number + 1, num_bytes + len(text)
                    if text.strip():
                        yield Line(file, number, _read_line(file, number, text))
                    if max_bytes is not None and num_bytes >= max_bytes:
                        return

    def _files(self, path: Path, files: Files) -> list[Path]:
        if not files.is_folder(path):
            return [path]
        names = sorted(name for name, is_file in files.list_below(path, _no_subfolder) if is_file and name.endswith(SUFFIX))
        if not names:
            raise SpecConflict("data.path", path, f"a {SUFFIX} file, or a folder with {SUFFIX} files", "Change data.path.")
        return [path / name for name in names]


def read_record(text: bytes) -> Record:
    """Read one line. Raises ValueError, which says what the line has and what it should have."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    return record_of(document)


def record_of(document: Any) -> Record:
    """Return the record of a parsed line. Raises ValueError, which says what the line has and what it should have."""
    if not isinstance(document, dict):
        raise ValueError(f"a {type(document).__name__}, not an object with prompt and completion, or with messages")
    unread = [name for name in UNREAD_FIELDS if document.get(name)]
    if unread:
        raise ValueError(f"{unread[0]} is not supported: messages have role and content alone")
    if "messages" in document:
        return Chat(_messages(document["messages"]))
    for name in ("prompt", "completion"):
        if not isinstance(document.get(name), str):
            found = f"{name} is a {type(document[name]).__name__}" if name in document else f"no {name}"
            raise ValueError(f"{found}; it has to be a string, or the line has messages")
    if not document["completion"]:
        raise ValueError("completion is empty, so there is nothing to learn")
    return Prompted(document["prompt"], document["completion"])


def absolute_tokenizer(path: str | None) -> str | None:
    """Return a tokenizer's path as it is. Raises a refusal unless it is absolute."""
    return None if path is None else absolute_path("data.tokenizer", path)


def has_tokenizer(folder: Path, files: Files = ANY_FILE) -> bool:
    """Return True if a folder has the files of a tokenizer. Raises SpecConflict or OSError."""
    return any(_has(folder, name, files) for name in TOKENIZER_FILES)


def check_tokenizer(folder: Path, files: Files = ANY_FILE) -> bool:
    """Check that a folder holds a tokenizer; returns True if it has a chat template. Raises SpecConflict or OSError."""
    if not has_tokenizer(folder, files):
        allowed = f"a folder with a tokenizer, as save_pretrained writes it: one of {', '.join(TOKENIZER_FILES)}"
        raise SpecConflict("data.tokenizer", folder, allowed, "Save the tokenizer there, or set data.tokenizer.")
    if _has(folder, "chat_template.jinja", files):
        return True
    try:
        settings = json.loads(read_tokenizer_file(folder, "tokenizer_config.json", files) or b"{}")
    except (ValueError, RecursionError):
        name = folder / "tokenizer_config.json"
        raise SpecConflict("data.tokenizer", name, "settings in JSON", "Save the tokenizer again.") from None
    return isinstance(settings, dict) and bool(settings.get("chat_template"))


def read_tokenizer_file(folder: Path, name: str, files: Files = ANY_FILE) -> bytes | None:
    """Read a file of a tokenizer, or None if there is no such file. Raises SpecConflict or OSError."""
    try:
        if files.num_bytes(folder / name) > MAX_TOKENIZER_BYTES:
            raise SpecConflict(
                "data.tokenizer", folder / name, f"at most {MAX_TOKENIZER_BYTES} bytes", "Save the tokenizer again."
            )
        return files.read(folder / name, MAX_TOKENIZER_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except SpecConflict as conflict:
        raise conflict.moved_to("data.tokenizer", "data.tokenizer or model.path") from None


def no_template(line: Line, tokenizer: Path) -> SpecConflict:
    """Build the error of a conversation whose tokenizer has no chat template."""
    got = f"{line.file.name} line {line.number}: messages"
    allowed = f"prompt and completion: the tokenizer in {tokenizer} has no chat template"
    return SpecConflict("data.path", got, allowed, "Add a chat template to the tokenizer, or write prompts and completions.")


def _read_line(file: Path, number: int, text: bytes) -> Record:
    where = f"{file.name} line {number}"
    if len(text) > MAX_LINE_BYTES:
        raise SpecConflict("data.path", f"{where} of more than {MAX_LINE_BYTES} bytes", "shorter lines", "Shorten the record.")
    try:
        return read_record(text)
    except ValueError as error:
        allowed = "an object with the strings prompt and completion, or with messages of role and content"
        raise SpecConflict("data.path", f"{where}: {error}", allowed, "Correct the line or remove it.") from None


def _messages(found: Any) -> list[dict[str, str]]:
    if not isinstance(found, list):
        raise ValueError(f"messages is a {type(found).__name__}; it has to be a list")
    messages = [_message(number, message) for number, message in enumerate(found)]
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no message of the role assistant, so there is nothing to learn")
    return messages


def _message(number: int, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is a {type(message).__name__}; it has to be an object with role and content")
    unread = [name for name in UNREAD_FIELDS if message.get(name)]
    if unread:
        raise ValueError(f"message {number}: {unread[0]} is not supported: messages have role and content alone")
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise ValueError(f"message {number}: {name} has to be a string; got {type(message.get(name)).__name__}")
    if message["role"] == "assistant" and not message["content"]:
        raise ValueError(f"message {number} of the assistant is empty, so there is nothing to learn")
    return {"role": message["role"], "content": message["content"]}


def _has(folder: Path, name: str, files: Files) -> bool:
    try:
        files.num_bytes(folder / name)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except SpecConflict as conflict:
        raise conflict.moved_to("data.tokenizer") from None
    return True


def _no_subfolder(_name: str) -> bool:
    return False
