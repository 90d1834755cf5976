"""The dashboards as files: up to date, whole, and as Grafana's schema has them."""

import json
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.generate import BOARDS, FOLDER, generated
from deploy.grafana.model import TAG, Board
from tests.observability.live import ROOT

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


@each_board
def test_grafanas_own_types_read_it(board: Board) -> None:
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


def test_provisioning_points_at_the_dashboards_and_at_prometheus() -> None:
    provisioning = ROOT / "deploy/grafana/provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards/octet.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
