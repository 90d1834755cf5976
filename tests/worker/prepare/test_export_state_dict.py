"""`plain_state_dict` and transformers' `save_pretrained` return trained weights under a plain model's names."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from octet.worker import initialize, plain_state_dict
from tests.kit.small_model import FP8_LEVELS, Small, make, spread, values_of_weights


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> None:
    for step in range(num_steps):
        inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        (model(inputs) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("level", [*spread(FP8_LEVELS), "ao", "fp16-amp", "bf16-amp", "fp32"])
def test_a_plain_model_takes_it_strictly(level: str) -> None:
    model, optimizer = make(level)
    train(model, optimizer)
    plain = Small()
    plain.load_state_dict(plain_state_dict(model))
    for name, values in values_of_weights(model).items():
        assert torch.equal(plain.get_submodule(name).weight, values)
    inputs = torch.randn(4, 32)
    torch.testing.assert_close(model.eval()(inputs).float(), plain(inputs), rtol=0.1, atol=0.1)


def test_master_weights_are_taken_where_there_are_any() -> None:
    model, optimizer = make("O3")
    train(model, optimizer)
    coarse, fine = model.first.weight_values(), plain_state_dict(model)["first.weight"]
    master = optimizer.state[model.first.weight]["master_weights"]
    assert torch.equal(fine, (master["codes"].float() * master["dequant_scale"]).view(64, 32))
    assert 0 < (coarse - fine).abs().max() <= fine.abs().max() / 16


def test_the_dtype_is_that_of_weights_that_are_codes() -> None:
    model, _ = make("O2")
    state = plain_state_dict(model, dtype=torch.bfloat16)
    assert (state["first.weight"].dtype, state["norm.weight"].dtype) == (torch.bfloat16, torch.float32)


def test_a_layer_by_itself() -> None:
    linear = nn.Linear(32, 32)
    layer, _ = initialize(linear, None, "O2", convert_heads=True)
    assert list(plain_state_dict(layer)) == ["weight", "bias"]


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 96}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=32))


@pytest.mark.parametrize("level", ["te", "O2", "O3"])
@pytest.mark.parametrize("build", [llama, gpt2], ids=lambda build: build.__name__)
def test_save_pretrained_and_from_pretrained(build: Any, level: str, tmp_path: Path) -> None:
    """transformers' Trainer gives a state dict. Before, codes were loaded as weights, with a table of unexpected keys."""
    torch.manual_seed(0)
    model = build()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), level)
    tokens = torch.arange(64).view(2, 32) % 96
    for _ in range(5):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for given in ({}, {"state_dict": model.state_dict()}):
        folder = tmp_path / f"{len(given)} given"
        model.save_pretrained(folder, **given)
        loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        model.eval()
        with torch.no_grad():
            expected, actual = (each(input_ids=tokens, labels=tokens).loss for each in (model, loaded.eval()))
        assert loaded.dtype == torch.float32
        assert actual == pytest.approx(expected.item(), rel=0.01)
        model.train()


def test_a_copy_saves_itself(tmp_path: Path) -> None:
    model, _ = initialize(llama(), None, "O2")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.norm.weight.fill_(7)
    twin.save_pretrained(tmp_path)
    assert (type(model).from_pretrained(tmp_path).model.norm.weight == 7).all()
