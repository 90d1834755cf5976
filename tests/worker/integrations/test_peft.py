"""PEFT's LoRA around a model of `initialize`, or below it: train, save, load, merge and unload by values of a plain model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet import initialize
from octet.api_schemas.levels import LEVELS
from tests.worker.integrations.tiny import examples, llama

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's own warnings
SPREAD = {"before": "O3", "after": "O2"}
ROUNDING = {"fp32": 1e-6, "fp16+scale": 4e-4, "fp8": 0.04}
"""Largest relative error of a matrix in a format, with one scale. A frozen weight of O3 has no master."""


def config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0)


def adapted(level: str | None, order: str, seed: int = 0) -> Any:
    """A Llama with adapters, converted to a level before it got them, or after."""
    from peft import get_peft_model

    model: Any = llama()
    if level is not None and order == "after":
        model, _ = initialize(model, None, level)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = get_peft_model(model, config())
    if level is not None and order == "before":
        model, _ = initialize(model, None, level)
    return model


def train(model: nn.Module, num_steps: int = 4) -> list[float]:
    ids = torch.stack([row["input_ids"] for row in examples(8)])
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for _ in range(num_steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() + 0 for name, parameter in model.named_parameters()}


def of_base(model: nn.Module) -> dict[str, Tensor]:
    """Values of the base model, by its own names."""
    named = {name.replace("base_model.model.", "").replace(".base_layer", ""): value for name, value in values(model).items()}
    return {name: value for name, value in named.items() if "lora_" not in name}


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def cases() -> list[Any]:
    """Both orders at every level; in `make test` one of each."""
    return [
        pytest.param(level, order, marks=() if level == SPREAD[order] else pytest.mark.matrix)
        for order in SPREAD
        for level in LEVELS
    ]


@pytest.mark.parametrize(("level", "order"), cases())
def test_what_peft_makes_is_what_it_makes_of_a_plain_model(level: str, order: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model, plain = adapted(level, order), values(llama())
    base = of_base(model)
    close, exact = ROUNDING[LEVELS[level].weight], 1e-6
    if LEVELS[level].master_weight == "int8-residual":
        close = ROUNDING["fp16+scale"]
    assert all(distance(base[name], value) < close for name, value in plain.items())
    assert train(model) == pytest.approx(train(adapted(None, order)), rel=2e-3)
    assert all(torch.equal(value, base[name]) for name, value in of_base(model).items())

    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(llama() if order == "before" else initialize(llama(), None, level)[0], tmp_path)
    saved = {name: value for name, value in values(model).items() if "lora_" in name}
    assert all(torch.equal(values(again)[name], value) for name, value in saved.items())
    of_a_plain_model = PeftModel.from_pretrained(llama(), tmp_path).merge_and_unload()
    changes = {name: value - plain[name] for name, value in values(of_a_plain_model).items()}

    model.merge_adapter()
    model.unmerge_adapter()
    assert all(distance(value, base[name]) < exact for name, value in of_base(model).items())
    merged = model.merge_and_unload()
    assert type(merged) is type(llama())
    for name, value in values(merged).items():
        assert distance(value, base[name] + changes[name]) < exact, name
    assert sum(bool(change.any()) for change in changes.values()) == 3


@pytest.mark.parametrize("level", ["O3", pytest.param("O2", marks=pytest.mark.matrix)])
def test_adapters_are_unloaded(level: str) -> None:
    model = adapted(level, "after")
    base = of_base(model)
    train(model)
    unloaded = model.unload()
    assert all(torch.equal(value, base[name]) for name, value in values(unloaded).items())


def test_a_layer_of_gpt2_is_refused_by_peft() -> None:
    """Its weight is (K, N), and only transformers' own class says so to PEFT. Adapters that come before `initialize` train."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    def gpt2() -> Any:
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=16, vocab_size=64))

    asked = LoraConfig(r=4, target_modules=["c_proj"], fan_in_fan_out=True)
    with pytest.raises(ValueError, match=r"(?s)Target module Float8Linear.* is not supported"):
        get_peft_model(initialize(gpt2(), None, "O2")[0], asked)
    model, _ = initialize(get_peft_model(gpt2(), asked), None, "O2")
    model(input_ids=torch.arange(16)[None]).logits.square().mean().backward()
    assert all(one.grad is not None for name, one in model.named_parameters() if "lora_B" in name)
