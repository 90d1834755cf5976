"""Folders with FP8 weights, as others write them, start jobs and loops of one's own; codes of a level's kind stay."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from octet.api_schemas import JobSpec, PrecisionSpec, SpecConflict
from octet.api_schemas.models.huggingface import HuggingFaceSpec
from octet.worker import export, load_pretrained, memory_report
from octet.worker.common.config import RankEnv, resolve
from octet.worker.common.errors import InvalidConfig
from octet.worker.mesh import Mesh
from octet.worker.prepare.initialize import prepare
from octet.worker.pretrained import compressed as compressed_weights
from octet.worker.pretrained.start import read_model, start_model
from octet.worker.train.loop import Trainer
from tests.kit.fp8_folders import FORMS, LLAMA, QWEN3, network, save_fp8
from tests.kit.pretrained_models import from_pretrained, split_into_files, tensors_in
from tests.kit.training import Recorder, train, with_training
from tests.numerics.measure import peak_bytes

IGNORED = ("model.layers.0.mlp.down_proj",)
TOKENS = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}


def started(folder: Path, level: str, **precision: Any) -> nn.Module:
    """The model of a job before its first step, without an optimizer."""
    model, source = start_model(HuggingFaceSpec(path=str(folder)), 0)
    assert source is not None
    return prepare(model, None, PrecisionSpec(level=level, **precision), source=source).model


def loss_of(served: Any) -> Tensor:
    """The loss of a network of transformers."""
    with torch.no_grad():
        logits = served(BATCH["tokens"]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), BATCH["targets"].flatten())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("architecture", "sizes"), [("llama", LLAMA), ("qwen3", QWEN3)], ids=["llama", "qwen3"])
def test_values_are_those_that_a_server_multiplies(architecture: str, sizes: dict[str, Any], form: str, tmp_path: Path) -> None:
    """Every form, mixed with bf16, bit for bit: in a job and in `load_pretrained`; so is the loss before the first step."""
    served = network(architecture, sizes)
    values = save_fp8(tmp_path, served, FORMS[form], IGNORED)
    job = started(tmp_path, "fp32")
    loaded, _ = load_pretrained(tmp_path, "fp32")
    for name, expected in values.items():
        assert torch.equal(job.get_parameter(f"network.{name}"), expected), name
        assert torch.equal(loaded.get_parameter(name), expected), name
    torch.testing.assert_close(job.loss(BATCH).loss.detach(), loss_of(served), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["tensor", "channel", "block"])
def test_a_stock_reader_has_the_same_loss(form: str, tmp_path: Path) -> None:
    """transformers with compressed-tensors reads the same folders."""
    save_fp8(tmp_path, network("llama", LLAMA), FORMS[form], IGNORED)
    document = json.loads((tmp_path / "config.json").read_text())
    document["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    (tmp_path / "config.json").write_text(json.dumps(document))
    job = started(tmp_path, "fp32")
    torch.testing.assert_close(job.loss(BATCH).loss.detach(), loss_of(from_pretrained(tmp_path)), rtol=1e-6, atol=1e-6)


def test_o3_evaluates_the_served_weights(tmp_path: Path) -> None:
    """Codes of the level's kind are exact in bf16, so O3 evaluates in bf16 what bf16-amp does of the decoded weights."""
    served = network("llama", LLAMA)
    save_fp8(tmp_path, served, FORMS["tensor"], power_of_two=True)
    losses = []
    for level, options in (("O3", {"recipe": {"fp8_in_evaluation": False}}), ("bf16-amp", {})):
        model = started(tmp_path, level, **options).eval()
        with torch.no_grad():
            losses.append(model.loss(BATCH).loss)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=0)
    torch.testing.assert_close(losses[0], loss_of(served), rtol=2e-2, atol=0)


@pytest.mark.parametrize("level", ["O3", "O3-split"])
@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "with an optimizer"])
def test_codes_of_the_levels_kind_go_in_and_out_byte_for_byte(level: str, is_trained: bool, tmp_path: Path) -> None:
    """One power of two for each weight, though not that of its amax: encoding the values again would give other codes."""
    values = save_fp8(tmp_path / "in", network("llama", LLAMA), FORMS["tensor"], IGNORED, power_of_two=True)
    make: Any = (lambda model: torch.optim.AdamW(model.parameters())) if is_trained else None
    model, optimizer = load_pretrained(tmp_path / "in", level, make_optimizer=make, exclude=IGNORED)
    written = tensors_in(export(model, optimizer, tmp_path / "out", format="fp8"))
    given = tensors_in(tmp_path / "in")
    assert written.keys() == given.keys()
    for name, tensor in given.items():
        assert written[name].dtype == tensor.dtype, name
        assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8)), name
    exact = tensors_in(export(model, optimizer, tmp_path / "fp32", format="fp32"))
    assert all(torch.equal(exact[name], value) for name, value in values.items())


def test_an_export_starts_a_job_and_comes_out_the_same(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    """A job's own checkpoint after three steps, exported in FP8, read by the next job at O3 and exported before its first."""
    from octet.worker.pretrained.__main__ import main

    save_fp8(tmp_path / "base", network("llama", LLAMA), FORMS["deepseek"])
    document = with_training(spec_document | {"model": {"path": str(tmp_path / "base")}}, "O3", steps=3)
    recorder, _ = train(document, tmp_path / "job")
    checkpoint = tmp_path / "job" / "checkpoints" / recorder.checkpoints()[0].name
    assert main([str(checkpoint), "--format", "fp8", "--out", str(tmp_path / "first")]) == 0
    config = resolve(JobSpec.model_validate(document | {"model": {"path": str(tmp_path / "first")}}), RankEnv())
    with Mesh(config.env, torch.device("cpu")) as mesh:
        trainer = Trainer(config, mesh, Recorder(), tmp_path / "next")
        with closing(trainer.batches), trainer.writer:
            export(trainer.model, trainer.optimizer, tmp_path / "second", format="fp8")
    first, second = tensors_in(tmp_path / "first"), tensors_in(tmp_path / "second")
    assert first.keys() == second.keys()
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in first.values()) == 14
    assert all(torch.equal(second[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in first.items())


@pytest.mark.system
@pytest.mark.parametrize("level", ["fp32", "O3", pytest.param("O3-split-8bit", marks=pytest.mark.matrix)])
def test_fine_tuning_continues_from_blocks(level: str, tmp_path: Path, spec_document: dict[str, Any]) -> None:
    """A DeepSeek folder: the first loss is that of the decoded weights in a plain folder, and training lowers it."""
    served = network("qwen3", QWEN3)
    save_fp8(tmp_path / "fp8", served, FORMS["deepseek"], IGNORED)
    served.save_pretrained(tmp_path / "plain")
    losses = []
    for name in ("fp8", "plain"):
        document = spec_document | {"model": {"path": str(tmp_path / name)}}
        recorder, _ = train(
            with_training(document, level, steps=6, optimizer={"learning_rate": 3e-3}), tmp_path / f"job-{name}"
        )
        losses.append(recorder.losses())
    assert losses[0] == losses[1]
    assert losses[0][-1] < 0.9 * losses[0][0]


@pytest.mark.parametrize(
    ("form", "level"),
    [
        pytest.param(form, level, marks=() if form == "deepseek" or (form, level) == ("tensor", "O3") else pytest.mark.matrix)
        for form in ("deepseek", "tensor", "channel")
        for level in ("O2", "O3", "O3-split")
    ],
)
def test_the_peak_is_the_level_and_one_layer(level: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer: the fp32 values of one of the blocks. Pieces are as small beside these weights as real ones are."""
    monkeypatch.setattr(compressed_weights, "PIECE_ELEMENTS", 1 << 12)
    served = network("llama", LLAMA | {"num_hidden_layers": 4})
    save_fp8(tmp_path, served, FORMS[form], power_of_two=True)
    split_into_files(tmp_path)
    loaded: list[Any] = []

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters())

    peak = peak_bytes(lambda: loaded.append(load_pretrained(tmp_path, level, make_optimizer=adamw, tokens=16)))
    held = sum(memory_report(*loaded[0]).values())
    one_block = 4 * sum(parameter.numel() for parameter in served.model.layers[0].parameters())
    assert held < peak <= held + one_block


def test_experts_of_their_own_are_decoded_and_joined(tmp_path: Path) -> None:
    """transformers joins the experts of a mixture; their FP8 matrices are decoded for it."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "decoder_sparse_step": 1}
    mixture = network("qwen3_moe", QWEN3 | {"num_hidden_layers": 1} | experts)
    mixture.save_pretrained(tmp_path)
    tensors, expected = load_file(tmp_path / "model.safetensors"), mixture.state_dict()
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name + "_scale_inv"] = torch.full((-(-tensors[name].shape[0] // 128), -(-tensors[name].shape[1] // 128)), 2.0)
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": FORMS["deepseek"].config}
    (tmp_path / "config.json").write_text(json.dumps(document))
    model = read_model(HuggingFaceSpec(path=str(tmp_path)))
    for name, value in expected.items():
        decoded = 2 * value.to(torch.float8_e4m3fn).float() if ".experts." in name else value
        assert torch.equal(model.state_dict()[f"network.{name}"], decoded), name

    # A job reads each matrix by itself.
    split, source = start_model(HuggingFaceSpec(path=str(tmp_path)), 0, precision=PrecisionSpec(level="te"))
    assert source is not None
    started = prepare(split, None, PrecisionSpec(level="te"), source=source).model
    assert len(started.octet_report.converted) == 4 + 4 * 2
    values = started.state_dict()
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())


def test_codes_of_stacked_experts_stay_as_they_are(tmp_path: Path) -> None:
    """A stack (E, K, N) with a scale for each expert, as transformers saves GPT-OSS; biases and routers are plain."""
    sizes = LLAMA | {"num_local_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1, "head_dim": 32}
    config = sizes | {"layer_types": ["full_attention"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    network("gpt_oss", config).save_pretrained(tmp_path)
    tensors, scales = load_file(tmp_path / "model.safetensors"), torch.tensor([0.25, 2.0, 2.0**-9]).view(3, 1, 1)
    stacked = [name for name, tensor in tensors.items() if tensor.dim() == 3]
    for name in stacked:
        tensors[name] = (tensors[name] / scales).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales.view(3).clone() if "down" in name else scales
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    model, _ = load_pretrained(tmp_path, "O3")
    for name in stacked:
        for index, layer in enumerate(model.get_submodule(name)):
            assert torch.equal(layer.encoded.codes.float(), tensors[name][index].float())
            assert float(layer.encoded.dequant_scale) == float(scales[index])
    whole = read_model(HuggingFaceSpec(path=str(tmp_path)))
    assert all(torch.equal(whole.state_dict()[f"network.{name}"], tensors[name].float() * scales) for name in stacked)
    save_file(tensors | {f"{stacked[0]}_scale_inv": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(SpecConflict, match=r"has shape \(4,\); allowed: \(3, 1\) \(tensor\)"):
        HuggingFaceSpec(path=str(tmp_path)).check_weights()


def test_scales_in_ue8m0_and_of_activations(tmp_path: Path) -> None:
    """`scale_fmt: ue8m0` writes exponents alone; scales that only a server has are passed over."""
    values = save_fp8(tmp_path, network("llama", LLAMA), FORMS["deepseek"], power_of_two=True)
    tensors = tensors_in(tmp_path)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = tensors[name].to(torch.float8_e8m0fnu)
        tensors[name.replace("weight_scale_inv", "input_scale")] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    model = started(tmp_path, "fp32")
    assert all(torch.equal(model.get_parameter(f"network.{name}"), value) for name, value in values.items())


def test_a_rank_refuses_what_a_submission_refuses(tmp_path: Path) -> None:
    save_fp8(tmp_path, network("llama", LLAMA), FORMS["deepseek"])
    tensors = tensors_in(tmp_path)
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidConfig, match=r"model\.path: got model\.layers\.1\.mlp\.up_proj\.weight .* without a scale"):
        start_model(HuggingFaceSpec(path=str(tmp_path)), 0)


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_head_that_the_configuration_ties_is_not_lost(tmp_path: Path, *, is_equal: bool) -> None:
    """A folder may hold a tied weight twice, in two dtypes; a head of its own needs a configuration that says so."""
    save_fp8(tmp_path, network("llama", LLAMA), FORMS["deepseek"])
    document = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(document))
    if is_equal:
        tensors = tensors_in(tmp_path)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].float()
        save_file(tensors, tmp_path / "model.safetensors")
        assert torch.equal(started(tmp_path, "fp32").get_parameter("network.lm_head.weight"), tensors["lm_head.weight"])
        return
    for field, load in (("model.path", lambda: started(tmp_path, "fp32")), ("folder", lambda: load_pretrained(tmp_path))):
        with pytest.raises((InvalidConfig, ValueError), match=rf"{field}: .* have different values.*tie_word_embeddings"):
            load()


def test_adapters_are_merged_into_decoded_weights(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    """The frozen model may be FP8; what is merged is plain, and transformers loads it."""
    from octet.worker.pretrained.__main__ import main

    values = save_fp8(tmp_path / "base", network("llama", LLAMA), FORMS["deepseek"])
    document = with_training(spec_document, "O3", steps=1) | {"model": {"path": str(tmp_path / "base")}}
    recorder, _ = train(document | {"adapter": {"rank": 4, "targets": ["*.mlp.*"]}}, tmp_path / "job")
    checkpoint = tmp_path / "job" / "checkpoints" / recorder.checkpoints()[0].name
    assert main([str(checkpoint), "--merge", "--format", "fp32", "--out", str(tmp_path / "merged")]) == 0
    merged = from_pretrained(tmp_path / "merged").state_dict()
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    changed = {name for name, value in values.items() if not torch.equal(merged[name], value)}
    assert changed == {name for name in values if ".mlp." in name}
