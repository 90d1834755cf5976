"""TensorBoard: event files in the job's folder. A later attempt adds a file, which hides the steps that it repeats."""

import json
from collections.abc import Sequence

from octet.api_schemas import FinishedReport
from octet.worker.reporting.trackers.feed import Row, TrackedRun


class TensorBoardFiles:
    """Writes one event file for each attempt. `tensorboard --logdir` of the folder shows them as one run."""

    def open(self, run: TrackedRun, resumed_from_step: int) -> None:
        # Imported here: it takes a second, and only jobs with this tracker need it.
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        # TensorBoard leaves out what earlier files have from `purge_step` on.
        self._writer = SummaryWriter(str(folder), purge_step=resumed_from_step + 1)
        if resumed_from_step == 0:
            self._writer.add_text("job", f"{run.id} {run.name}")
            self._writer.add_text("config", _as_code(run.config))
            self._writer.add_text("labels", _as_code(run.labels))

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for name, value in row.values.items():
                self._writer.add_scalar(name, value, row.step, walltime=row.at.timestamp())
        self._writer.flush()

    def close(self, ended: FinishedReport | None) -> None:
        if ended is not None:
            self._writer.add_text("outcome", f"{ended.outcome} {ended.message or ''}".strip())
        self._writer.close()


def _as_code(document: object) -> str:
    """Return JSON as a code block of Markdown."""
    return f"```json\n{json.dumps(document, indent=1)}\n```"
