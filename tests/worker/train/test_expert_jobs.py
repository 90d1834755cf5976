"""Jobs of mixtures on two ranks that hold different experts: trained, exported, loaded by stock transformers, resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octet.api_schemas import CheckpointRef, EventReport, ExportReport, JobSpec
from octet.worker.checkpoint import load_folder
from octet.worker.common.config import RankEnv, resolve
from octet.worker.mesh import Mesh
from octet.worker.pretrained.from_checkpoint import trained
from octet.worker.train.loop import Trainer
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.text import write_corpus
from tests.kit.training import Recorder, train
from tests.worker.models.test_architectures import CONFIGS

ARCHITECTURES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe")

WITH: dict[str, dict[str, Any]] = {"mixtral": {"activation_checkpointing": "full"}, "olmoe": {"micro_batch_size": 1}}
"""Options of training that some of the jobs have besides: blocks that are computed again, and accumulated gradients."""


def document(architecture: str, corpus: Path, **parts: Any) -> dict[str, Any]:
    training = {"steps": 4, "global_batch_size": 4, "sequence_length": 32, "eval_every": 2, "checkpoint_every": 2}
    return {
        "name": "mixture",
        "model": {"family": "huggingface", "architecture": architecture, "config": CONFIGS[architecture]},
        "precision": {"level": "O2", "statistics_every": 0},
        "data": {"source": "text", "path": str(corpus)},
        "training": training
        | WITH.get(architecture, {})
        | {"eval_batches": 3, "optimizer": {"learning_rate": 3e-3}, "compile": "off"},
        "parallelism": {"expert": 2, "zero_stage": 1},
        "resources": {"workers": 2},
    } | parts


def run(rank: int, port: int, folder: str, job: dict[str, Any], checkpoints: tuple[CheckpointRef, ...]) -> None:
    """Run a job on one of two ranks; the first writes down its losses and checkpoints."""
    torch.set_num_threads(1)
    config = resolve(JobSpec.model_validate(job), RankEnv(rank=rank, world_size=2, master_port=port))
    recorder = Recorder()
    with Mesh(config.env, torch.device("cpu"), config.layout) as mesh:
        Trainer(config, mesh, recorder, Path(folder, "job")).run(checkpoints)
    if rank == 0:
        found = {
            "losses": recorder.losses(),
            "checkpoints": [ref.model_dump(mode="json") for ref in recorder.checkpoints()],
            "events": [report.type for report in recorder.of(EventReport)],
            "exports": [report.model_dump(mode="json") for report in recorder.of(ExportReport)],
        }
        Path(folder, "found.json").write_text(json.dumps(found))


def on_ranks(folder: Path, job: dict[str, Any], checkpoints: tuple[CheckpointRef, ...] = ()) -> dict[str, Any]:
    run_ranks(run, (free_port(), str(folder), job, checkpoints), 2)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=pytest.mark.system if name == "qwen3_moe" else pytest.mark.matrix) for name in ARCHITECTURES],
)
def test_it_trains_is_exported_and_goes_on_at_another_layout(architecture: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    corpus = write_corpus(tmp_path / "corpus")
    job = document(architecture, corpus, export={"format": "bf16"})
    found = on_ranks(tmp_path, job)
    assert len(found["losses"]) == 4
    assert found["losses"][-1] < found["losses"][0]
    exported = check_export(tmp_path / "job", found)
    from_folder = job | {"model": {"family": "huggingface", "path": str(exported)}, "export": None}
    (tmp_path / "tuned").mkdir()
    tuned = on_ranks(tmp_path / "tuned", from_folder | {"training": job["training"] | {"steps": 1}})
    assert "model.made_whole" not in tuned["events"], "each rank reads its own experts"
    assert tuned["losses"][0] == pytest.approx(found["losses"][-1], rel=0.05)

    older = CheckpointRef.model_validate(found["checkpoints"][-1])
    assert older.step == 2
    again = on_ranks(tmp_path, job, (older,))
    assert again["losses"] == found["losses"][2:], "at the same layout to the bit"
    for layout in ({"parallelism": {"zero_stage": 1}}, {"parallelism": {}, "resources": {"workers": 1}}):
        other = document(architecture, corpus, **layout)
        if "resources" in layout:
            losses = train(other, tmp_path / "job", (older,))[0].losses()
        else:
            losses = on_ranks(tmp_path, other, (older,))["losses"]
        assert losses == pytest.approx(found["losses"][2:], rel=0.02), layout


def check_export(job_dir: Path, found: dict[str, Any]) -> Path:
    """Stock transformers loads the export under its own names, and computes what the trained network computes."""
    from transformers import AutoModelForCausalLM

    (export,) = found["exports"]
    folder = job_dir / "exports" / export["name"]
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    network: Any = trained(load_folder(job_dir / "checkpoints" / found["checkpoints"][0]["name"])).eval()
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs, ours = loaded.eval()(tokens).logits, network.network(input_ids=tokens).logits
    assert (theirs - ours).norm() < 0.05 * ours.norm()  # its weights were rounded to bf16, and ours multiply in FP8
    return folder
