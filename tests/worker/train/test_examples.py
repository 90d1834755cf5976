"""Every example has a tiny variant of the same model family and kind of data, and the tiny one learns from real data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from octet.api_schemas import JobSpec
from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.worker.common.config import RankEnv, resolve
from octet.worker.mesh import Mesh
from octet.worker.models import build_model
from octet.worker.train.loop import Trainer
from tests.kit.chat import VOCAB_SIZE, save_tokenizer, write_chats
from tests.kit.images import write_images
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.text import write_corpus
from tests.kit.training import Recorder, train

EXAMPLES = Path(__file__).parents[3] / "examples"
TINY = sorted((EXAMPLES / "tiny").glob("*.yaml"))
SHOWS_ITSELF = {"gpt-tiny.yaml", "gpt-pipeline.yaml"}
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


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_a_tiny_example_is_of_the_family_and_the_data_of_the_full_one(path: Path) -> None:
    full, tiny = (JobSpec.model_validate(document_in(file)) for file in (EXAMPLES / path.name, path))
    assert tiny.model.family == full.model.family
    assert tiny.data.gives == full.data.gives
    assert tiny.data.has_targets == full.data.has_targets
    assert tiny.training.optimizer.betas == full.training.optimizer.betas
    assert tiny.precision == full.precision


def test_every_example_has_a_tiny_variant() -> None:
    assert {path.name for path in EXAMPLES.glob("*.yaml")} - SHOWS_ITSELF == {path.name for path in TINY}


@pytest.mark.system
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem.startswith(("gpt3", "qwen-lora")) else pytest.mark.matrix)
        for path in TINY
    ],
)
def test_a_tiny_example_learns(tmp_path: Path, path: Path) -> None:
    document = in_folder(document_in(path), tmp_path)
    num_ranks = JobSpec.model_validate(document).resources.workers
    if num_ranks == 1:
        recorder, summary = train(document, tmp_path / "job")
        found = [(recorder.losses(), summary.evaluation_loss)]
    else:
        run_ranks(train_as_rank, (free_port(), num_ranks, document, str(tmp_path)), num_ranks)
        found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    losses, evaluation_loss = found[0]
    assert evaluation_loss < 0.75 * losses[0]
    assert {each for _, each in found} == {evaluation_loss}


def train_as_rank(rank: int, port: int, num_ranks: int, document: dict[str, Any], folder: str) -> None:
    """Train a job as one of its ranks, and write the losses and the loss of its evaluation to a file."""
    torch.set_num_threads(1)
    config = resolve(JobSpec.model_validate(document), RankEnv(rank=rank, world_size=num_ranks, master_port=port))
    recorder = Recorder()
    with Mesh(config.env, torch.device("cpu"), config.layout) as mesh:
        summary = Trainer(config, mesh, recorder, Path(folder) / "job").run()
    Path(folder, f"{rank}.json").write_text(json.dumps([recorder.losses(), summary.evaluation_loss]))
