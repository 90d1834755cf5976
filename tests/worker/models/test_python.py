"""A user's own network trains as a job, and what its function does wrong is said."""

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from octet.api_schemas import JobSpec
from octet.api_schemas.models.python import PythonSpec
from octet.worker.common.errors import InvalidConfig
from octet.worker.models import build_model
from octet.worker.pretrained.__main__ import main as export
from tests.kit.training import train, with_training

PACKAGE = """
import torch
from torch import nn
from torch.nn import functional

class Network(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.body = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, 256)

    def loss(self, batch):
        logits = self.head(self.body(self.embedding(batch["tokens"])))
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten())

class Silent(Network):
    def loss(self, batch):
        return super().loss(batch).item()

def build(width):
    return Network(width)

def no_loss(width):
    return nn.Linear(width, width)

def no_module(width):
    return "network"

def silent(width):
    return Silent(width)

def raising(width):
    raise RuntimeError("no such width")

number = 3
"""
MODULE = "users_own_networks"


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec_document: dict[str, Any]) -> dict[str, Any]:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / f"{MODULE}.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return spec_document | {"model": {"entrypoint": f"{MODULE}:build", "arguments": {"width": 32}}}


def test_it_trains_at_a_level_and_is_imported_by_the_rank_alone(
    tmp_path: Path, document: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    document = with_training(document, "O2", steps=15, optimizer={"learning_rate": 1e-2})
    spec = JobSpec.model_validate(document)
    assert spec.model.family == "python"
    assert MODULE not in sys.modules
    recorder, summary = train(document, tmp_path / "job")
    assert summary.evaluation_loss < 0.8 * recorder.losses()[0]
    assert summary.evaluation_metrics == {}
    assert summary.num_converted_parameters == 2 * 32 * 64
    again, _ = train(document, tmp_path / "again")
    assert again.losses() == recorder.losses()
    checkpoint = tmp_path / "job" / "checkpoints" / recorder.checkpoints()[0].name
    assert export([str(checkpoint), "--out", str(tmp_path / "out")]) == 2
    assert "whose code is not run here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("no_loss", "returned a Linear without loss; allowed: a torch.nn.Module"),
        ("no_module", "returned a str which is no torch.nn.Module"),
        ("raising", "raised RuntimeError: no such width"),
        ("missing", "cannot be imported on this node: AttributeError"),
        ("number", "is a int; allowed: a function"),
    ],
)
def test_what_the_function_does_wrong_is_said(document: dict[str, Any], function: str, says: str) -> None:
    spec = PythonSpec(entrypoint=f"{MODULE}:{function}", arguments={"width": 32})
    with pytest.raises(InvalidConfig, match=says):
        build_model(spec, seed=0)


def test_a_loss_that_is_no_tensor_is_said(tmp_path: Path, document: dict[str, Any]) -> None:
    document["model"]["entrypoint"] = f"{MODULE}:silent"
    with pytest.raises(InvalidConfig, match=r"loss\(batch\) returned a float; allowed: a floating-point tensor of shape \(\)"):
        train(document, tmp_path / "job")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"entrypoint": "no function"}, "pattern"),
        ({"entrypoint": "a:b", "reads": "images"}, "the model reads images"),
        ({"entrypoint": "a:b", "num_classes": 3}, "the model reads tokens"),
    ],
)
def test_sizes_are_those_of_what_it_reads(document: dict[str, Any], model: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        JobSpec.model_validate(document | {"model": model})
