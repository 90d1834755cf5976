"""The dashboard files are up to date, complete, and valid against Grafana's schema (schemas/README.md)."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard
from jsonschema import Draft7Validator
from jsonschema.exceptions import best_match

from deploy.grafana.generate import BOARDS, FOLDER, generated
from deploy.grafana.model import TAG, Board, Panel
from tests.observability.dcgm import DEFAULT_COUNTERS, LABELS, PROFILING_COUNTERS
from tests.observability.live import DCGM, ROOT

GRAFANA_VERSION = "12.2.0"
SCHEMA = json.loads((Path(__file__).parent / f"schemas/grafana-{GRAFANA_VERSION}.schema.json").read_text())

each_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)


def document(board: Board) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{board.uid}.json").read_text())
    return found


def panels(board: Board) -> list[dict[str, Any]]:
    return [panel for panel in document(board)["panels"] if panel["type"] != "row"]


@each_board
def test_the_committed_json_is_what_the_code_generates(board: Board) -> None:
    assert (FOLDER / f"{board.uid}.json").read_text() == generated(board), "run `make dashboards` and commit"


def test_no_other_dashboard_lies_about() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {board.uid for board in BOARDS}


def test_uids_never_change() -> None:
    assert [board.uid for board in BOARDS] == ["octet-fleet", "octet-job", "octet-levels", "octet-service"]


def problem(dashboard: dict[str, Any]) -> str:
    """Return the first violation of Grafana's schema; empty if there is none."""
    error = best_match(Draft7Validator(SCHEMA).iter_errors(dashboard))
    return f"{error.json_path}: {error.message}" if error else ""


def a_panel(dashboard: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(panel for panel in dashboard["panels"] if panel["type"] == kind)
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
    assert len(read.panels or []) == len(board.panels) + len(board.rows)


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
    for panel in document(board)["panels"]:
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
    panel = a_panel(json.loads((FOLDER / "octet-levels.json").read_text()), "xychart")
    assert [target["expr"].partition(") (")[2].partition(")")[0] for target in panel["targets"]] == [
        "octet_job_step",
        "octet_job_loss",
    ]
    assert {target["format"] for target in panel["targets"]} == {"table"}
    assert [transformation["id"] for transformation in panel["transformations"]] == ["merge", "partitionByValues"]
    assert panel["transformations"][1]["options"]["fields"] == ["level"]


def test_provisioning_points_at_the_dashboards_and_at_prometheus() -> None:
    provisioning = ROOT / "deploy/grafana/provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards/octet.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
