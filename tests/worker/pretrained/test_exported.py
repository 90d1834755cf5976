"""Exported models are loaded by transformers, in FP8 with compressed-tensors, and compute what ours compute."""

import json
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from octet.worker import export, initialize, plain_state_dict
from octet.worker.common.errors import StorageFull
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.stacks import stack_entries
from tests.kit.pretrained_models import (
    FAMILIES,
    from_pretrained,
    logits_of,
    our_gpt,
    our_llama,
    shared,
    tensors_in,
    their_llama,
    trained,
)
from tests.kit.small_disk import small_disk
from tests.kit.small_model import spread

LEVELS = spread(("te", "O1", "O2", "O3", "O3-split", "O3-split-8bit", "O2-8bit"))
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # transformers' GPTBigCode uses it

LOGIT_ERROR = 1e-3
BF16_ERROR = 0.02
"""Largest difference from our own evaluation, relative to the largest logit.

Our evaluation rounds the operands of every product to bf16.
"""
families = pytest.mark.parametrize("build", FAMILIES.values(), ids=FAMILIES.keys())


def with_default_pairs(
    others: Iterable[str], default: Container[tuple[str, str]], families: Iterable[str] = FAMILIES
) -> list[Any]:
    """Parameters of a test: families with each of the others, these pairs in `make test`, the rest in `make test-matrix`."""
    return [
        pytest.param(
            FAMILIES[family], other, marks=() if (family, other) in default else pytest.mark.matrix, id=f"{family}-{other}"
        )
        for family in families
        for other in others
    ]


@pytest.fixture(autouse=True)
def quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def assert_near_evaluation(loaded: nn.Module, model: nn.Module) -> None:
    expected = logits_of(model).float()
    torch.testing.assert_close(logits_of(loaded), expected, rtol=0, atol=BF16_ERROR * float(expected.abs().max()))


def with_plain_values(build: Callable[[], nn.Module], model: nn.Module, optimizer: torch.optim.Optimizer | None) -> nn.Module:
    """Our network in fp32 with what was trained."""
    plain = build()
    plain.load_state_dict(plain_state_dict(model))
    return plain.eval()


@pytest.mark.parametrize(
    ("build", "level"),
    with_default_pairs(
        ("O3", "bf16-amp", "te", "ao", "O2", "O3-split-8bit"),
        [*((family, "O3") for family in FAMILIES), ("llama", "bf16-amp"), ("gpt", "bf16-amp")],
    ),
)
def test_fp32_is_what_was_trained(build: Callable[[], nn.Module], level: str, tmp_path: Path) -> None:
    model, optimizer = shared(build, level)
    loaded = from_pretrained(export(model, optimizer, tmp_path / "out", format="fp32"))
    expected = with_plain_values(build, model, optimizer)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(loaded), logits_of(expected), rtol=1e-5, atol=1e-5)
        if level not in ("O3", "ao"):  # O3 evaluates its E4M3 weights, not their masters; ao in FP8
            assert_near_evaluation(loaded, model)


@pytest.mark.parametrize("level", LEVELS)
def test_bf16_is_the_nearest_of_the_finest_values(level: str, tmp_path: Path) -> None:
    model, optimizer = shared(our_llama, level)
    folder = export(model, optimizer, tmp_path / "out")
    written, values = tensors_in(folder), plain_state_dict(model)
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(written["model.layers.1.mlp.up_proj.weight"], values["blocks.1.mlp.up.weight"].to(torch.bfloat16))
    from_pretrained(folder)


@families
def test_fp8_computes_what_o3_evaluates(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model, optimizer = shared(build, "O3")
    folder = export(model, optimizer, tmp_path / "out", format="fp8", plain_dtype=torch.float32)
    loaded = from_pretrained(folder)
    plain = with_plain_values(build, model, None)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Float8Linear)}
    values = {f"{name}.weight": layer.weight_values() for name, layer in layers.items()}  # as the layers multiply them
    stack_entries(model, values)
    plain.load_state_dict(values, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(loaded), logits_of(plain), rtol=0, atol=LOGIT_ERROR)
        assert_near_evaluation(loaded, model)


@pytest.mark.parametrize(
    ("build", "level"),
    with_default_pairs(
        ("O3", "O3-split", "O3-split-8bit"),
        [("llama", "O3"), ("llama", "O3-split"), ("transformers' llama", "O3")],
        families=("llama", "transformers' llama"),
    ),
)
def test_codes_and_scales_are_those_that_were_trained(build: Callable[[], nn.Module], level: str, tmp_path: Path) -> None:
    model, optimizer = shared(build, level)
    written = tensors_in(export(model, optimizer, tmp_path / "out", format="fp8"))
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Float8Linear)}
    codes = [name for name, tensor in written.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(codes) == len(layers) == 14
    for name, layer in layers.items():
        theirs = name.replace("blocks", "model.layers").replace("attention.query", "self_attn.q_proj")
        if build is our_llama and "query" not in name:
            continue
        assert torch.equal(written[f"{theirs}.weight"].view(torch.uint8), layer.weight.codes.view(torch.uint8))
        assert torch.equal(written[f"{theirs}.weight_scale"], layer.weight.dequant_scale.reshape(1))


@pytest.mark.parametrize("level", ["O2", *(pytest.param(level, marks=pytest.mark.matrix) for level in ("te", "O3"))])
@pytest.mark.parametrize(
    ("build", "strategy"),
    with_default_pairs(
        ("tensor", "channel", "block"),
        [
            *(("llama", strategy) for strategy in ("tensor", "channel", "block")),
            *(("gpt", "channel"), ("tied llama", "tensor"), ("transformers' llama", "block")),
        ],
    ),
)
def test_strategies_are_read_as_they_were_written(
    build: Callable[[], nn.Module], level: str, strategy: str, tmp_path: Path
) -> None:
    """The independent reader: compressed-tensors' own arithmetic on codes and scales, against the values that were trained."""
    model, optimizer = shared(build, level)
    folder = export(model, optimizer, tmp_path / "out", format="fp8", strategy=strategy, plain_dtype=torch.float32)
    loaded = from_pretrained(folder)
    with torch.no_grad():
        logits = logits_of(loaded)  # decompresses
        expected = logits_of(with_plain_values(build, model, optimizer))
    assert (logits - expected).abs().max() < 0.1 * expected.abs().max()
    exact = from_pretrained(export(model, optimizer, tmp_path / "exact", format="fp32")).state_dict()
    for name, values in loaded.state_dict().items():
        if f"{name}_scale" in tensors_in(folder) and "c_attn" not in name:
            reference = exact[name].t() if build is our_gpt else exact[name]
            bound = reference.abs() * 2**-4 + _smallest_step(reference, strategy)
            assert ((values - reference).abs() <= bound).all(), name


def _smallest_step(values: torch.Tensor, strategy: str) -> torch.Tensor:
    """Half of E4M3's smallest step at a power-of-two scale at which the largest value has a code of at least 224."""
    amax = values.abs().amax(1, keepdim=True) if strategy == "channel" else values.abs().max()
    return amax / 224 * 2.0**-10 * 2.01


def test_the_default_strategy_is_that_of_the_products(tmp_path: Path) -> None:
    model, optimizer = trained(our_llama, "te", recipe={"scaling": "current", "granularity": "block"})
    folder = export(model, optimizer, tmp_path / "out", format="fp8")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["strategy"] == "block"
    written = tensors_in(folder)
    assert written["model.layers.0.mlp.up_proj.weight_scale"].shape == (2, 1)
    layer = model.get_submodule("blocks.0.mlp.up")
    operand, _ = layer.weight_scaling.quantize(layer.weight_values(), columns=False)
    assert torch.equal(written["model.layers.0.mlp.up_proj.weight"].view(torch.uint8), operand.codes.view(torch.uint8))


def test_the_head_is_not_quantized_and_says_so(tmp_path: Path) -> None:
    model, optimizer = shared(our_llama, "O3")
    folder = export(model, optimizer, tmp_path / "out", format="fp8")
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]
    assert tensors_in(folder)["lm_head.weight"].dtype == torch.bfloat16


def test_codes_that_were_loaded_since_are_exported_and_not_the_master_of_before(tmp_path: Path) -> None:
    model, optimizer = trained(our_llama, "O3")
    other = our_llama().state_dict()
    model.load_state_dict({name: 2 * value for name, value in other.items()})
    written = tensors_in(export(model, optimizer, tmp_path / "out", format="fp32"))
    expected = 2 * other["blocks.0.mlp.up.weight"]
    assert torch.equal(written["model.layers.0.mlp.up_proj.weight"], expected)


def test_a_model_of_transformers_keeps_its_config(tmp_path: Path) -> None:
    model, optimizer = shared(their_llama, "O3")
    before = model.config.to_dict()
    export(model, optimizer, tmp_path / "out", format="fp8")
    assert model.config.to_dict() == before


class TestRefusals:
    """An export that cannot be written is refused before any file is."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"format": "fp16"}, "format is 'fp16'; allowed: bf16, fp32, fp8"),
            ({"format": "fp8", "strategy": "row"}, "allowed: tensor, channel, block"),
            ({"strategy": "tensor"}, 'with format "fp8" alone'),
        ],
    )
    def test_options(self, options: dict[str, str], message: str, tmp_path: Path) -> None:
        model, _ = initialize(our_llama(), None, "O2")
        with pytest.raises(ValueError, match=message):
            export(model, None, tmp_path / "out", **options)
        assert not list(tmp_path.iterdir())

    def test_a_folder_with_something_in_it(self, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("")
        with pytest.raises(ValueError, match="is not an empty folder"):
            export(our_llama(), None, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]

    def test_a_model_that_transformers_does_not_know(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="Linear has no form in transformers"):
            export(nn.Linear(16, 16), None, tmp_path / "out")

    def test_a_plain_model_in_fp8(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="writes converted layers; the model has none"):
            export(our_llama(), None, tmp_path / "out", format="fp8")

    def test_conv1d_in_fp8(self, tmp_path: Path) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        model, _ = initialize(GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=96)), None, "O3")
        with pytest.raises(ValueError, match="are Conv1D, which compressed-tensors does not quantize"):
            export(model, None, tmp_path / "out", format="fp8")


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 400_000) as disk:
        with pytest.raises(StorageFull, match="the exported model does not fit on the disk"):
            export(our_llama(), None, disk.path / "out", format="fp32")
        assert not list(disk.path.iterdir())
