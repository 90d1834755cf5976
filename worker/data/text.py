"""Text as bytes, or as a tokenizer's tokens; the contract selects and divides the files (`api_schemas/data/text.py`)."""

from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octet.api_schemas import ANY_FILE, Files, SpecConflict, TextSpec
from octet.worker.common.errors import DataError
from octet.worker.data.tokenizer import RecordTokenizer
from octet.worker.data.windows import DocumentWindows, HeldTokens, Tokens, TokenWindows, num_windows


def open_source(spec: TextSpec, sequence_length: int, seed: int, files: Files = ANY_FILE) -> TokenWindows:
    """Read the corpus. Raises DataError if it cannot be read or a part is shorter than one sequence."""
    root = spec.place
    try:
        spec.check_local_parts(files)
        if files.is_folder(root):
            train_texts, evaluation_texts, counts = _read_folder(root, spec, files)
        else:
            spec.refuse_to_pack_one_file()
            train_texts, evaluation_texts, counts = _read_file(root, spec, files)
    except SpecConflict as conflict:
        raise DataError(str(conflict)) from None
    except OSError as error:
        raise DataError(f"cannot read {error.filename or root}: {error.strerror}. Make it readable or exclude it.") from error
    counts |= {"train_bytes": _joined_bytes(train_texts), "evaluation_bytes": _joined_bytes(evaluation_texts)}
    if spec.tokenizer is None:
        train, starts = _as_bytes(train_texts)
        evaluation, evaluation_starts = _as_bytes(evaluation_texts)
    else:
        tokenizer = RecordTokenizer(Path(spec.tokenizer), files)
        train, starts = _tokenized(train_texts, tokenizer, root)
        evaluation, evaluation_starts = _tokenized(evaluation_texts, tokenizer, root)
        counts |= {
            "train_tokens": len(train),
            "evaluation_tokens": len(evaluation),
            "vocab_size": max(map(_vocab_size, (train, evaluation))),
        }
    counts["unigram_entropy_nats"] = unigram_entropy_nats(evaluation)
    parts = (train, evaluation, sequence_length, seed, counts)
    data = DocumentWindows(*parts, starts, evaluation_starts) if spec.packing else TokenWindows(*parts)
    for name, tokens in (("training", data.train), ("evaluation", data.evaluation)):
        _require_a_window(name, tokens, sequence_length, spec)
    return data


def _as_bytes(texts: dict[str, bytes]) -> tuple[Tokens, Tensor]:
    """Return texts joined by line feeds, and where each begins."""
    starts = accumulate((len(text) + 1 for text in list(texts.values())[:-1]), initial=0)
    return _held(b"\n".join(texts.values())), torch.tensor(list(starts))


def _tokenized(texts: dict[str, bytes], tokenizer: RecordTokenizer, root: Path) -> tuple[Tokens, Tensor]:
    """Return the tokens of texts, and where each begins. A text of fewer than two tokens, none to learn, is left out."""
    encoded = []
    for name, text in texts.items():
        try:
            tokens = tokenizer.encode_part(text.decode(), begins=True, ends=True)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{root / name} is not UTF-8 at byte {error.start}: {error.reason}; allowed: text in UTF-8, for a tokenizer. "
                "Convert it, or change data.exclude."
            ) from error
        encoded += [tokens] if len(tokens) > 1 else []
    joined = np.concatenate([np.array(tokens, dtype=np.int32) for tokens in encoded] or [np.empty(0, dtype=np.int32)])
    return HeldTokens(joined), torch.tensor(list(accumulate(map(len, encoded[:-1]), initial=0)))


def _vocab_size(tokens: Tokens) -> int:
    """One more than the largest token."""
    return int(tokens.read(0, len(tokens)).max()) + 1 if len(tokens) else 0


def _held(text: bytes) -> HeldTokens:
    """Return bytes, one token each."""
    return HeldTokens(np.frombuffer(text, dtype=np.uint8))


def _joined_bytes(texts: dict[str, bytes]) -> int:
    return sum(map(len, texts.values())) + max(0, len(texts) - 1)  # one line feed between files


def unigram_entropy_nats(tokens: Tokens) -> float:
    """Return the entropy of single tokens' distribution, in nats each: the best loss of a model that ignores context."""
    if not len(tokens):
        return 0.0
    counts = torch.bincount(tokens.read(0, len(tokens)), minlength=256).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log()).sum())


def _require_a_window(name: str, tokens: Tokens, sequence_length: int, spec: TextSpec) -> None:
    if num_windows(tokens, sequence_length) < 1:
        raise DataError(
            f"the {name} text of {spec.path} must hold more than {sequence_length} bytes; got {len(tokens)}. Add text, "
            "shorten training.sequence_length, or change data.evaluation_fraction."
        )


def _read_file(path: Path, spec: TextSpec, files: Files) -> tuple[dict[str, bytes], dict[str, bytes], dict[str, float]]:
    try:
        whole = files.read(path)
    except (FileNotFoundError, NotADirectoryError):
        message = f"data.path {path} is neither a file nor a folder on this node. Mount it or change data.path."
        raise DataError(message) from None
    cut = spec.divide_bytes(len(whole))
    while spec.tokenizer is not None and cut < len(whole) and whole[cut] & 0xC0 == 0x80:
        cut += 1  # not inside a character
    return {"": whole[:cut]}, {"": whole[cut:]}, {"train_files": 1, "evaluation_files": 1, "binary_files": 0}


def _read_folder(root: Path, spec: TextSpec, files: Files) -> tuple[dict[str, bytes], dict[str, bytes], dict[str, float]]:
    texts, num_binary = {}, 0
    for name, is_read in spec.entries(root, files):
        if is_read:
            content = files.read(root / name)
            if spec.is_binary(content):
                num_binary += 1
            elif content or not spec.packing:
                texts[name] = content
    if len(texts) < 2:
        raise spec.too_few_files(len(texts))
    train, evaluation = spec.divide_files(texts)
    counts: dict[str, float] = {
        "train_files": len(train),
        "evaluation_files": len(evaluation),
        "binary_files": num_binary,
    }
    return {name: texts[name] for name in train}, {name: texts[name] for name in evaluation}, counts
