"""A converted model starts from a checkpoint's files as `initialize` starts from a plain model, without an fp32 copy of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from octet.api_schemas.levels import LEVELS
from octet.api_schemas.models.llama import LlamaSizes
from octet.worker import export, initialize, load_pretrained, memory_report, plain_state_dict
from octet.worker.fp8 import weights
from octet.worker.fp8.linear import Float8Linear
from octet.worker.models.llama import Llama
from tests.kit.pretrained_models import (
    FAMILIES,
    TOKENS,
    logits_of,
    our_gpt,
    our_llama,
    split_into_files,
    tensors_in,
    their_llama,
    their_mixture,
    trained,
)
from tests.kit.small_model import spread
from tests.numerics.measure import peak_bytes

ALL_LEVELS = ("te", "O1", "O2", "O3", "O3-split-8bit", "ao", "fp16-amp", "fp32")
IN_EVERY_RUN = ("te", "O1", "O3", "O3-split-8bit", "fp16-amp")
"""Each way of holding a weight, and a loss that is scaled."""
START = [
    pytest.param(build, level, id=f"{family}-{level}", marks=() if is_usual else pytest.mark.matrix)
    for family, build in FAMILIES.items()
    for level in ALL_LEVELS
    for is_usual in [level in IN_EVERY_RUN and (build is our_llama or level == "O3")]
]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def assert_same_bits(one: Any, other: Any, where: str = "") -> None:
    """Nested dicts and lists of tensors and numbers are equal, tensors bit for bit."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert one.shape == other.shape, where
        if one.numel():
            assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for name in one:
            assert_same_bits(one[name], other[name], f"{where}/{name}")
    elif isinstance(one, list | tuple):
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same_bits(*pair, f"{where}/{index}")
    else:
        assert one == other, where


@pytest.mark.parametrize(("build", "level"), START)
def test_it_starts_as_from_a_plain_model(build: Callable[[], nn.Module], level: str, tmp_path: Path) -> None:
    """Weights, masters, states and the next step are those of `initialize`, bit for bit."""
    plain = build()
    folder = export(plain, None, tmp_path / "out", format="fp32")
    expected, expected_optimizer = initialize(plain, adamw(plain), level)
    how = {} if build is their_llama else {"build": build}
    model, optimizer = load_pretrained(folder, level, make_optimizer=adamw, **how)
    assert optimizer is not None
    assert model.octet_report == expected.octet_report
    for _ in range(2):
        assert_same_bits(dict(model.state_dict()), dict(expected.state_dict()))
        assert_same_bits(optimizer.state_dict(), expected_optimizer.state_dict())
        for each, of_each in ((model, optimizer), (expected, expected_optimizer)):
            nn.functional.cross_entropy(logits_of(each).float().flatten(0, 1), TOKENS.flatten()).backward()
            of_each.step()
            of_each.zero_grad()


@pytest.mark.parametrize(
    ("build", "strategy"),
    [
        pytest.param(build, strategy, id=f"{build.__name__}-{strategy}", marks=pytest.mark.matrix if rare else ())
        for build, strategy, rare in (
            (our_llama, "tensor", False), (our_llama, "channel", True), (our_llama, "block", False),
            (our_gpt, "tensor", True), (our_gpt, "channel", False), (our_gpt, "block", True),
            (their_llama, "tensor", False), (their_llama, "channel", True), (their_llama, "block", True),
        )
    ],
)  # fmt: skip
def test_fp8_files_are_read_as_their_values(build: Callable[[], nn.Module], strategy: str, tmp_path: Path) -> None:
    source, optimizer = trained(build, "O3")
    folder = export(source, optimizer, tmp_path / "out", format="fp8", strategy=strategy, plain_dtype=torch.float32)
    how = {} if build is their_llama else {"build": build}
    model, _ = load_pretrained(folder, "fp32", **how)
    values, expected = model.state_dict(), plain_state_dict(source)
    for name, tensor in expected.items():
        torch.testing.assert_close(values[name], tensor, rtol=2**-4, atol=float(tensor.abs().max()) * 2**-16)
    if strategy == "tensor":
        weights = {name: layer.weight_values() for name, layer in source.named_modules() if isinstance(layer, Float8Linear)}
        for name, weight in weights.items():
            assert torch.equal(values[f"{name}.weight"], weight), name


def test_codes_go_in_and_out_unchanged(tmp_path: Path) -> None:
    source, optimizer = trained(our_llama, "O3")
    first = export(source, optimizer, tmp_path / "first", format="fp8")
    model, _ = load_pretrained(first, "O3", build=our_llama)
    second = export(model, None, tmp_path / "second", format="fp8")
    again, _ = load_pretrained(second, "fp32", build=our_llama)
    once, _ = load_pretrained(first, "fp32", build=our_llama)
    assert_same_bits(dict(again.state_dict()), dict(once.state_dict()))


def test_scales_under_the_name_of_block_scaled_checkpoints(tmp_path: Path) -> None:
    """`weight_scale_inv` and `quant_method: fp8`, as DeepSeek-V3 and transformers' own FP8 have them."""
    source, optimizer = trained(our_llama, "O2")
    folder = export(source, optimizer, tmp_path / "out", format="fp8", strategy="block")
    expected, _ = load_pretrained(folder, "fp32", build=our_llama)
    renamed = {name.replace("weight_scale", "weight_scale_inv"): tensor for name, tensor in tensors_in(folder).items()}
    save_file(renamed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    model, _ = load_pretrained(folder, "fp32", build=our_llama)
    assert_same_bits(dict(model.state_dict()), dict(expected.state_dict()))


def test_several_files_with_an_index(tmp_path: Path) -> None:
    plain = our_llama()
    folder = export(plain, None, tmp_path / "out", format="fp32")
    split_into_files(folder)
    model, _ = load_pretrained(folder, "fp32", build=our_llama)
    assert_same_bits(dict(model.state_dict()), dict(plain.state_dict()))


class WithStatistics(nn.Module):
    """Buffers that are saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.linear = nn.Linear(64, 64)
        self.register_buffer("positions", torch.arange(4.0), persistent=False)


def test_buffers_are_read_where_they_are_saved(tmp_path: Path) -> None:
    plain = WithStatistics()
    plain.norm(torch.randn(8, 64))
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    model, _ = load_pretrained(tmp_path, "O2", build=WithStatistics)
    assert torch.equal(model.norm.running_mean, plain.norm.running_mean)
    assert int(model.norm.num_batches_tracked) == 1
    assert torch.equal(model.positions, plain.positions)


@pytest.mark.parametrize("format", ["bf16", pytest.param("fp8", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("level", spread(name for name, level in LEVELS.items() if level.has_own_fp8))
def test_the_peak_is_the_level_and_one_layer(level: str, format: str, tmp_path: Path) -> None:
    """One layer: the fp32 values of one of the four blocks. Each tensor has a file of its own, because torch counts the whole
    file that a tensor is read from, which is mapped, as memory."""
    sizes = our_llama().sizes.model_dump() | {"hidden_size": 128, "intermediate_size": 352, "num_layers": 4}

    def build() -> nn.Module:
        return Llama(LlamaSizes(**sizes))

    source, _ = initialize(build(), None, "O3")
    folder = export(source, None, tmp_path / "out", format=format)
    split_into_files(folder)
    loaded: list[Any] = []
    peak = peak_bytes(lambda: loaded.append(load_pretrained(folder, level, build=build, make_optimizer=adamw, tokens=16)))
    [(model, optimizer)] = loaded
    held = sum(memory_report(model, optimizer).values())
    one_block = 4 * sum(parameter.numel() for parameter in build().blocks[0].parameters())
    assert held < peak <= held + one_block


def test_the_experts_of_a_mixture_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its peak a matrix more than the level is held, where all experts of one layer have 16 as large."""
    monkeypatch.setattr(weights, "PIECE_ELEMENTS", 1 << 12)
    plain = their_mixture(num_experts=16, moe_intermediate_size=128)
    plain.save_pretrained(tmp_path)
    split_into_files(tmp_path)
    loaded: list[Any] = []
    peak = peak_bytes(lambda: loaded.append(load_pretrained(tmp_path, "O2", make_optimizer=adamw, tokens=16)))
    [(model, optimizer)] = loaded
    held, matrix = sum(memory_report(model, optimizer).values()), 4 * 256 * 64
    assert held <= peak <= held + 2 * matrix
    expected, _ = initialize(plain, None, "O2")
    assert_same_bits(plain_state_dict(model), plain_state_dict(expected))


class TestRefusals:
    def test_tensors_that_are_missing(self, tmp_path: Path) -> None:
        folder = export(our_llama(), None, tmp_path / "out")
        tensors = tensors_in(folder)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match=r"has no model\.layers\.1\.mlp\.up_proj\.weight"):
            load_pretrained(folder, "O2", build=our_llama)

    def test_another_size(self, tmp_path: Path) -> None:
        folder = export(our_llama(), None, tmp_path / "out")
        tensors = tensors_in(folder)
        tensors["model.norm.weight"] = torch.ones(3)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match=r"model\.norm\.weight .* has shape \(3,\); the model's is \(128,\)"):
            load_pretrained(folder, "O2", build=our_llama)

    def test_another_network(self, tmp_path: Path) -> None:
        folder = export(our_llama(), None, tmp_path / "out")
        with pytest.raises(ValueError, match="model_type 'llama'; allowed for GPT: gpt2, gpt_bigcode"):
            load_pretrained(folder, "O2", build=our_gpt)

    def test_another_quantization(self, tmp_path: Path) -> None:
        folder = export(our_llama(), None, tmp_path / "out")
        config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=r"folder: got quantization_config\.quant_method 'awq'"):
            load_pretrained(folder, "O2", build=our_llama)

    def test_codes_without_a_scale(self, tmp_path: Path) -> None:
        source, _ = initialize(our_llama(), None, "O3")
        folder = export(source, None, tmp_path / "out", format="fp8")
        tensors = {name: tensor for name, tensor in tensors_in(folder).items() if not name.endswith("scale")}
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match="is float8_e4m3fn without a scale"):
            load_pretrained(folder, "O2", build=our_llama)

    def test_a_scale_of_another_shape(self, tmp_path: Path) -> None:
        source, _ = initialize(our_llama(), None, "O3")
        folder = export(source, None, tmp_path / "out", format="fp8")
        tensors = tensors_in(folder) | {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(7, 7)}
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match=r"192×128 weight, has shape \(7, 7\); allowed: \(1,\) \(tensor\)"):
            load_pretrained(folder, "O2", build=our_llama)

    def test_no_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="allowed: a folder with a Hugging Face checkpoint"):
            load_pretrained(tmp_path, "O2", build=our_llama)

    def test_options_of_a_level(self, tmp_path: Path) -> None:
        folder = export(our_llama(), None, tmp_path / "out")
        with pytest.raises(ValueError, match="level: got"):
            load_pretrained(folder, "O9", build=our_llama)
