"""The peaks that the package ships are those that the planner traces."""

import json
from itertools import product

import pytest

from octet.api_schemas.models import PRESETS
from octet.api_schemas.preset_peaks import FILE, SHIPPED
from tests.worker.planning.test_planning import run

SOME = [("gpt-1.3b", "O1"), ("llama-8b", "te")]
OTHERS = [each for each in product(PRESETS, SHIPPED.values()) if each not in SOME]


@pytest.mark.parametrize(
    ("preset", "level"),
    [pytest.param(*each, marks=pytest.mark.system) for each in SOME]
    + [pytest.param(*each, marks=pytest.mark.matrix) for each in OTHERS],
)
def test_what_is_shipped_is_what_is_traced(preset: str, level: str) -> None:
    """If not: python -m octet.worker.planning.presets."""
    found = json.loads(run("tests.worker.planning.traced", "preset", preset, level))
    assert found == json.loads(FILE.read_text())[preset][level]


@pytest.mark.system
def test_shipped_lines_give_the_peak_of_other_batches() -> None:
    found = json.loads(run("tests.worker.planning.traced", "of preset"))
    assert found["shipped"] == pytest.approx(found["traced"], rel=0.002)
