"""MLflow: sends a run's metrics to an MLflow tracking server or folder (--mlflow-tracking-uri)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.training.callbacks.tracker import Tracker

DEFAULT_EXPERIMENT = "Default"
"""MLflow's experiment without MLFLOW_EXPERIMENT_NAME."""
_MAX_PARAMS_PER_CALL = 100
_MAX_METRICS_PER_CALL = 1000
_MAX_PARAM_LENGTH = 500
_START_LIMITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


class MLflow(Tracker):
    """Sends every record in a run to MLflow, and the settings of a new run as parameters."""

    service = "MLflow"
    _id: str
    file_name = "mlflow.json"
    flag = "--mlflow-tracking-uri"
    advice = (
        "Check that the server answers; credentials belong in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, "
        "or in MLFLOW_TRACKING_TOKEN"
    )

    def open_run(self, config: Config, folder: Path, run_id: str | None) -> str | None:
        with _short_waits():
            return self._open_run(config, folder, run_id)

    def _open_run(self, config: Config, folder: Path, run_id: str | None) -> str:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=config.logging.mlflow_tracking_uri)
        self._metric_class = Metric
        if run_id is not None:
            self._id = self._client.get_run(run_id).info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        run = self._client.create_run(experiment_id, run_name=folder.name, tags={"folder": str(folder)})
        self._id = run.info.run_id
        params = [Param(name, value[:_MAX_PARAM_LENGTH]) for name, value in flatten_settings(config.to_dict())]
        for first in range(0, len(params), _MAX_PARAMS_PER_CALL):
            self._client.log_batch(self._id, params=params[first : first + _MAX_PARAMS_PER_CALL])
        return self._id

    def send(self, record_type: str, step: int, values: Mapping[str, float]) -> None:
        time_ms = int(1000 * time.time())
        metrics = [self._metric_class(metric_name(name), value, time_ms, step) for name, value in values.items()]
        for first in range(0, len(metrics), _MAX_METRICS_PER_CALL):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MAX_METRICS_PER_CALL])

    def finish(self, *, has_failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if has_failed else "FINISHED")


@contextmanager
def _short_waits() -> Iterator[None]:
    """Limit the wait for a server that does not answer: MLflow retries for minutes, and all ranks wait for the start.

    Variables that the user has set are not changed.
    """
    missing = {name: value for name, value in _START_LIMITS.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def metric_name(name: str) -> str:
    """Replace characters that MLflow does not accept in names."""
    return "".join(char if char.isalnum() or char in "_-./ :" else "_" for char in name)


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield ("section.field", text) for each setting that has a value."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten_settings(value, f"{prefix}{name}.")
        elif value is not None and value != "":
            yield prefix + name, str(value)
