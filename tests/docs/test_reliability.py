"""The card of docs/reliability.md names tests that CI runs, and files that exist."""

import ast
import re

import pytest

from tests.docs.blocks import ROOT

CARD = "docs/reliability.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
FILE = re.compile(r"`((?:deploy|benchmarks)/[\w./-]+)`")


def promises() -> list[list[str]]:
    """Return the cells of each line of the card's tables."""
    lines = (ROOT / CARD).read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| promise", "| ---"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.parametrize("cells", promises(), ids=lambda cells: cells[0][:60])
def test_a_promise_names_what_shows_it(cells: list[str]) -> None:
    _, shown_by, measured = cells
    tests, files = TEST.findall(shown_by), FILE.findall(shown_by + measured)
    assert tests or files, shown_by
    for path, name in tests:
        (found,) = [node for node in ast.walk(ast.parse((ROOT / path).read_text())) if getattr(node, "name", None) == name]
        marks = {ast.unparse(mark) for mark in found.decorator_list}  # type: ignore[attr-defined]
        assert "pytest.mark.matrix" not in marks, f"CI does not run {name}"
    for path in files:
        assert (ROOT / path).is_file(), path
