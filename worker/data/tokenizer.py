"""A tokenizer of transformers from a folder, and records as its tokens with a mark on those that count in the loss.

A folder's files are opened by the rules for data (`Files`) and copied to a private folder, from which transformers reads them:
a file that changes in between, or a link that leads elsewhere, is never followed. No remote code is loaded.
"""

import bisect
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from octet.api_schemas import ANY_FILE, Files, SpecConflict
from octet.api_schemas.data.jsonl import (
    TOKENIZER_FILES,
    TOKENIZER_SETTINGS,
    Chat,
    Line,
    Prompted,
    check_tokenizer,
    no_template,
    read_tokenizer_file,
)
from octet.worker.common.errors import DataError

RECORDS_AT_ONCE = 256


class Span(NamedTuple):
    """Characters of a text, from start up to stop."""

    start: int
    stop: int


class Encoded(NamedTuple):
    """The tokens of a record. counts: True for each token that the loss counts as a target."""

    tokens: Sequence[int]
    counts: Sequence[bool]


class RecordTokenizer:
    """Encodes records. Conversations are written by the chat template."""

    def __init__(self, folder: Path, files: Files = ANY_FILE) -> None:
        """Load the tokenizer of a folder. Raises DataError if it has none that transformers can load without code."""
        self.folder = folder
        try:
            self.has_template = check_tokenizer(folder, files)
            self._tokenizer = load_tokenizer(folder, files)
        except SpecConflict as conflict:
            raise DataError(str(conflict)) from None
        except OSError as error:
            raise DataError(f"data.tokenizer: cannot read {error.filename or folder}: {error.strerror}.") from error
        if not self._tokenizer.is_fast:
            raise DataError(
                f"data.tokenizer: {type(self._tokenizer).__name__} in {folder} is slow; allowed: a fast tokenizer, which tells "
                "where each token stands in the text. Save it as tokenizer.json."
            )
        bos = self._tokenizer.bos_token_id
        self._first = [bos] if bos is not None and self._tokenizer("")["input_ids"][:1] == [bos] else []
        eos = self._tokenizer.eos_token_id
        self._last = [eos] if eos is not None else []

    def encode(self, lines: Iterator[Line]) -> Iterator[Encoded]:
        """Encode records in order, several at a time. Raises DataError, which names the line, for what cannot be written."""
        while chunk := list(islice(lines, RECORDS_AT_ONCE)):
            texts, spans = zip(*map(self._written, chunk), strict=True)
            found = self._tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
            for line, tokens, offsets, spans_of_text in zip(
                chunk, found["input_ids"], found["offset_mapping"], spans, strict=True
            ):
                counts = _covered(offsets, spans_of_text)
                if isinstance(line.record, Prompted):
                    tokens = [*self._first, *tokens, *self._last]
                    counts = [*(False for _ in self._first), *counts, *(True for _ in self._last)]
                yield Encoded(tokens, counts)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token, added ones included."""
        return len(self._tokenizer)

    def encode_part(self, text: str, *, begins: bool, ends: bool) -> list[int]:
        """Encode a part of a document. begins, ends: whether it is the first or the last, which have special tokens there."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*(self._first if begins else ()), *tokens, *(self._last if ends else ())]

    def _written(self, line: Line) -> tuple[str, list[Span]]:
        """Return a record's text, and the spans of its completions."""
        if isinstance(line.record, Prompted):
            prompt, completion = line.record
            return prompt + completion, [Span(len(prompt), len(prompt) + len(completion))]
        if not self.has_template:
            raise DataError(str(no_template(line, self.folder)))
        return self._conversation(line, line.record)

    def _conversation(self, line: Line, chat: Chat) -> tuple[str, list[Span]]:
        """Write a conversation. A completion begins where a prompt for it ends, and goes on to the end of its message."""
        whole = self._apply_template(line, chat.messages)
        spans = []
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            before = self._apply_template(line, chat.messages[:number], add_generation_prompt=True)
            after = self._apply_template(line, chat.messages[: number + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                raise DataError(
                    f"{line.file.name} line {line.number}: the chat template in {self.folder} writes message {number} in "
                    "another way when others follow; allowed: a template that only adds to what it wrote. End the conversation "
                    "there, or change the template."
                )
            spans.append(Span(len(before), len(after)))
        return whole, spans

    def _apply_template(self, line: Line, messages: list[dict[str, str]], **options: Any) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except TemplateError as error:
            raise DataError(
                f"{line.file.name} line {line.number}: the chat template in {self.folder} refuses the conversation: {error}. "
                "Correct the line or remove it."
            ) from error
        return text


class TokenizedRecords:
    """Records as tokens in memory, 5 bytes a token. Records without a token to learn are left out and counted."""

    def __init__(self, records: Iterator[Encoded], max_tokens: int) -> None:
        """max_tokens: longer records are cut at their end."""
        tokens, counts, lengths = [], [], [0]
        self.num_cut = self.num_left_out = 0
        for record in records:
            kept = np.asarray(record.counts[:max_tokens], dtype=np.bool_)
            if not kept[1:].any():  # the first token is nobody's target
                self.num_left_out += 1
                continue
            self.num_cut += len(record.tokens) > max_tokens
            tokens.append(np.asarray(record.tokens[:max_tokens], dtype=np.int32))
            counts.append(kept)
            lengths.append(len(kept))
        self._tokens = np.concatenate(tokens) if tokens else np.empty(0, dtype=np.int32)
        self._counts = np.concatenate(counts) if counts else np.empty(0, dtype=np.bool_)
        self._ends = np.cumsum(lengths)
        self.lengths = np.diff(self._ends)
        self.num_targets = np.array(
            [self._counts[start + 1 : stop].sum() for start, stop in pairwise(self._ends)], dtype=np.int64
        )

    def __len__(self) -> int:
        return len(self.num_targets)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a record's tokens, int32 (L,), and which of them count, bool (L,)."""
        start, stop = self._ends[number], self._ends[number + 1]
        return self._tokens[start:stop], self._counts[start:stop]

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""
        return int(self._tokens.max()) + 1 if len(self._tokens) else 0


def load_tokenizer(folder: Path, files: Files) -> Any:
    """Load a folder's tokenizer as transformers does, without code of the folder's own. Raises DataError."""
    from octet.worker.models.huggingface import transformers

    with TemporaryDirectory(prefix="octet-tokenizer-") as copy:
        for name in (*TOKENIZER_FILES, *TOKENIZER_SETTINGS, "config.json"):
            content = read_tokenizer_file(folder, name, files)
            if content is not None:
                (Path(copy) / name).write_bytes(content)
        try:
            return transformers().AutoTokenizer.from_pretrained(copy, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # the files are a user's, and transformers raises whatever it stumbles over
            raise DataError(
                f"data.tokenizer: transformers cannot load the tokenizer in {folder}: {error}. Save it again with "
                "save_pretrained; code of the folder's own is not run."
            ) from error


def _covered(offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> list[bool]:
    """Mark the tokens that have characters in one of the spans, which ascend. offsets: start and stop of each token."""
    starts = [span.start for span in spans]
    covered = []
    for start, stop in offsets:
        found = bisect.bisect_left(starts, stop) - 1  # the last span that begins before the token ends
        covered.append(found >= 0 and start < spans[found].stop)
    return covered
