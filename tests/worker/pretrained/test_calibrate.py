"""Static scales of inputs: as large as what calibration sees, one for each layer, and found in the folder again."""

from pathlib import Path

import pytest
import torch
from torch import nn

from octet.api_schemas.models.llama import llama_sizes
from octet.worker import initialize
from octet.worker.models.llama import Llama
from octet.worker.pretrained import Calibration, export
from octet.worker.pretrained.compressed import ACTIVATION_MAX, INPUT_SCALE, Fp8Form
from octet.worker.pretrained.files import PretrainedFiles
from octet.worker.pretrained.write import read_input_scales

STATIC = Fp8Form(activations="static")


def tokens_of(seed: int, length: int = 16) -> torch.Tensor:
    return torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def llama() -> nn.Module:
    torch.manual_seed(0)
    model, _ = initialize(Llama(llama_sizes((64, 128), 2, (4, 2), 64, 32, tied=False)), None, "O2")
    return model.eval()


@pytest.fixture
def mixture() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32}
    experts = {"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    config = transformers.Qwen3MoeConfig(vocab_size=64, num_key_value_heads=2, **sizes, **experts)
    torch.manual_seed(0)
    model, _ = initialize(transformers.Qwen3MoeForCausalLM(config), None, "O2")
    return model.eval()


def scales_of(model: nn.Module, *batches: torch.Tensor) -> dict[str, float]:
    with Calibration(model) as calibration, torch.no_grad():
        for tokens in batches:
            model(tokens)
    return calibration.input_scales()


def test_a_scale_is_the_largest_input_that_was_seen(llama: nn.Module) -> None:
    seen: dict[str, float] = {}
    layers = [name for name, module in llama.named_modules() if name.endswith(("query", "key", "output", "gate", "down"))]
    for name in layers:
        llama.get_submodule(name).register_forward_pre_hook(
            lambda _layer, inputs, name=name: seen.update({name: max(seen.get(name, 0.0), float(inputs[0].abs().max()))})
        )
    scales = scales_of(llama, *(tokens_of(seed) for seed in range(3)))
    assert {name: scales[name] * ACTIVATION_MAX for name in layers} == pytest.approx(seen)
    assert scales.keys() == set(llama.octet_report.converted)


def test_the_folder_has_what_was_found(llama: nn.Module, tmp_path: Path) -> None:
    scales = scales_of(llama, tokens_of(0))
    with pytest.raises(ValueError, match="activations static and 0 input_scales; allowed: scales with static"):
        export(llama, None, tmp_path / "without", format="fp8", form=STATIC)
    with pytest.raises(ValueError, match="strategy is block with static activations; allowed: tensor or channel"):
        export(llama, None, tmp_path / "block", format="fp8", strategy="block", form=STATIC._replace(input_scales=scales))
    folder = export(llama, None, tmp_path / "static", format="fp8", form=STATIC._replace(input_scales=scales))
    files = PretrainedFiles(folder)
    assert read_input_scales(llama, files) == pytest.approx(dict(scales))
    inputs = files.config["quantization_config"]["config_groups"]["group_0"]["input_activations"]
    assert (inputs["strategy"], inputs["dynamic"]) == ("tensor", False)
    assert not [name for name in files.names if name.endswith(INPUT_SCALE)], "who trains it again does not need them"


def test_an_expert_without_tokens_takes_the_largest_scale_beside_it(mixture: nn.Module) -> None:
    scales = scales_of(mixture, tokens_of(0, 1))
    gates = [scale for name, scale in scales.items() if "experts" in name and "gate_up" in name]
    assert len(gates) == 8, "one of them saw the token"
    assert len(set(gates)) == 1


def test_a_layer_without_inputs_is_named(llama: nn.Module) -> None:
    llama.get_submodule("blocks.1.mlp_norm").weight.data.zero_()
    with pytest.raises(ValueError, match=r"no input of blocks\.1\.mlp\.\w+ but zeros.*activations: dynamic"):
        scales_of(llama, tokens_of(0))


def test_inputs_that_are_not_finite_are_refused(llama: nn.Module) -> None:
    """A NaN is larger than nothing: its scale would be written without a word."""
    llama.get_submodule("blocks.1.mlp_norm").weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"inputs of blocks\.1\.mlp\.\w+ with the largest magnitude nan; allowed: finite"):
        scales_of(llama, tokens_of(0))


def test_larger_inputs_are_clamped() -> None:
    served = STATIC.as_served(torch.tensor([0.5, 1.0, -7.0, float("inf")]), static_scale=1 / ACTIVATION_MAX)
    assert served.tolist() == [0.5, 1.0, -1.0, 1.0]
