"""Recorded steps on a GPU: CUDA captures them, and replays train as launched steps do. `pytest -m gpu`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octet.api_schemas import EventReport, JobSpec, StepReport
from octet.worker.common.config import RankEnv, resolve
from octet.worker.mesh import Mesh
from octet.worker.train.loop import Trainer
from tests.kit.ports import free_port
from tests.kit.ranks import run_ranks
from tests.kit.training import Recorder, with_training

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler about itself
@pytest.mark.parametrize("compile", ["off", "auto"])
@pytest.mark.parametrize("level", ["bf16-amp", "fp16-amp", "te", "O2", "O3", "O3-split-8bit"])
def test_a_job_of_graphs_trains_as_one_without(tmp_path: Path, spec_document: dict[str, Any], level: str, compile: str) -> None:
    found = {}
    for cuda_graph in ("off", "auto"):
        torch.compiler.reset()
        options = {"steps": 12, "micro_batch_size": 2, "deterministic": True, "compile": compile, "cuda_graph": cuda_graph}
        document = with_training(spec_document, level, **options)
        document["model"] = document["model"] | {"hidden_size": 256, "num_heads": 4, "num_layers": 2}
        if level not in ("bf16-amp", "fp16-amp"):
            document["precision"] = {"level": level, "statistics_every": 5, "auto_filter": False}
        with Mesh(RankEnv(), torch.device("cuda", 0)) as mesh:
            config = resolve(JobSpec.model_validate(document), RankEnv())
            Trainer(config, mesh, recorder := Recorder(), tmp_path / cuda_graph).run()
        found[cuda_graph] = recorder
    assert found["auto"].losses() == found["off"].losses()
    norms = [[report.gradient_norm for report in recorder.of(StepReport)] for recorder in found.values()]
    assert norms[0] == norms[1]
    assert "training.graphed" in {event.type for event in found["auto"].of(EventReport)}


def train_rank(rank: int, ports: list[int], document: dict[str, Any], folder: str) -> None:
    """Train without graphs and with them. The first rank asserts equal losses."""
    torch.cuda.set_device(rank)
    found = []
    for cuda_graph, port in zip(("off", "auto"), ports, strict=True):
        document["training"]["cuda_graph"] = cuda_graph
        config = resolve(JobSpec.model_validate(document), RankEnv(rank=rank, world_size=2, master_port=port))
        with Mesh(config.env, torch.device("cuda", rank), config.layout) as mesh:
            Trainer(config, mesh, recorder := Recorder(), Path(folder, cuda_graph)).run()
        found.append(recorder)
    assert found[0].losses() == found[1].losses()
    assert rank or "training.graphed" in {event.type for event in found[1].of(EventReport)}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank")
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("level", ["bf16-amp", "te", "O2", "O3-split"])
def test_ranks_of_graphs_train_as_ranks_without(
    tmp_path: Path, spec_document: dict[str, Any], level: str, zero_stage: int
) -> None:
    options = {"steps": 12, "global_batch_size": 8, "micro_batch_size": 2, "deterministic": True, "compile": "off"}
    document = with_training(spec_document, level, **options)
    document["model"] = document["model"] | {"hidden_size": 256, "num_heads": 4, "num_layers": 2}
    document |= {"resources": {"workers": 2}, "parallelism": {"zero_stage": zero_stage}}
    run_ranks(train_rank, ([free_port(), free_port()], document, str(tmp_path)), 2)
