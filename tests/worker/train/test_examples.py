"""Every example has a tiny variant of the same model family and kind of data, and the tiny one learns from real data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octet.api_schemas import JobSpec
from octet.worker.common.config import RankEnv, resolve
from octet.worker.mesh import Mesh
from octet.worker.train.loop import Trainer
from tests.kit.examples import EXAMPLES, TINY, document_in, in_folder
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.training import Recorder, train

SHOWS_ITSELF = {"gpt-tiny.yaml", "gpt-pipeline.yaml"}


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_a_tiny_example_is_of_the_family_and_the_data_of_the_full_one(path: Path) -> None:
    full, tiny = (JobSpec.model_validate(document_in(file)) for file in (EXAMPLES / path.name, path))
    assert tiny.model.family == full.model.family
    assert tiny.data.gives == full.data.gives
    assert tiny.data.has_targets == full.data.has_targets
    assert tiny.training.optimizer.betas == full.training.optimizer.betas
    assert tiny.precision == full.precision
    assert tiny.training.activation_checkpointing == full.training.activation_checkpointing


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
