"""The tiny examples, as jobs over data and models that tests make."""

from pathlib import Path
from typing import Any

import yaml

from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.worker.models import build_model
from tests.kit.chat import VOCAB_SIZE, save_tokenizer, write_chats
from tests.kit.images import write_images
from tests.kit.text import write_corpus

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = sorted((EXAMPLES / "tiny").glob("*.yaml"))
# A frozen head of small numbers gives flat logits, whatever adapters learn.
LLAMA = {"initializer_range": 0.2, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def document_in(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    return document


def in_folder(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a job over data, and a model, that this test makes."""
    source = document["data"]["source"]
    if source == "text":
        path = write_corpus(folder / "text", num_files=4, num_sentences=100)
    elif source == "images":
        path = write_images(folder / "images.npz", num_images=160)
    else:
        path = write_chats(folder / "chats.jsonl")
        config = LLAMA | {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 64}
        spec = HuggingFaceSpec(architecture="llama", config=config)
        build_model(spec, seed=3).network.save_pretrained(folder / "model")
        save_tokenizer(folder / "model")
        document["model"]["path"] = str(folder / "model")
    document["data"]["path"] = str(path)
    return document
