"""Norms in bf16 in a job (`precision.norms`): their bytes, the same run after a stop, layouts of ranks, models of folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octet.api_schemas import ExportReport, JobSpec
from octet.worker.common.config import RankEnv, resolve
from octet.worker.common.errors import Cancelled
from octet.worker.fp8.norms import HalfNorm
from octet.worker.mesh import Mesh
from octet.worker.train.loop import Trainer
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.text import write_corpus
from tests.kit.training import Recorder, train

WIDTH, NUM_NORMS = 64, 5
LLAMA = {
    "family": "llama",
    "hidden_size": WIDTH,
    "num_layers": 2,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_sequence_length": 32,
}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 3},
    {"tensor": 2, "sequence": True},
    {"pipeline": 2},
    {"context": 2},
)


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    training = {"steps": 4, "global_batch_size": 4, "micro_batch_size": 2, "sequence_length": 32, "eval_batches": 1}
    return {
        "name": "norms",
        "model": LLAMA,
        "precision": {"level": "O2", "norms": "bf16"},
        "data": {"source": "text", "path": str(write_corpus(tmp_path / "corpus", 2, 100))},
        "training": training | {"checkpoint_every": 2, "optimizer": {"learning_rate": 1e-3}},
    }


@pytest.mark.system
def test_norms_in_bf16_take_half_the_bytes(document: dict[str, Any], tmp_path: Path) -> None:
    half, summary = train(document, tmp_path / "half")
    wide, wide_summary = train(document | {"precision": {"level": "O2"}}, tmp_path / "wide")
    assert wide_summary.memory_bytes["weights"] - summary.memory_bytes["weights"] == 2 * WIDTH * NUM_NORMS
    assert half.losses() == pytest.approx(wide.losses(), rel=0.01)
    assert half.losses() != wide.losses()


@pytest.mark.system
def test_a_job_with_norms_in_bf16_goes_on_bit_for_bit(document: dict[str, Any], tmp_path: Path) -> None:
    whole, _ = train(document, tmp_path / "whole")
    stopped = Recorder(stop_after_step=3, stop=Cancelled)
    with pytest.raises(Cancelled):
        train(document, tmp_path / "parts", recorder=stopped)
    resumed, _ = train(document, tmp_path / "parts", stopped.checkpoints())
    assert resumed.losses() == whole.losses()[2:]


def run_rank(rank: int, document: dict[str, Any], job_dir: str, port: int) -> None:
    torch.set_num_threads(1)
    config, recorder = resolve(JobSpec.model_validate(document), RankEnv(rank, 2, rank, master_port=port)), Recorder()
    with Mesh(config.env, torch.device("cpu"), config.layout) as mesh:
        trainer = Trainer(config, mesh, recorder, Path(job_dir))
        trainer.run()
    norms = [module for module in trainer.job.model.modules() if isinstance(module, HalfNorm)]
    assert norms
    assert {parameter.dtype for norm in norms for parameter in norm.parameters()} == {torch.bfloat16}
    if rank == 0:
        (Path(job_dir) / "losses.json").write_text(json.dumps(recorder.losses()))


@pytest.mark.system
@pytest.mark.parametrize("parallelism", LAYOUTS, ids=str)
def test_two_ranks_train_as_one(document: dict[str, Any], parallelism: dict[str, Any], tmp_path: Path) -> None:
    """Ranks that divide the model make its norms in bf16 before they have values."""
    alone, _ = train(document, tmp_path / "one")
    two = document | {"parallelism": parallelism, "resources": {"workers": 2}}
    (tmp_path / "two").mkdir()
    run_ranks(run_rank, (two, str(tmp_path / "two"), free_port()), 2)
    assert json.loads((tmp_path / "two" / "losses.json").read_text()) == pytest.approx(alone.losses(), rel=2e-3)


@pytest.mark.system
def test_a_model_from_a_folder_trains_with_them_and_is_exported(document: dict[str, Any], tmp_path: Path) -> None:
    first, _ = train(document | {"export": {"format": "fp32"}}, tmp_path / "first")
    folder = tmp_path / "first" / "exports" / first.of(ExportReport)[0].name
    again = document | {"model": {"path": str(folder)}, "export": {"format": "fp8"}}
    recorder, summary = train(again, tmp_path / "again")
    [report] = recorder.of(ExportReport)
    assert recorder.losses()[0] < first.losses()[0]
    assert summary.mismatch == report.mismatch
    assert report.mismatch is not None
    assert report.mismatch.evaluation.kl_divergence < 0.01
