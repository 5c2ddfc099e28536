"""OpenMetrics: serves a run's newest metrics at /metrics for Prometheus (--metrics-port)."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.training.callbacks.tracker import Tracker

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PATH = "/metrics"
_PREFIX = "megatron_"
_CLOSE_TIMEOUT_S = 5.0


class OpenMetrics(Tracker):
    """Serves the newest value of every metric over HTTP on rank 0, in the OpenMetrics text format.

    A value "train/loss" is the gauge ``megatron_train_loss{run="..."}``; a value within a dictionary, such as
    "train/memory_bytes/stage 0", has the label ``key="stage 0"``. ``megatron_train_step`` is the step, and
    ``megatron_updated_timestamp_seconds`` the time of the newest record.

    Source: OpenMetrics 1.0.0, section 5 (text format).
    """

    service = "Prometheus"
    flag = "--metrics-port"
    advice = "Set another port with --metrics-port, or another address of this host with --metrics-host"

    def open_run(self, config: Config, folder: Path, run_id: str | None) -> str | None:
        host, port = config.logging.metrics_host, config.logging.metrics_port
        assert port is not None
        try:
            self._server = MetricsServer(host, port, folder.name)
        except OSError as error:
            raise ConfigError(f"--metrics-port {port} cannot be opened on {host}: {error}. {self.advice}") from error
        return None

    def send(self, record_type: str, step: int, values: Mapping[str, float]) -> None:
        self._server.update({f"{record_type}/step": step, **values})

    def finish(self, *, has_failed: bool) -> None:
        self._server.close()


class MetricsServer:
    """HTTP server of one run's metrics; serves until ``close``.

    Args:
        port: TCP port; 0 selects a free one.
        run: value of the label ``run``.

    Raises:
        OSError: the port is in use, or ``host`` is not an address of this host.
    """

    def __init__(self, host: str, port: int, run: str) -> None:
        self._run, self._values, self._lock = run, dict[str, float](), threading.Lock()
        self._server = ThreadingHTTPServer((host, port), self._make_handler())
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True)
        self._thread.start()

    def update(self, values: Mapping[str, float]) -> None:
        """Replace the values of the given metrics."""
        with self._lock:
            self._values |= {**values, "updated_timestamp_seconds": time.time()}

    def text(self) -> str:
        """Format all values in the OpenMetrics text format."""
        with self._lock:
            return format_metrics(self._values.items(), self._run)

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        metrics_server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0  # seconds that a silent client may hold a thread

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != PATH:
                    self.send_error(HTTPStatus.NOT_FOUND, f"only {PATH} is served")
                    return
                body = metrics_server.text().encode()
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - name of the base class
                return

        return Handler


def format_metrics(values: Iterable[tuple[str, float]], run: str) -> str:
    """Format "record_type/name" or "record_type/name/key" values as gauges, sorted by name, with the end marker.

    Of values whose names differ only in characters that are replaced, the last one is used: Prometheus rejects
    repeated samples.
    """
    samples_by_name: dict[str, dict[str, str]] = {}
    for path, value in values:
        record_type, _, name = path.partition("/")
        name, _, key = name.partition("/")
        metric = re.sub("[^a-zA-Z0-9_]", "_", f"{_PREFIX}{record_type}_{name}".rstrip("_"))
        labels = {"run": run, **({"key": key} if key else {})}
        label_text = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        samples_by_name.setdefault(metric, {})[label_text] = f"{metric}{{{label_text}}} {_format_value(value)}"
    lines = [
        line
        for metric, samples in sorted(samples_by_name.items())
        for line in (f"# TYPE {metric} gauge", *samples.values())
    ]
    return "\n".join([*lines, "# EOF", ""])


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _format_value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(float(value)) if math.isfinite(value) else f"{'+' if value > 0 else '-'}Inf"
