"""A network of transformers trains as a job, from a configuration or a folder; what cannot train is refused with a reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octet.api_schemas import EvaluationReport, EventReport, Files, JobSpec, StartedReport
from octet.api_schemas.models.architectures import ARCHITECTURES, TASKS
from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.api_schemas.precision import PrecisionSpec
from octet.worker.checkpoint import load_folder
from octet.worker.common.config import RankEnv, resolve
from octet.worker.common.errors import Cancelled, InvalidConfig
from octet.worker.fp8.stored import exact_state_dict
from octet.worker.models import build_model
from octet.worker.prepare.initialize import prepare
from octet.worker.pretrained.__main__ import main as export_main
from octet.worker.pretrained.start import read_model, start_model
from octet.worker.train.reports import stacked_matrices
from tests.kit.training import Recorder, train, with_training

LLAMA = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def with_model(document: dict[str, Any], **model: Any) -> dict[str, Any]:
    return document | {"model": {"family": "huggingface", **model}}


def saved(folder: Path, **changes: Any) -> Path:
    """Save a tiny Llama as transformers does."""
    network = build_model(HuggingFaceSpec(architecture="llama", config=LLAMA | changes), seed=3).network
    network.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("level", ["fp32", "O2"])
def test_it_learns_and_resumes_bit_identically(tmp_path: Path, spec_document: dict[str, Any], level: str) -> None:
    document = with_model(spec_document, architecture="llama", config=LLAMA)
    document = with_training(document, level, steps=8, checkpoint_every=4, optimizer={"learning_rate": 1e-2})
    whole, summary = train(document, tmp_path / "whole")
    interrupted = Recorder(stop_after_step=6)
    with pytest.raises(Cancelled):
        train(document, tmp_path / "parts", recorder=interrupted)
    resumed, again = train(document, tmp_path / "parts", interrupted.checkpoints())
    assert resumed.losses() == whole.losses()[4:]
    assert again.evaluation_loss == summary.evaluation_loss < 0.8 * whole.losses()[0]
    (started,) = whole.of(StartedReport)
    assert started.num_layers_converted == 14  # all layers but the head
    assert started.num_parameters == summary.num_parameters == 2 * 256 * 32 + 2 * (4 * 32**2 + 3 * 32 * 64) + 5 * 32
    assert set(summary.evaluation_metrics) == {"token_accuracy"}
    assert whole.of(EvaluationReport)[-1].metrics == summary.evaluation_metrics


def test_a_masked_model_learns(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    config = LLAMA | {"vocab_size": 272, "num_hidden_layers": 1}
    document = with_model(spec_document, architecture="bert", config=config)
    recorder, summary = train(with_training(document, "O2", steps=30, optimizer={"learning_rate": 1e-2}), tmp_path)
    assert summary.evaluation_loss < 0.7 * recorder.losses()[0]
    assert set(summary.evaluation_metrics) == {"masked_token_accuracy"}


def test_a_folder_gives_the_weights(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    document = with_training(with_model(spec_document, path=str(saved(tmp_path / "model"))), steps=1)
    files = Files.below((tmp_path, Path(document["data"]["path"])))
    config = resolve(JobSpec.model_validate(document), RankEnv(), files)
    expected = build_model(HuggingFaceSpec(architecture="llama", config=LLAMA), seed=3)
    model = read_model(config.model, config.readable_files)
    assert config.sizes.takes.vocab_size == 256
    assert model.training
    for (name, value), (other_name, other) in zip(model.state_dict().items(), expected.state_dict().items(), strict=True):
        assert name == other_name
        assert value.dtype == torch.float32
        assert torch.equal(value, other), name


def test_weights_in_bf16_and_several_files_are_read_as_fp32(tmp_path: Path) -> None:
    network = build_model(HuggingFaceSpec(architecture="llama", config=LLAMA), seed=3).network
    network.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = read_model(HuggingFaceSpec(path=str(tmp_path)))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.network.lm_head.weight, network.lm_head.weight.float())


def test_training_does_not_write_to_the_folder(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    folder = saved(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    recorder, _ = train(with_training(with_model(spec_document, path=str(folder)), "O2", steps=3), tmp_path / "job")
    assert len(recorder.losses()) == 3
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def without_a_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file({name: weight for name, weight in weights.items() if "q_proj" not in name}, folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (without_a_weight, r"lacks 2 weights of LlamaForCausalLM: .*q_proj"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"none"), "cannot be read as safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no safetensors file"),
        (lambda folder: (folder / "config.json").write_text("["), "a configuration in JSON"),
        (lambda folder: (folder / "config.json").unlink(), "save_pretrained"),
        (lambda folder: change_config(folder, model_type="lama"), "Did you mean 'llama'"),
        (lambda folder: change_config(folder, vocab_size="many"), "vocab_size"),
        (lambda folder: change_config(folder, quantization_config={"bits": 4}), "quant_method None"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, spoil: Any, says: str) -> None:
    folder = saved(tmp_path)
    spoil(folder)
    with pytest.raises(InvalidConfig, match=says):
        start_model(HuggingFaceSpec(path=str(folder)), seed=0)


def test_a_folder_outside_the_roots_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    files = Files.below((inside,))
    spec = HuggingFaceSpec(path=str(saved(tmp_path / "outside")))
    with pytest.raises(InvalidConfig, match=r"model\.path: .*inside"):
        start_model(spec, 0, files)
    (inside / "config.json").write_bytes((tmp_path / "outside" / "config.json").read_bytes())
    (inside / "model.safetensors").symlink_to(tmp_path / "outside" / "model.safetensors")
    with pytest.raises(InvalidConfig, match=r"model\.path: .*inside"):
        start_model(HuggingFaceSpec(path=str(inside)), 0, files)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"num_attention_heads": 3}, "llama"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_a_configuration_that_transformers_refuses(config: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        build_model(HuggingFaceSpec(architecture="llama", config=LLAMA | config), seed=0)


def test_initial_values_depend_on_the_seed_alone() -> None:
    spec = HuggingFaceSpec(architecture="llama", config=LLAMA)
    torch.manual_seed(1)
    first, state = build_model(spec, seed=5), torch.get_rng_state()
    torch.manual_seed(2)
    second, other = build_model(spec, seed=5), build_model(spec, seed=6)
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first.network.lm_head.weight, second.network.lm_head.weight)
    assert not torch.equal(first.network.lm_head.weight, other.network.lm_head.weight)


def test_a_mixture_trains_resumes_and_is_exported_as_a_job(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    """Resumed, it has the losses of a run without a break; exported in FP8 and read again, its codes."""
    config = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    document = with_training(
        with_model(spec_document, architecture="mixtral", config=config), "O3", steps=4, checkpoint_every=2, compile="on"
    )
    recorder, _ = train(document, tmp_path / "job")
    [started] = recorder.of(StartedReport)
    messages = {event.type: event.message for event in recorder.of(EventReport)}
    assert "layers.not_linear" not in messages
    assert "how many tokens each expert has" in messages["training.not_compiled"]
    assert started.num_layers_converted == 2 * (4 + 4 * 2)
    begun = Recorder(stop_after_step=3)
    with pytest.raises(Cancelled):
        train(document, tmp_path / "halves", recorder=begun)
    resumed, _ = train(document, tmp_path / "halves", begun.checkpoints())
    assert resumed.losses() == recorder.losses()[2:]
    newest = tmp_path / "job" / "checkpoints" / recorder.checkpoints()[0].name
    assert export_main([str(newest), "--format", "fp8", "--out", str(tmp_path / "exported")]) == 0
    saved = load_folder(newest)["model"]
    model, source = start_model(HuggingFaceSpec(path=str(tmp_path / "exported")), 0, precision=PrecisionSpec(level="O3"))
    assert source is not None
    prepared = prepare(model, None, PrecisionSpec(level="O3"), source=source)
    codes = {name: tensor for name, tensor in exact_state_dict(prepared.model).items() if name.endswith("weight_codes")}
    assert len(codes) == started.num_layers_converted
    assert all(torch.equal(tensor.float(), saved[name].float()) for name, tensor in codes.items())
    with pytest.raises(ValueError, match="hold the experts of a mixture one by one"):
        train(with_training(document, "bf16-amp", compile="off"), tmp_path / "halves", begun.checkpoints())


def test_a_network_without_experts_leaves_nothing() -> None:
    assert stacked_matrices(build_model(HuggingFaceSpec(architecture="llama", config=LLAMA), seed=0)) == {}


def test_the_table_of_architectures_is_transformers() -> None:
    from transformers.models.auto import modeling_auto

    for task, table in (
        ("next_token", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("masked_token", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        ("image_class", modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    ):
        assert set(ARCHITECTURES[task]) <= set(table)  # type: ignore[index]
    assert len(TASKS) == sum(map(len, ARCHITECTURES.values()))  # each has one task
    assert not set(ARCHITECTURES["next_token"]) & set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
