"""The dashboard files are up to date, complete, and valid against Grafana's schema (schemas/README.md)."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana import fleet, job, levels
from deploy.grafana.generate import BOARDS, FOLDER, generated
from deploy.grafana.model import STATE_COLORS, TAG, Board, Panel
from octet.api_schemas import JobState
from octet.client.render import STATE_STYLES
from octet.service.telemetry import jobs as telemetry
from octet.worker.metrics import exporter
from tests.kit.schemas import violation
from tests.observability.dcgm import DEFAULT_COUNTERS, LABELS, PROFILING_COUNTERS
from tests.observability.live import DCGM, ROOT

GRAFANA_VERSION = "12.2.0"
SCHEMA = json.loads((Path(__file__).parent / f"schemas/grafana-{GRAFANA_VERSION}.schema.json").read_text())

TERMINAL_HUES = {
    "blue": {"blue", "cyan"},
    "purple": {"magenta"},
    "yellow": {"yellow"},
    "orange": {"yellow"},
    "green": {"green"},
    "red": {"red"},
}

each_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)


def document(board: Board) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{board.uid}.json").read_text())
    return found


def panels(board: Board) -> list[dict[str, Any]]:
    return [panel for panel in flat(document(board)) if panel["type"] != "row"]


def flat(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows and panels in their order. A collapsed row holds its panels."""
    return [part for panel in dashboard["panels"] for part in (panel, *panel.get("panels", ()))]


@each_board
def test_the_committed_json_is_what_the_code_generates(board: Board) -> None:
    assert (FOLDER / f"{board.uid}.json").read_text() == generated(board), "run `make dashboards` and commit"


def test_no_other_dashboard_lies_about() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {board.uid for board in BOARDS}


def test_uids_never_change() -> None:
    assert [board.uid for board in BOARDS] == ["octet-fleet", "octet-job", "octet-levels", "octet-service"]


def problem(dashboard: dict[str, Any]) -> str:
    """Return the first violation of Grafana's schema; empty if there is none."""
    return violation(dashboard | {"panels": unfolded(dashboard)}, SCHEMA)


def unfolded(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels with those of collapsed rows beside their rows: the schema knows rows without panels."""
    return [part | {"panels": []} if part.get("panels") else part for part in flat(dashboard)]


def a_panel(dashboard: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(panel for panel in flat(dashboard) if panel["type"] == kind)
    return found


@each_board
def test_the_json_fits_grafanas_schema(board: Board) -> None:
    assert problem(document(board)) == ""


def test_the_schema_has_the_version_of_the_grafana_that_we_ship() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert compose["services"]["grafana"]["image"] == f"grafana/grafana:{GRAFANA_VERSION}"


SPOILT: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a title that is a number": ("octet-job", lambda board: board.update(title=7)),
    "an unknown field of the board": ("octet-job", lambda board: board.update(panel=[])),
    "no schema version": ("octet-job", lambda board: board.pop("schemaVersion")),
    "an unknown field of a panel": ("octet-job", lambda board: a_panel(board, "timeseries").update(descripton="typo")),
    "a panel of the past": ("octet-job", lambda board: a_panel(board, "timeseries").update(type="graph")),
    "a panel without a place": ("octet-job", lambda board: a_panel(board, "timeseries").pop("gridPos")),
    "half a query": ("octet-job", lambda board: a_panel(board, "timeseries").update(targets=[{"expr": "up"}])),
    "an unknown option": ("octet-job", lambda board: a_panel(board, "stat")["options"].update(colour="red")),
    "a value that no point has": (
        "octet-job",
        lambda board: a_panel(board, "timeseries")["fieldConfig"]["defaults"]["custom"].update(showPoints="sometimes"),
    ),
    "half a transformation": ("octet-fleet", lambda board: a_panel(board, "table").update(transformations=["merge"])),
    "an unmapped xychart": ("octet-levels", lambda board: a_panel(board, "xychart")["options"].pop("mapping")),
    "an unknown variable": ("octet-levels", lambda board: board["templating"]["list"][1].update(type="choice")),
    "an annotation of nothing": ("octet-job", lambda board: board["annotations"]["list"][0].pop("expr")),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_spoilt_dashboard_does_not_fit(spoilt: str) -> None:
    uid, spoil = SPOILT[spoilt]
    dashboard = json.loads((FOLDER / f"{uid}.json").read_text())
    spoil(dashboard)
    assert problem(dashboard)


@each_board
def test_the_sdk_reads_it(board: Board) -> None:
    read = Dashboard.from_json(document(board))
    assert read.uid == board.uid
    assert len(panels(board)) == len(board.panels)
    assert len(read.panels or []) == len(board.rows) + sum(len(row.panels) for row in board.rows if not row.is_collapsed)


@each_board
def test_every_panel_has_unit_description_source_and_query(board: Board) -> None:
    assert panels(board)
    for panel in panels(board):
        assert panel["title"], panel
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert len(panel["description"]) > 5, panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        assert panel["targets"], panel["title"]
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"]), panel["title"]


@each_board
def test_panels_have_ids_of_their_own_and_do_not_overlap(board: Board) -> None:
    assert len({panel["id"] for panel in panels(board)}) == len(panels(board))
    taken: set[tuple[int, int]] = set()
    for panel in document(board)["panels"]:  # a collapsed row alone takes room
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


@each_board
def test_boards_link_to_each_other_and_choose_their_source(board: Board) -> None:
    found = document(board)
    assert found["tags"] == [TAG]
    assert [link["tags"] for link in found["links"]] == [[TAG]]
    assert found["templating"]["list"][0]["type"] == "datasource"


def test_the_fleet_opens_jobs() -> None:
    assert "/d/octet-job?var-job_id=" in (FOLDER / "octet-fleet.json").read_text()


DCGM_PANELS = [panel for board in BOARDS for panel in board.panels if "DCGM_" in panel.queries[0].expr]


@pytest.mark.parametrize("panel", DCGM_PANELS, ids=lambda panel: panel.title)
def test_a_dcgm_panel_queries_a_metric_that_the_exporter_serves(panel: Panel) -> None:
    (query,) = panel.queries
    labels, name = re.fullmatch(r"max by \(([\w, ]+)\) \((\w+)\)", query.expr).groups()  # type: ignore[union-attr]
    assert set(labels.split(", ")) == set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= set(LABELS)
    assert (DEFAULT_COUNTERS | PROFILING_COUNTERS)[name] == "gauge", "a counter would need a rate"
    assert (name in DEFAULT_COUNTERS) != (name in panel.description), "a panel must name metrics not served by default"


def test_the_stand_in_for_dcgm_serves_the_metrics_of_the_panels() -> None:
    assert {name for panel in DCGM_PANELS for name in re.findall(r"DCGM_\w+", panel.queries[0].expr)} == set(DCGM)


def test_loss_by_step_is_a_curve_for_each_level() -> None:
    """Grafana takes the first number of a row as x and the second as y, so the order of the queries matters."""
    drawn = [panel for panel in panels(levels.BOARD) if panel["type"] == "xychart"]
    (panel,) = [panel for panel in drawn if len(panel["targets"]) == 2]
    assert [target["expr"].partition(") (")[2].partition(")")[0] for target in panel["targets"]] == [
        "octet_job_step",
        "octet_job_loss",
    ]
    assert {target["format"] for target in panel["targets"]} == {"table"}
    assert [transformation["id"] for transformation in panel["transformations"]] == ["merge", "partitionByValues"]
    assert panel["transformations"][1]["options"]["fields"] == ["level"]


def test_the_difference_by_step_is_a_curve_for_each_level_and_end_of_the_band() -> None:
    drawn = [panel for panel in panels(levels.BOARD) if panel["type"] == "xychart"]
    (panel,) = [panel for panel in drawn if len(panel["targets"]) == 1]
    steps = [transformation["id"] for transformation in panel["transformations"]]
    assert steps == ["merge", "convertFieldType", "sortBy", "organize", "partitionByValues"]
    assert panel["transformations"][-1]["options"]["fields"] == ["curve"]
    assert "min" not in panel["fieldConfig"]["defaults"], "a level may be better than the yardstick"
    assert all(f"yardstick, {end} of its seeds" in panel["targets"][0]["expr"] for end in ("highest", "lowest"))


@each_board
def test_no_axis_of_a_loss_begins_at_zero(board: Board) -> None:
    """Levels differ by a hundredth of their loss, which bars and curves from 0 on hide."""
    losses = [
        panel
        for panel in panels(board)
        if all("_loss" in target["expr"] or "_perplexity" in target["expr"] for target in panel["targets"])
    ]
    assert {panel["type"] for panel in losses} <= {"timeseries", "xychart", "stat"}
    assert [panel["title"] for panel in losses if panel["fieldConfig"]["defaults"].get("min") is not None] == []
    drawn = [panel["title"] for panel in losses if panel["type"] == "timeseries"]
    assert drawn == (["Loss", "Loss as each rank sees it", "Perplexity"] if board is job.BOARD else [])


def test_a_state_has_the_same_colour_on_every_board() -> None:
    """ "starting" is no failure and "failed" is red; the terminal's hues are these too."""
    for state, color in STATE_COLORS.items():
        assert STATE_STYLES[JobState(state)] in TERMINAL_HUES[color.removeprefix("light-")], state
    found = [panel for board in BOARDS for panel in panels(board) if "{{state}}" in json.dumps(panel["targets"])]
    overrides = [
        {
            override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
            for override in panel["fieldConfig"]["overrides"]
        }
        for panel in found
        if panel["title"] == "Jobs by state"
    ]
    assert overrides == [STATE_COLORS]


def test_the_job_board_shows_six_panels_and_folds_the_rest() -> None:
    rows = [panel for panel in document(job.BOARD)["panels"] if panel["type"] == "row"]
    assert [bool(row["collapsed"]) for row in rows] == [False] + [True] * (len(rows) - 1)
    above = [panel for panel in document(job.BOARD)["panels"] if panel["type"] != "row"]
    assert len(above) == 6
    assert max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in above) <= 13  # of 30 pixels each


def test_jobs_are_chosen_and_listed_by_name() -> None:
    choice = job.BOARD.variables[0]
    line = 'octet_job_info{comparison="a",instance="x:1",job_id="job_1",level="O2",name="first",title="first O2 job_1"} 1 2'
    found = re.search(choice.regex.strip("/").replace("(?<", "(?P<"), line)
    assert found is not None
    assert found.groupdict() == {"value": "job_1", "text": "first O2 job_1"}
    (table,) = [panel for panel in panels(fleet.BOARD) if panel["type"] == "table"]
    (override,) = table["fieldConfig"]["overrides"]
    assert (override["matcher"]["options"], override["properties"][0]) == ("job_id", {"id": "custom.hidden", "value": True})
    assert all("group_left (name)" in target["expr"] for target in table["targets"])


def test_a_stat_that_tells_a_state_shows_its_name_and_no_1() -> None:
    stats = [panel for board in BOARDS for panel in board.panels if panel.kind == "stat"]
    assert [panel.title for panel in stats if panel.names] == ["State", "Version"]
    shown = {
        panel["title"]: panel["options"]["textMode"] for board in BOARDS for panel in panels(board) if panel["type"] == "stat"
    }
    assert {shown["State"], shown["Version"]} == {"name"}


def test_documents_have_the_numbers_of_series_that_the_code_has() -> None:
    operations = (ROOT / "docs/operations.md").read_text()
    ranks = re.findall(r"at most (\d+) series a rank|a rank \((\d+)\)", operations)
    assert {int(number) for found in ranks for number in found if number} == {exporter.MAX_SERIES}
    jobs = re.findall(r"at most (\d+) series for each|the api \((\d+) for each job\)", operations)
    assert {int(number) for found in jobs for number in found if number} == {telemetry.MAX_SERIES}
    scrapes = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert all(scrape.get("sample_limit", 10**6) >= 2 * exporter.MAX_SERIES for scrape in scrapes)
    assert not re.search(r"budget is \d+", (ROOT / "deploy/prometheus/prometheus.yml").read_text())


def test_provisioning_points_at_the_dashboards_and_at_prometheus() -> None:
    provisioning = ROOT / "deploy/grafana/provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards/octet.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
