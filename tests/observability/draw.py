"""Draw every dashboard from a live run into docs/dashboards: `make dashboards`, or `python -m tests.observability.draw`.

All levels train the same model and text on two ranks each. The layers are so large that O2 holds 6.1 bytes per parameter of a
converted layer, and bf16-amp 16. A step has so many tokens that products take most of its time.
"""

import shutil
import sysconfig
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from deploy.grafana.generate import BOARDS
from deploy.grafana.model import Board
from deploy.grafana.render import draw
from tests.observability.live import ROOT, Live, Run, running

FOLDER = ROOT / "docs/dashboards"
DRAWN = Run(
    hidden_size=128, steps=100, other_steps=100, sequence_length=256, statistics_every=20, other_workers=2, demotes=False
)


def ask(live: Live, job_id: str, expr: str) -> list[dict[str, Any]]:
    """Return the series of the run; series of a GPU come from the stand-in."""
    of = "gpu" if "octet_gpu_" in expr or "utilization_ratio" in expr else job_id
    return live.prometheus.range(live.filled_in(expr, of), live.start, live.end)


def draw_all(live: Live, folder: Path, boards: tuple[Board, ...] = BOARDS) -> None:
    for board in boards:
        draw(board, partial(ask, live, live.jobs["O2"]), folder / f"{board.uid}.png", live.start)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch, "texts", "corpus")
        shutil.copytree(Path(sysconfig.get_path("stdlib"), "asyncio"), corpus, ignore=shutil.ignore_patterns("__pycache__"))
        with running(Path(scratch), corpus, DRAWN) as live:
            draw_all(live, FOLDER)


if __name__ == "__main__":
    main()
