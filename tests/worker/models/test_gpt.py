"""The GPT: its size, its causality, its tied head, its initial values."""

import math

import pytest
import torch

from octet.api_schemas import PRESETS, GPTSizes
from octet.worker.models.gpt import GPT

TINY = GPTSizes(hidden_size=32, num_layers=2, num_heads=4, vocab_size=64, max_sequence_length=16)


def test_the_parameter_count_is_the_one_the_contract_predicts() -> None:
    sizes = PRESETS["gpt-tiny"]
    assert GPT(GPTSizes(**sizes.model_dump())).num_parameters == sizes.num_parameters


def test_a_token_sees_only_earlier_tokens() -> None:
    model = GPT(TINY)
    tokens_BT = torch.arange(16).reshape(1, 16)
    changed_BT = tokens_BT.clone()
    changed_BT[0, 9:] = 63
    torch.testing.assert_close(model(tokens_BT)[0, :9], model(changed_BT)[0, :9])
    assert not torch.allclose(model(tokens_BT)[0, 9:], model(changed_BT)[0, 9:])


def test_the_loss_starts_near_that_of_a_uniform_guess() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens_BT, targets_BT = torch.randint(0, 64, (2, 8, 16), generator=generator)
    assert GPT(TINY).loss({"tokens": tokens_BT, "targets": targets_BT}).loss.item() == pytest.approx(math.log(64), rel=0.02)


def test_the_head_is_the_embedding() -> None:
    model = GPT(TINY)
    assert model.head.weight is model.token_embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_the_seed_decides_the_initial_values() -> None:
    one, same, other = GPT(TINY, seed=1), GPT(TINY, seed=1), GPT(TINY, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.blocks[0].mlp.up.weight, other.blocks[0].mlp.up.weight)
    assert one.blocks[0].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert one.blocks[0].mlp.down.weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.1)


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="got 17 tokens; at most max_sequence_length 16"):
        GPT(TINY)(torch.zeros(1, 17, dtype=torch.int64))


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match=r"Change model\.num_heads"):
        GPT(GPTSizes(hidden_size=30, num_layers=1, num_heads=4, vocab_size=64, max_sequence_length=16))
