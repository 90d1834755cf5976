"""Our Llama computes what transformers' Llama does, has the published sizes, and trains as a job at every level."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from octet.api_schemas import JobSpec, StepReport, explain
from octet.api_schemas.models.llama import LlamaSizes, LlamaSpec
from octet.worker.models import build_model
from octet.worker.models.llama import Llama
from tests.kit.training import train, with_training

TINY = LlamaSizes(
    hidden_size=32,
    intermediate_size=88,
    num_layers=2,
    num_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    max_sequence_length=16,
    rope_theta=10_000.0,
    tie_embeddings=False,
)
NAMES = {
    "token_embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def in_transformers_words(name: str) -> str:
    module = name.removesuffix(".weight")
    if not module.startswith("blocks."):
        return f"{NAMES[module]}.weight"
    _, layer, rest = module.split(".", 2)
    return f"model.layers.{layer}.{NAMES[rest]}.weight"


def test_it_computes_what_transformers_does() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=16,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    theirs, ours = LlamaForCausalLM(config).eval(), Llama(TINY, seed=3)
    weights = {in_transformers_words(name): parameter.detach() for name, parameter in ours.named_parameters()}
    theirs.load_state_dict(weights)
    tokens_BT = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(tokens_BT), theirs(tokens_BT).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_the_contract_counts_the_parameters_of_the_network(tied: bool) -> None:
    sizes = TINY.model_copy(update={"tie_embeddings": tied})
    model = Llama(sizes)
    assert sum(parameter.numel() for parameter in model.parameters()) == sizes.num_parameters
    blocks = [parameter for name, parameter in model.named_parameters() if name.startswith("blocks.") and parameter.dim() == 2]
    assert sum(parameter.numel() for parameter in blocks) == sizes.num_block_weights


@pytest.mark.parametrize(
    ("preset", "num_parameters"),
    [("llama-1b", 1_235_814_400), ("llama-3b", 3_212_749_824), ("llama-8b", 8_030_261_248), ("llama-70b", 70_553_706_496)],
)
def test_presets_have_the_published_number_of_parameters(preset: str, num_parameters: int) -> None:
    assert LlamaSpec.model_validate({"preset": preset}).sizes.num_parameters == num_parameters


def test_a_preset_names_its_family(spec_document: dict[str, Any]) -> None:
    spec = JobSpec.model_validate(spec_document | {"model": {"preset": "llama-tiny"}})
    assert isinstance(spec.model, LlamaSpec)
    assert JobSpec.read_stored(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("model", "field", "allowed"),
    [
        ({"family": "lama", "preset": "llama-tiny"}, "model.family", "gpt, llama"),
        ({"family": "llama", "preset": "gpt-tiny"}, "model.preset", "llama-tiny"),
        ({"preset": "llama-tiny", "num_heads": 3}, "model.num_heads", "1, 2, 4"),
        ({"preset": "llama-tiny", "num_key_value_heads": 3}, "model.num_key_value_heads", "1, 2, 4"),
        ({"preset": "llama-tiny", "intermediate": 3}, "model.intermediate", "intermediate_size"),
        ({"family": "llama", "hidden_size": 64}, "model.intermediate_size", "a preset"),
    ],
)
def test_a_bad_llama_is_refused_by_the_path_that_a_user_writes(
    spec_document: dict[str, Any], model: dict[str, Any], field: str, allowed: str
) -> None:
    with pytest.raises(ValidationError) as raised:
        JobSpec.model_validate(spec_document | {"model": model})
    (violation,) = explain(raised.value, JobSpec)
    assert violation.field == field
    assert allowed in str(violation.allowed)


@pytest.mark.parametrize("level", ["fp32", "ao", "O2", "O3-split-8bit", pytest.param("te", marks=pytest.mark.matrix)])
def test_a_job_trains_it(tmp_path: Path, spec_document: dict[str, Any], level: str) -> None:
    model = {"preset": "llama-tiny", "hidden_size": 64, "intermediate_size": 176, "num_layers": 1}
    document = with_training(spec_document | {"model": model}, level, steps=12, optimizer={"learning_rate": 1e-2})
    recorder, summary = train(document, tmp_path)
    losses = [report.loss for report in recorder.of(StepReport)]
    assert losses[-1] < 0.75 * losses[0]
    assert summary.num_parameters == LlamaSpec.model_validate(model).sizes.num_parameters
    if level != "fp32":
        assert summary.num_converted_parameters == LlamaSpec.model_validate(model).sizes.num_block_weights


def test_the_same_seed_builds_the_same_network() -> None:
    spec = LlamaSpec.model_validate({"preset": "llama-tiny"})
    first, second = (dict(build_model(spec, seed=7).named_parameters()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
