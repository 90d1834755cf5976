"""Published figures beside plans: closed forms are near, every peak can be traced, and the docs have all of them."""

from pathlib import Path

import pytest
import torch

from benchmarks import published
from benchmarks.gpu.networks import build_gpt
from benchmarks.scaling import Kept, Layout
from octet.api_schemas.models.gpt import gpt_sizes
from octet.api_schemas.plan import why_not_traced

ROOT = Path(__file__).parents[2]


def test_states_are_near_what_was_published() -> None:
    assert [abs(row.difference) < 0.04 for row in published.closed_forms()] == [True, True]


def test_every_setting_can_be_traced() -> None:
    assert [(row.setting, why_not_traced(row.job)) for row in published.PEAKS if why_not_traced(row.job)] == []


def test_a_row_states_both_figures_in_one_unit() -> None:
    rows = [
        published.compared("a run", 50.25, 45.0, "GB", "theirs keeps copies"),
        published.compared("a run", 50.0, 45.0, "GB", "the allocator's share", 49.0),
        published.within("a rate", 100, (90.0, 110.0), "tokens/s", "a range"),
        published.within("a rate", 100, (110.0, 120.0), "tokens/s", "a range"),
    ]
    assert published.table(rows).splitlines()[2:] == [
        "| a run | 50.25 GB | 45.0 GB |  | -10.4% | theirs keeps copies |",
        "| a run | 50 GB | 45.0 GB | 49.0 GB | -2.0% | the allocator's share |",
        "| a rate | 100 tokens/s | 90 to 110 tokens/s |  | within | a range |",
        "| a rate | 100 tokens/s | 110 to 120 tokens/s |  | +10.0% | a range |",
    ]


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
    for row in published.PEAKS:
        figure = f"| {row.setting} | {row.peak:g} {units[row.unit]} |"
        assert figure in text, "run python -m benchmarks.published --write docs/plans.md"
        assert f"| {row.why} |" in text
    for setting, *_, why in published.SPEEDS:
        assert f"{setting} |" in text
        assert f"| {why} |" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(f"| {published.FP8_LM}: ")]
    own_formats = [cells for cells in rows if cells[3].strip()]
    assert len(own_formats) == 10
    differences = {cells[0]: float(cells[4].strip(" %")) for cells in own_formats}
    by_slopes = {cells[0] for cells in own_formats if "of a token's element" in cells[5]}
    assert len(by_slopes) == 4
    assert all(name.endswith("MS-AMP O3") and abs(differences[name]) < 22 for name in by_slopes)
    assert all(abs(differences[name]) < 9 for name in differences.keys() - by_slopes)


def test_a_system_s_formats_are_bytes_of_parameters_activations_and_what_a_plan_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, layout = gpt_sizes(64, 4, 2, 256, 32), Layout(2, 2, 4, 64)
    monkeypatch.setattr(published, "kept_by_block", lambda *_: Kept(1000.0, 7.0))
    found = published.in_their_formats(sizes, "te", published.Stored(4, 4, 12), layout, 3)
    half = build_gpt(sizes.model_copy(update={"num_layers": 2}), torch.device("meta")).num_parameters / 2
    embedded, outside = (256 + 32) * 64 / 2, published.CONTEXT_BYTES + published.OTHERS_NCCL_BYTES
    states = (half - embedded) * (4 + 4 + 12 / 4) + embedded * (2 + 4 + 12 / 4)
    assert found == states + 3 * 1000 * 2 * 2 / 2 + outside
    alone = published.in_their_formats(sizes, "te", published.Stored(0, 0, 0, 5), Layout(1, 1, 1, 1), 1)
    assert alone == 2 * embedded * 18 + 4 * 5 * 32 * 64 + 6 * 32 * 256 + outside, "with the logits"
