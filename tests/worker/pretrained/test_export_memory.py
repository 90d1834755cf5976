"""An export holds the level's form of the model and one weight in fp32, never a copy of the whole."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file

from octet.api_schemas import ModelSpec, OptimizerSpec, PrecisionSpec
from octet.worker import export, memory_report, plain_state_dict
from octet.worker.checkpoint import load_folder
from octet.worker.checkpoint.resume import resume
from octet.worker.fp8 import weights
from octet.worker.fp8.weight import stored
from octet.worker.models import build_model
from octet.worker.models.llama import Llama
from octet.worker.optim import build_optimizer
from octet.worker.optim.schedule import parameter_groups
from octet.worker.prepare.initialize import prepare
from octet.worker.pretrained import folder as shards
from octet.worker.pretrained.__main__ import export_model
from octet.worker.pretrained.from_checkpoint import trained as of_checkpoint
from tests.kit.pretrained_models import from_pretrained, our_llama, their_llama, trained
from tests.kit.training import train, with_training
from tests.numerics.measure import peak_bytes

SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_layers": 12, "num_heads": 4, "num_key_value_heads": 4}
LARGEST = 384 * 128
NUM_PARAMETERS = 12 * (4 * 128 * 128 + 3 * LARGEST)
"""Parameters of the layers that are held as codes."""
NUM_TEMPORARIES = 1.25
"""Tensors of the largest weight in fp32 that an export holds at a time: its values, and pieces of others."""
CAST = 0.5
"""The largest weight in 16 bits, beside its values in fp32."""


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one tensor, and pieces that are as small beside these weights as the real ones beside large weights."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 1)
    monkeypatch.setattr(weights, "PIECE_ELEMENTS", 1 << 11)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(
    ("build", "format"),
    [
        (our_llama, "fp8"),
        *(
            pytest.param(*pair, marks=pytest.mark.matrix)
            for pair in ((our_llama, "bf16"), (their_llama, "fp8"), (their_llama, "fp32"))
        ),
    ],
)
def test_an_export_decodes_one_weight_at_a_time(build: Any, format: str, tmp_path: Path) -> None:
    model, optimizer = trained(build, "O3")
    num_codes = sum(parameter.numel() for parameter in model.parameters() if stored(parameter).dtype == torch.float8_e4m3fn)
    largest = 4 * max(parameter.numel() for parameter in model.parameters())
    peak = peak_bytes(lambda: export(model, optimizer, tmp_path / "out", format=format))
    assert 0 < peak <= (NUM_TEMPORARIES + (CAST if format == "bf16" else 0)) * largest < 4 * num_codes
    values = plain_state_dict(model)
    if format == "fp32":
        loaded = from_pretrained(tmp_path / "out").state_dict()
        assert len(loaded) == len(values)
        assert {float(value.sum()) for value in loaded.values()} == {float(value.sum()) for value in values.values()}


@pytest.mark.usefixtures("small_shards")
@pytest.mark.system
def test_a_checkpoint_is_exported_without_a_copy_in_fp32(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = spec_document | {"model": {"family": "llama", "vocab_size": 256, "max_sequence_length": 64} | SIZES}
    document = with_training(document, "O3", steps=1, checkpoint_every=1)
    recorder, _ = train(document, tmp_path)
    checkpoint = tmp_path / "checkpoints" / recorder.checkpoints()[0].name
    out = tmp_path / "out"
    state = load_folder(checkpoint)  # mapped from the checkpoint's files
    formats = {"format": "fp32", "plain_dtype": "bf16", "layout": "compressed-tensors", "activations": "none"}
    options = Namespace(**formats, merge=False, strategy=None, out=out)
    peak = peak_bytes(lambda: export_model(state, options))
    model = of_checkpoint(state)
    assert isinstance(model, Llama)
    report = memory_report(model, None)
    held = sum(report.values()) - report["master_weights"]  # codes, embedding and head, amaxes; masters are mapped
    temporaries = (peak - held) / (4 * LARGEST)
    assert 0 < temporaries <= NUM_TEMPORARIES
    assert peak < 2 * NUM_PARAMETERS
    expected, found = resumed(state), plain_state_dict(model)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    written = {name: tensor for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert torch.equal(written["model.layers.3.mlp.down_proj.weight"], expected["blocks.3.mlp.down.weight"])
    assert len(written) == len(expected)


def resumed(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The values of the model that the trainer has when it resumes, made of an fp32 copy of the whole."""
    job = state["job"]
    spec = TypeAdapter(OptimizerSpec).validate_python(job["optimizer"])
    model = build_model(TypeAdapter(ModelSpec).validate_python(job["model"]), job["seed"])
    optimizer = build_optimizer(parameter_groups(model, spec), spec)
    prepared = prepare(model, optimizer, PrecisionSpec.model_validate(job["precision"]), seed=job["seed"])
    assert prepared.optimizer is not None
    resume(prepared.model, prepared.optimizer, state["model"], state["optimizer"])
    return plain_state_dict(prepared.model)
