"""Writes the dashboards' JSON: `python -m deploy.grafana.generate` (`make dashboards`). A test checks that it is up to date."""

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana import fleet, job, levels, service
from deploy.grafana.model import Board, to_grafana

FOLDER = Path(__file__).with_name("dashboards")
BOARDS: tuple[Board, ...] = (fleet.BOARD, job.BOARD, levels.BOARD, service.BOARD)


def generated(board: Board) -> str:
    """The JSON of a board, as it is committed."""
    return json.dumps(to_grafana(board), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for board in BOARDS:
        (FOLDER / f"{board.uid}.json").write_text(generated(board))


if __name__ == "__main__":
    main()
