"""`make dashboards`: draw every board from a live run into docs/dashboards: `python -m tests.observability.draw`."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from deploy.grafana.generate import BOARDS
from deploy.grafana.model import Board
from deploy.grafana.render import draw
from tests.observability.live import ROOT, Live, running

FOLDER = ROOT / "docs/dashboards"


def ask(live: Live, job_id: str, expr: str) -> list[dict[str, Any]]:
    """The series of the run. Those of a GPU come from the stand-in."""
    of = "gpu" if "octet_gpu_" in expr or "utilization_ratio" in expr else job_id
    return live.prometheus.range(live.filled_in(expr, of), live.start, live.end)


def draw_all(live: Live, folder: Path, boards: tuple[Board, ...] = BOARDS) -> None:
    for board in boards:
        draw(board, partial(ask, live, live.jobs["O2"]), folder / f"{board.uid}.png", live.start)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch, "texts", "corpus")
        corpus.mkdir(parents=True)
        for number in range(4):
            lines = "\n".join(f"line {line} of file {number}: the quick brown fox" for line in range(400))
            (corpus / f"part_{number}.txt").write_text(lines)
        with running(Path(scratch), corpus) as live:
            draw_all(live, FOLDER)


if __name__ == "__main__":
    main()
