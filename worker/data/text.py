"""Text as bytes; the contract selects and divides the files (`api_schemas/data/text.py`)."""

from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from api_schemas import ANY_FILE, Files, TextSpec, Unfit
from worker.data.windows import DocumentWindows, Tokens, TokenWindows, num_windows
from worker.errors import DataError


class ByteTokens:
    """Bytes in memory, one token each."""

    def __init__(self, text: bytes) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)

    def __len__(self) -> int:
        return self._text.numel()

    def read(self, start: int, stop: int) -> Tensor:
        """Return the bytes of a range, int64 (stop - start,)."""
        return self._text[start:stop].to(torch.int64)


def open_source(spec: TextSpec, sequence_length: int, seed: int, files: Files = ANY_FILE) -> TokenWindows:
    """Read the corpus. Raises DataError if it cannot be read or a part is shorter than one sequence."""
    root = spec.place
    starts: list[Tensor] = []
    try:
        if files.is_folder(root):
            train_texts, evaluation_texts, counts = _read_folder(root, spec, files)
            train, evaluation = b"\n".join(train_texts), b"\n".join(evaluation_texts)
            starts = [_starts(train_texts), _starts(evaluation_texts)]
        else:
            spec.refuse_to_pack_one_file()
            train, evaluation, counts = _read_file(root, spec, files)
    except Unfit as unfit:
        raise DataError(str(unfit)) from None
    except OSError as error:
        raise DataError(f"cannot read {error.filename or root}: {error.strerror}. Make it readable or exclude it.") from error
    sizes = {"train_bytes": len(train), "evaluation_bytes": len(evaluation)}
    entropy = {"unigram_entropy_nats": unigram_entropy_nats(evaluation)}
    parts = (ByteTokens(train), ByteTokens(evaluation), sequence_length, seed, counts | sizes | entropy)
    data = DocumentWindows(*parts, *starts) if spec.packing else TokenWindows(*parts)
    for name, tokens in (("training", data.train), ("evaluation", data.evaluation)):
        _require_a_window(name, tokens, sequence_length, spec)
    return data


def unigram_entropy_nats(text: bytes) -> float:
    """Entropy of the distribution of single bytes, in nats per byte: the best loss of a model that ignores context."""
    if not text:
        return 0.0
    counts = torch.bincount(ByteTokens(text).read(0, len(text)), minlength=256).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log()).sum())


def _require_a_window(name: str, tokens: Tokens, sequence_length: int, spec: TextSpec) -> None:
    if num_windows(tokens, sequence_length) < 1:
        raise DataError(
            f"the {name} text of {spec.path} must hold more than {sequence_length} bytes; got {len(tokens)}. Add text, "
            "shorten training.sequence_length, or change data.evaluation_fraction."
        )


def _read_file(path: Path, spec: TextSpec, files: Files) -> tuple[bytes, bytes, dict[str, float]]:
    try:
        whole = files.read(path)
    except (FileNotFoundError, NotADirectoryError):
        message = f"data.path {path} is neither a file nor a folder on this node. Mount it or change data.path."
        raise DataError(message) from None
    cut = spec.divide_bytes(len(whole))
    return whole[:cut], whole[cut:], {"train_files": 1, "evaluation_files": 1, "binary_files": 0}


def _starts(texts: list[bytes]) -> Tensor:
    """Return where each text begins in the joined ones, int64."""
    return torch.tensor(list(accumulate((len(text) + 1 for text in texts[:-1]), initial=0)))


def _read_folder(root: Path, spec: TextSpec, files: Files) -> tuple[list[bytes], list[bytes], dict[str, float]]:
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
    return [texts[name] for name in train], [texts[name] for name in evaluation], counts
