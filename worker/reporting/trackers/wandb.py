"""Weights & Biases: one run for each job, with the job's id. Offline, each attempt writes a folder that `wandb sync` joins."""

from collections.abc import Sequence
from pathlib import Path

from octet.api_schemas import FinishedReport
from octet.worker.reporting.trackers.feed import Row, TrackedRun

_MAX_TAG = 64


class WandbRun:
    """A run on the server of the environment, or in files of the job's folder."""

    def __init__(self, project: str, online: bool) -> None:
        self._project, self._online = project, online

    def open(self, run: TrackedRun, resumed_from_step: int) -> None:
        # Imported here: it takes seconds, and only jobs with this tracker need it.
        import wandb

        self._wandb = wandb
        folder = run.folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        # W&B drops rows of steps before its last, and offline it does not know what earlier attempts sent.
        self._sent_file = folder / "last_step"
        self._sent = int(self._sent_file.read_text()) if self._sent_file.exists() else -1
        self._step = max(self._sent, 0)
        self._run = wandb.init(
            id=run.id,
            name=run.name,
            project=self._project,
            group=run.labels.get("comparison"),
            tags=[tag for key, value in run.labels.items() if len(tag := f"{key}:{value}") <= _MAX_TAG],
            config=dict(run.config) if resumed_from_step == 0 else None,
            dir=folder,
            mode="online" if self._online else "offline",
            resume="allow",
            reinit="create_new",
            # The rank's output, its processes and the code around it are not the job's curves.
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
            ),
        )

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.step > self._sent:
                # Measurements arrive between steps; a step below the last would be dropped.
                self._step = max(self._step, row.step)
                self._run.log(dict(row.values), step=self._step)
        _replace(self._sent_file, str(self._step))

    def close(self, ended: FinishedReport | None) -> None:
        if ended is not None:
            self._run.summary["octet/outcome"] = ended.outcome
            if ended.message:
                self._run.summary["octet/message"] = ended.message
        self._run.finish(exit_code=1 if ended is not None and ended.outcome == "failed" else 0)
        # W&B's own process writes the last rows after that. It is waited for here: ranks end without `atexit`.
        self._wandb.teardown()


def _replace(path: Path, text: str) -> None:
    """Write a file whole, so that a killed rank leaves the old one or the new one."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
