"""Data sets for tests, saved as `datasets.Dataset.save_to_disk` does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from octet.api_schemas.data.datasets import DatasetsSpec
from tests.kit.chat import save_tokenizer, write_chats
from tests.kit.text import text


def save(folder: Path, rows: dict[str, Any], types: dict[str, Any], num_shards: int = 2) -> Path:
    """Save columns of these types of `datasets.Features`."""
    from datasets import Dataset, Features, disable_progress_bars

    disable_progress_bars()
    Dataset.from_dict(rows, features=Features(types)).save_to_disk(folder, num_shards=num_shards)
    return folder


def save_texts(folder: Path, num_rows: int = 40) -> Path:
    from datasets import Value

    lines = text(3 * num_rows).replace("\n", " ").split(". ")
    texts = [f"{number}: {'. '.join(lines[3 * number : 3 * number + 3])} ä" for number in range(num_rows)]
    return save(folder, {"body": texts, "number": list(range(num_rows))}, {"body": Value("string"), "number": Value("int64")})


def save_images(folder: Path, num_rows: int = 40) -> Path:
    import datasets

    draws = np.random.default_rng(0)
    images = [Image.fromarray(draws.integers(0, 255, (18, 16, 3)).astype(np.uint8)) for _ in range(num_rows)]
    labels = [number % 3 for number in range(num_rows)]
    types = {"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["a", "b", "c"])}
    return save(folder, {"picture": images, "kind": labels}, types)


def save_chats(folder: Path, num_rows: int = 40) -> Path:
    from datasets import Value

    written = write_chats(folder.parent / "chats.jsonl", num_records=num_rows).read_text()
    rows = [json.loads(line)["messages"] for line in written.splitlines()]
    return save(folder, {"messages": rows}, {"messages": [{"role": Value("string"), "content": Value("string")}]})


def saved_spec(name: str, folder: Path) -> DatasetsSpec:
    """Save texts, records or images, and return what selects them."""
    path = folder / "saved"
    if name == "saved texts":
        return DatasetsSpec(path=str(save_texts(path)), text_column="body")
    if name == "saved images":
        return DatasetsSpec(path=str(save_images(path)), image_column="picture", label_column="kind")
    (folder / "model").mkdir()
    save_tokenizer(folder / "model")
    return DatasetsSpec(path=str(save_chats(path)), messages_column="messages", tokenizer=str(folder / "model"))
