"""Real models train in an ordinary loop: transformers' Swin, DeiT and RoBERTa, each built from a configuration."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octet.worker import initialize
from octet.worker.fp8.convert import ConversionReport

LEVELS = ("te", "O2", "O3-split", "O1", "O2-8bit")


def swin() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import SwinConfig, SwinForImageClassification

    sizes = {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0}
    config = SwinConfig(**sizes, image_size=32, patch_size=4, num_labels=10)
    return SwinForImageClassification(config), {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.arange(8)}


def deit() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import DeiTConfig, DeiTForImageClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = DeiTConfig(**sizes, image_size=32, patch_size=8, num_labels=10)
    return DeiTForImageClassification(config), {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.arange(8)}


def roberta() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import RobertaConfig, RobertaForMaskedLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = RobertaConfig(**sizes, **dropout, vocab_size=100, max_position_embeddings=40)
    tokens = torch.randint(5, 100, (8, 32))
    return RobertaForMaskedLM(config), {"input_ids": tokens, "labels": tokens}


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> list[float]:
    seen = []
    for _ in range(12):
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def train(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], level: str) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model, batch = make()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), opt_level=level)
    return model, losses(model.train(), optimizer, batch)


@cache
def losses_in_fp32(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> list[float]:
    return train(make, "fp32")[1]


def pairs() -> list[Any]:
    """Every network at O2, and one of them at the levels that hold other weights."""
    found = []
    for make in (swin, deit, roberta):
        for level in LEVELS:
            is_rare = level != "O2" and (make is not roberta or level not in ("te", "O3-split"))
            marks = pytest.mark.matrix if is_rare else ()
            found.append(pytest.param(make, level, id=f"{make.__name__}-{level}", marks=marks))
    return found


@pytest.mark.system
@pytest.mark.parametrize(("make", "level"), pairs())
def test_learns_as_in_fp32(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], level: str) -> None:
    model, curve = train(make, level)
    expected = losses_in_fp32(make)
    report = model.octet_report
    assert isinstance(report, ConversionReport)
    assert len(report.converted) >= 8
    assert all(layer.by_request or "head" in layer.reason for layer in report.skipped), str(report)
    assert expected[-1] < 0.9 * expected[0]
    assert curve[-1] == pytest.approx(expected[-1], rel=0.05)


def test_a_tied_head_stays_tied() -> None:
    model, batch = roberta()
    model, optimizer = initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    before = model.lm_head.decoder.weight.detach().clone()
    losses(model, optimizer, batch)
    assert model.lm_head.decoder.weight is model.roberta.embeddings.word_embeddings.weight
    assert not torch.equal(model.lm_head.decoder.weight, before)
