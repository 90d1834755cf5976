"""The card of docs/reliability.md names tests that CI runs, and files that exist."""

import ast
import re

import pytest

from tests.docs.blocks import ROOT

CARD = "docs/reliability.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
RESULT = re.compile(r"benchmarks/results/(?P<date>\d{4}-\d\d-\d\d)-(?P<kind>[a-z-]*[a-z])(-(?P<number>\d+))?\.md")
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
        assert path in newest_of_its_kind(path), "a newer measurement of the same is there: say what it shows"


def newest_of_its_kind(path: str) -> set[str]:
    """Return the result files of a kind that are the newest: of the last date, and of the last number of that date."""
    found = RESULT.fullmatch(path)
    if found is None:
        return {path}
    results = [RESULT.fullmatch(f"benchmarks/results/{file.name}") for file in (ROOT / "benchmarks/results").iterdir()]
    same = [result for result in results if result and result["kind"] == found["kind"]]
    newest = max((result["date"], int(result["number"] or 1)) for result in same)
    return {result[0] for result in same if (result["date"], int(result["number"] or 1)) == newest}


def test_of_results_of_a_kind_the_newest_is_found() -> None:
    assert newest_of_its_kind("benchmarks/results/2026-11-22-chaos.md") == newest_of_its_kind(
        "benchmarks/results/2026-11-23-chaos.md"
    )
    assert "benchmarks/results/2026-11-22-chaos.md" not in newest_of_its_kind("benchmarks/results/2026-11-22-chaos.md")
