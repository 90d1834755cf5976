"""Masks: the share and kinds that the papers say, drawn by position, so that ranks and resumed runs agree."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octet.api_schemas import TextSpec, TokenInput
from octet.worker.common.errors import Cancelled
from octet.worker.data import open_source
from octet.worker.data.targets import MaskedTokens
from tests.kit.text import write_corpus
from tests.kit.training import Recorder, train, with_training

LENGTH, MASK = 40, 271


@pytest.fixture
def source(tmp_path: Path) -> MaskedTokens:
    spec = TextSpec(path=str(write_corpus(tmp_path / "corpus")))
    source = open_source(spec, LENGTH, seed=0, takes=TokenInput(272, LENGTH, MASK))
    assert isinstance(source, MaskedTokens)
    return source


def test_one_token_in_seven_is_predicted_and_most_of_them_are_masked(source: MaskedTokens) -> None:
    plain, batch = source.source.train_batch(0, 400)["tokens"], source.train_batch(0, 400)
    positions, targets = batch["positions"], batch["targets"]
    assert positions.shape == targets.shape == (400, 6)  # 15 % of 40
    assert torch.equal(targets, plain.gather(1, positions))
    shown = batch["tokens"].gather(1, positions)
    assert float((shown == MASK).float().mean()) == pytest.approx(0.8, abs=0.03)
    assert float((shown == targets).float().mean()) == pytest.approx(0.1, abs=0.03)
    others = torch.ones_like(plain, dtype=torch.bool).scatter_(1, positions, False)
    assert torch.equal(batch["tokens"][others], plain[others])
    assert all(len(set(row)) == 6 for row in positions.tolist())


def test_masks_depend_on_the_position_and_the_seed_alone(source: MaskedTokens) -> None:
    whole = source.train_batch(10, 8)
    parts = [source.train_batch(10 + start, 2) for start in range(0, 8, 2)]
    for name, value in whole.items():
        assert torch.equal(value, torch.cat([part[name] for part in parts]))
    num_windows = source.source.num_train_windows  # type: ignore[attr-defined]
    epochs = [source.train_batch(epoch * num_windows, num_windows) for epoch in (0, 1)]
    masks = [{tuple(tokens) for tokens in epoch["tokens"].tolist()} for epoch in epochs]
    assert len(masks[0] & masks[1]) < num_windows // 10  # each epoch hides other tokens
    other = MaskedTokens(source.source, source.vocab_size, source.mask_token, seed=1)
    assert not torch.equal(other.train_batch(10, 8)["tokens"], whole["tokens"])


def test_an_evaluation_is_the_same_from_one_rank_and_from_three(source: MaskedTokens) -> None:
    def rows(num_parts: int) -> set[tuple[Any, ...]]:
        batches = [batch for part in range(num_parts) for batch in source.evaluation_batches(6, 4, part, num_parts)]
        return {
            (*tokens.tolist(), *positions.tolist())
            for batch in batches
            for tokens, positions in zip(batch["tokens"], batch["positions"], strict=True)
        }

    assert rows(1) == rows(3)
    assert len(rows(1)) == 24


def test_a_roberta_learns_and_resumes_bit_identically(tmp_path: Path, spec_document: dict[str, Any]) -> None:
    model = {"preset": "roberta-tiny", "num_layers": 1, "hidden_size": 32, "num_heads": 2}
    training = {"steps": 16, "checkpoint_every": 8, "optimizer": {"learning_rate": 1e-2}}
    document = with_training(spec_document | {"model": model}, "O2", **training)
    whole, summary = train(document, tmp_path / "whole")
    interrupted = Recorder(stop_after_step=10)
    with pytest.raises(Cancelled):
        train(document, tmp_path / "parts", recorder=interrupted)
    resumed, again = train(document, tmp_path / "parts", interrupted.checkpoints())
    assert resumed.losses() == whole.losses()[8:]
    assert again.evaluation_loss == summary.evaluation_loss < 0.8 * whole.losses()[0]
    assert again.evaluation_metrics == summary.evaluation_metrics
    assert 0 < summary.evaluation_metrics["masked_token_accuracy"] <= 1
