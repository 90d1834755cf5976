"""MLflow: one run for each job. A later attempt finds the run by its tag, and sends what the run does not have."""

import os
from collections.abc import Sequence

from octet.api_schemas import FinishedReport
from octet.worker.reporting.trackers.feed import Row, TrackedRun

_RUN_TAG = "octet.run"
_STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_MAX_METRICS, _MAX_PARAMS = 1000, 100
"""The most that MLflow takes in one call."""
_MAX_VALUE = 6000
"""Characters of a parameter's value."""


class MlflowRun:
    """A run on the server of the environment, or in a file of the job's folder."""

    def __init__(self, experiment: str, online: bool) -> None:
        self._experiment, self._online = experiment, online

    def open(self, run: TrackedRun, resumed_from_step: int) -> None:
        # MLflow counts its users over the network. An operator who wants that sets the variable to false.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # Imported here: it takes seconds, and only jobs with this tracker need it.
        from mlflow import MlflowClient

        run.folder.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(None if self._online else f"sqlite:///{run.folder / 'mlflow.db'}")
        experiment_id = self._experiment_id()
        found = self._client.search_runs([experiment_id], f"tags.`{_RUN_TAG}` = '{run.id}'", max_results=1)
        self._is_new = not found
        self._last_steps: dict[str, int] = {}
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {_RUN_TAG: run.id} | {f"octet.label.{key}": value for key, value in run.labels.items()}
            self._run_id = self._client.create_run(experiment_id, tags=tags, run_name=run.name).info.run_id
            self._send_config(run)

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(row.at.timestamp() * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
            if row.step > self._last_step(name)
        ]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MAX_METRICS])

    def close(self, ended: FinishedReport | None) -> None:
        if ended is None:
            return
        if ended.message:
            self._client.set_tag(self._run_id, "octet.message", ended.message[:_MAX_VALUE])
        self._client.set_terminated(self._run_id, _STATUS[ended.outcome])

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        if (experiment := self._client.get_experiment_by_name(self._experiment)) is None:
            try:
                return str(self._client.create_experiment(self._experiment))
            except MlflowException:
                # Another job has made it since.
                experiment = self._client.get_experiment_by_name(self._experiment)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _send_config(self, run: TrackedRun) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)[:_MAX_VALUE]) for name, value in run.config.items()]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])

    def _last_step(self, name: str) -> int:
        """Return the last step of a metric that earlier attempts sent."""
        if name not in self._last_steps:
            sent = [] if self._is_new else self._client.get_metric_history(self._run_id, name)
            self._last_steps[name] = max((metric.step for metric in sent), default=-1)
        return self._last_steps[name]
