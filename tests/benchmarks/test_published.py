"""Published figures beside plans: closed forms are near, every peak can be traced, and the docs have all of them."""

from pathlib import Path

import pytest

from benchmarks import published
from octet.api_schemas.plan import why_not_traced

ROOT = Path(__file__).parents[2]


def test_states_are_near_what_was_published() -> None:
    assert [abs(row.difference) < 0.04 for row in published.closed_forms()] == [True, True]


def test_every_setting_can_be_traced() -> None:
    assert [(setting, why_not_traced(job)) for setting, _, _, job, _ in published.PEAKS if why_not_traced(job)] == []


def test_a_row_states_both_figures_in_one_unit() -> None:
    row = published.compared("a run", 50.25, 45.0, "GB", "theirs keeps copies")
    assert published.table([row]).splitlines()[-1] == "| a run | 50.25 GB | 45.0 GB | -10.4% | theirs keeps copies |"


def test_the_table_of_a_page_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{published.BEGIN}old\n{published.END}after\n")
    published.write(page, "new")
    assert page.read_text() == f"before\n{published.BEGIN}\nnew\n{published.END}after\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="allowed: a page with both"):
        published.write(page, "new")


def test_the_docs_have_every_setting_as_it_is_published() -> None:
    text = (ROOT / "docs/plans.md").read_text()
    units = {published.GIB: "GiB", published.GB: "GB"}
    for setting, figure, unit, _, why in published.PEAKS:
        assert f"| {setting} | {figure:g} {units[unit]} |" in text, "run python -m benchmarks.published --write docs/plans.md"
        assert f"| {why} |" in text
