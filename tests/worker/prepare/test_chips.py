"""Events and errors of `initialize` for graphics cards that nobody has measured, by their names and capabilities alone."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from octet.api_schemas.levels import LEVELS
from octet.worker import initialize
from octet.worker.fp8.speedups import load_tables
from octet.worker.prepare import convert
from octet.worker.train.reports import conversion_events

CARDS = {
    "NVIDIA H200": (9, 0),
    "NVIDIA H100 80GB HBM3": (9, 0),
    "NVIDIA L40S": (8, 9),
    "NVIDIA B200": (10, 0),
    "NVIDIA GeForce RTX 5090": (12, 0),
}
TOO_OLD = {"NVIDIA A100-SXM4-80GB": (8, 0), "NVIDIA A10G": (8, 6)}
Card = Callable[[str, tuple[int, int]], None]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """Let models be found on a card of a name and capability. No part of the conversion computes there."""

    def find(name: str, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(convert, "_device_of", lambda *_: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)

    return find


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


@pytest.mark.parametrize("name", CARDS)
def test_a_card_that_nobody_measured_says_by_which_table_its_layers_were_chosen(name: str, card: Card) -> None:
    capability = CARDS[name]
    card(name, capability)
    model, _ = initialize(small_model(), opt_level="O2")
    (table,) = load_tables()
    own = "" if capability == tuple(table.capability) else f"; {name} ({capability[0]}.{capability[1]}) has no table"
    ends = r"0\.\d\d to 0\.\d\d by other assumptions"
    reasons = [layer.reason for layer in model.octet_report.filtered]
    assert len(reasons) == 2
    for reason in reasons:
        assert re.fullmatch(
            rf"64 -> 64 features at 8,192 tokens: 0\.\d\d of bf16's speed in FP8, {ends} \({table.origin}{re.escape(own)}\)",
            reason,
        )


@pytest.mark.parametrize("name", CARDS)
def test_a_card_that_nobody_measured_says_so_where_no_layer_is_left_in_bf16_too(name: str, card: Card) -> None:
    capability = CARDS[name]
    card(name, capability)
    model, _ = initialize(nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)), opt_level="O2", tokens=65_536)
    report, (table,) = model.octet_report, load_tables()
    assert report.filtered == ()
    if capability == tuple(table.capability):
        assert report.borrowed_table is None
        assert list(conversion_events(report, model)) == []
    else:
        said = f"{table.origin}; {name} ({capability[0]}.{capability[1]}) has no table"
        assert f"layers in FP8 are chosen by speedups {said}" in str(report)
        [event] = conversion_events(report, model)
        assert event.type == "layers.unmeasured_device"
        assert event.message.endswith(said)


@pytest.mark.parametrize("options", [{"auto_filter": False}, {"recipe": {"granularity": "mx"}}])
def test_a_card_is_told_of_no_table_where_none_decides(options: dict[str, Any], card: Card) -> None:
    card("NVIDIA B200", (10, 0))
    assert initialize(small_model(), opt_level="O2", **options)[0].octet_report.borrowed_table is None


@pytest.mark.parametrize("name", TOO_OLD)
@pytest.mark.parametrize("level", [name for name, level in LEVELS.items() if level.gemm == "fp8"])
def test_a_card_without_fp8_is_refused_with_what_can_be_used(level: str, name: str, card: Card) -> None:
    card(name, TOO_OLD[name])
    with pytest.raises(
        ValueError, match=rf"level {level} .* {name} has compute capability 8\.\d; allowed: 8\.9 or later .* bf16-amp"
    ):
        initialize(small_model(), opt_level=level)


@pytest.mark.parametrize("level", ["fp32", "bf16-amp", "fp16-amp"])
def test_a_card_without_fp8_trains_at_the_other_levels(level: str, card: Card) -> None:
    card("NVIDIA A100-SXM4-80GB", (8, 0))
    initialize(small_model(), opt_level=level)
