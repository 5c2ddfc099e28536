"""Trackers: records that are sent, restarts without repeated points, failures, and metrics over HTTP."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config import Config, parse
from megatron.errors import ConfigError
from megatron.training.callbacks import tracker
from megatron.training.callbacks.metrics_writer import MetricsWriter, read_metrics
from megatron.training.callbacks.mlflow import MLflow
from megatron.training.callbacks.open_metrics import MetricsServer, OpenMetrics, format_metrics
from megatron.training.callbacks.wandb import Wandb
from tests.helpers.fake_trackers import FakeWandb
from tests.helpers.runs import ROOT, make_flags, train_ranks

TRACKERS_MISSING = "is not installed: pip install -e '.[swanlab,mlflow]'"


def make_config(extra: str) -> Config:
    return parse(f"--data-path none --dry-run --vocab-size 9 {extra}".split(), world_size=1)


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    return fake


def start_wandb(flags: str, folder: Path, **kwargs: Any) -> Wandb:
    callback = Wandb()
    callback.start(make_config(flags), folder, **kwargs)
    return callback


def test_wandb_logs_values_by_step(fake_wandb: FakeWandb, tmp_path: Path) -> None:
    callback = start_wandb("--wandb-project p --wandb-name n --wandb-entity e", tmp_path)
    callback.write("train", 3, {"loss": 2.5, "note": "text"})
    callback.write("train", 2, {"lr": {"head": 2.25}})
    callback.close()
    call_name, init_args = fake_wandb.calls[0]
    assert (call_name, init_args["project"], init_args["name"], init_args["entity"]) == ("init", "p", "n", "e")
    assert (init_args["id"], init_args["resume"], init_args["dir"]) == (None, "allow", str(tmp_path))
    assert init_args["config"]["run"]["seed"] == 1234
    assert ("define", ("train/*",), {"step_metric": "train/step"}) in fake_wandb.calls
    logs = fake_wandb.calls[-3:-1]
    assert logs == [("log", {"train/loss": 2.5, "train/step": 3}), ("log", {"train/lr/head": 2.25, "train/step": 2})]
    assert fake_wandb.calls[-1] == ("finish", 0)


@pytest.mark.parametrize("has_finished", [True, False])
def test_exception_marks_run_as_failed(has_finished: bool, fake_wandb: FakeWandb, tmp_path: Path) -> None:
    callback = start_wandb("--wandb-project p", tmp_path)
    if has_finished:
        callback.on_train_end()
    else:
        callback.on_exception(ValueError())
    assert fake_wandb.calls[-1] == ("finish", int(not has_finished))


def test_resumed_run_reuses_id_and_folder_name(fake_wandb: FakeWandb, tmp_path: Path) -> None:
    flags = f"--wandb-project p --wandb-save-dir {tmp_path / 'made' / 'w'}"
    for expected_id in (None, "abc"):
        fake_wandb.calls.clear()
        start_wandb(flags, tmp_path).close()
        init_args = fake_wandb.calls[0][1]
        assert (init_args["id"], init_args["name"], init_args["dir"]) == (
            expected_id,
            tmp_path.name,
            str(tmp_path / "made" / "w"),
        )
    assert (tmp_path / "made" / "w").is_dir()


@pytest.mark.parametrize("is_restart", [False, True])
def test_run_from_scratch_in_used_folder_is_new_run_unless_restarted(
    is_restart: bool, fake_wandb: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_wandb("--wandb-project p", tmp_path).close()
    fake_wandb.calls.clear()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(int(is_restart)))
    callback = start_wandb("--wandb-project p", tmp_path, recorded_steps={"train": 9}, is_continued=False)
    callback.write("train", 1, {"loss": 1.0})
    callback.close()
    assert fake_wandb.calls[0][1]["id"] == ("abc" if is_restart else None)
    assert [call[0] for call in fake_wandb.calls].count("log") == int(not is_restart)


def test_restarts_send_no_step_twice(fake_wandb: FakeWandb, tmp_path: Path) -> None:
    """The first start ends after step 7, the second repeats from step 3 and ends after step 5."""
    sent: list[int] = []
    for steps, recorded in ((range(1, 8), {}), (range(3, 6), {"train": 7}), (range(3, 10), {"train": 5})):
        callback = start_wandb("--wandb-project p", tmp_path, recorded_steps=recorded)
        for step in steps:
            callback.write("train", step, {"loss": float(step)})
        callback.close()
        sent = [call[1]["train/step"] for call in fake_wandb.calls if call[0] == "log"]
    assert sent == list(range(1, 10))


def test_rollback_sends_no_step_twice(fake_wandb: FakeWandb, tmp_path: Path) -> None:
    callback = start_wandb("--wandb-project p", tmp_path)
    for step in (1, 2, 3):
        callback.write("train", step, {"loss": 1.0})
    callback.on_load_end(1)
    for step in (2, 3, 4):
        callback.write("train", step, {"loss": 2.0})
    callback.close()
    assert [call[1]["train/step"] for call in fake_wandb.calls if call[0] == "log"] == [1, 2, 3, 4]


def test_metrics_writer_reports_steps_before_start(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, None)
    for record_type, step in (("train", 5), ("valid", 4), ("train", 9)):
        writer.write(record_type, step, {"loss": 1.0})
    writer.close(should_plot=False)
    resumed = MetricsWriter(tmp_path, None, resumed_step=4)
    assert resumed.recorded_steps == {"train": 9, "valid": 4}
    resumed.close(should_plot=False)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [4]


def test_start_failure_raises_and_send_failure_warns_once(
    fake_wandb: FakeWandb, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = start_wandb("--wandb-project p", tmp_path)
    for loss in (math.nan, 1.0, math.nan):
        callback.write("train", 1, {"loss": loss})
    callback.close()
    assert capsys.readouterr().err.count("no further records are sent to Weights & Biases (OSError: the network") == 1
    assert not [call for call in fake_wandb.calls if call[0] in ("log", "finish")]
    fake_wandb.error = "not logged in to https://me:pass@host"
    with pytest.raises(ConfigError, match=r"--wandb-project p: RuntimeError: not .*https://\*\*\*@host. Run wandb"):
        start_wandb("--wandb-project p", tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    callback = start_wandb("--wandb-project p", tmp_path)  # an unattended restart continues without the tracker
    callback.write("train", 1, {"loss": 1.0})
    callback.close()
    assert "no records are sent to Weights & Biases (RuntimeError: not logged in" in capsys.readouterr().err


def test_service_that_exits_the_process_does_not_end_the_run(
    fake_wandb: FakeWandb, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some packages call sys.exit without credentials, or in a call that fails."""
    callback = start_wandb("--wandb-project p", tmp_path)
    monkeypatch.setattr(callback, "send", lambda *record: sys.exit(1))
    callback.write("train", 1, {"loss": 1.0})
    callback.close()
    assert "no further records are sent to Weights & Biases (SystemExit: 1)" in capsys.readouterr().err
    monkeypatch.setattr(fake_wandb, "init", lambda **kwargs: sys.exit(1))
    with pytest.raises(ConfigError, match="SystemExit: 1"):
        start_wandb("--wandb-project p", tmp_path)


def test_close_ends_when_queue_is_full_and_service_does_not_answer(
    fake_wandb: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracker, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(tracker, "MAX_PENDING_RECORDS", 1)
    callback = start_wandb("--wandb-project p", tmp_path)
    started, release = threading.Event(), threading.Event()

    def wait(*record: Any) -> None:
        started.set()
        release.wait(30)

    monkeypatch.setattr(callback, "send", wait)
    callback.write("train", 1, {"loss": 1.0})
    assert started.wait(30)
    callback.write("train", 2, {"loss": 1.0})
    start = time.monotonic()
    callback.close()
    assert time.monotonic() - start < 15.0  # without a limit, ``close`` waits 30 s for the service
    release.set()
    assert "did not receive all records" in capsys.readouterr().err


def test_mlflow_sends_at_most_1000_metrics_per_call() -> None:
    """MLflow rejects larger batches, such as the loads of all experts of all layers."""
    batches: list[int] = []
    callback = MLflow()
    callback._client = SimpleNamespace(log_batch=lambda run_id, metrics: batches.append(len(metrics)))
    callback._metric_class, callback._id = lambda *values: values, "a"
    callback.send("train", 1, {f"train/load/{expert}": 1.0 for expert in range(2500)})
    assert batches == [1000, 1000, 500]


def test_mlflow_waits_for_seconds_at_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    limits: list[str | None] = []
    names = ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT")
    monkeypatch.setattr(MLflow, "_open_run", lambda *_: limits.extend(map(os.environ.get, names)))
    MLflow().open_run(make_config(""), tmp_path, None)
    assert limits == ["2", "7"] and names[0] not in os.environ


def test_finish_failure_warns_at_once(
    fake_wandb: FakeWandb, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = start_wandb("--wandb-project p", tmp_path)

    def fail(exit_code: int) -> None:
        raise OSError("gone")

    fake_wandb.run.finish = fail
    start = time.monotonic()
    callback.close()
    assert time.monotonic() - start < 5.0 and "(OSError: gone)" in capsys.readouterr().err


def test_finish_has_time_limit(
    fake_wandb: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracker, "CLOSE_TIMEOUT_S", 0.05)
    callback = start_wandb("--wandb-project p", tmp_path)
    release = threading.Event()
    fake_wandb.run.finish = lambda exit_code: release.wait(20) or fake_wandb.calls.append(("ended late", exit_code))
    callback.close()
    assert not [call for call in fake_wandb.calls if call[0] == "ended late"]
    release.set()
    assert "did not receive all records within 0.05 s" in capsys.readouterr().err


def test_blocked_service_does_not_delay_training(
    fake_wandb: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracker, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(tracker, "MAX_PENDING_RECORDS", 3)
    release = threading.Event()
    fake_wandb.run.log = lambda values: release.wait(20)
    callback = start_wandb("--wandb-project p", tmp_path)
    start = time.monotonic()
    for step in range(9):
        callback.write("train", step, {"loss": 1.0})
    callback.close()
    assert time.monotonic() - start < 5.0
    release.set()
    assert capsys.readouterr().err.count("3 records are pending") == 1


def test_unwritable_id_warns(
    fake_wandb: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron.files.replace_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    start_wandb("--wandb-project p", tmp_path).close()
    assert "wandb.json could not be written ([Errno 28] full)" in capsys.readouterr().err


def test_evaluation_is_separate_run(fake_wandb: FakeWandb, tmp_path: Path) -> None:
    (tmp_path / Wandb.file_name).write_text('{"id": "of training"}')
    start_wandb("--wandb-project p --eval-only --load x", tmp_path).close()
    assert fake_wandb.calls[0][1]["id"] is None
    assert json.loads((tmp_path / Wandb.file_name).read_text()) == {"id": "of training"}
    fake_wandb.calls.clear()
    start_wandb("--wandb-project p", tmp_path).close()
    assert fake_wandb.calls[0][1]["id"] == "of training"


# OpenMetrics over HTTP.


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def scrape(port: int, path: str = "/metrics") -> tuple[str, str]:
    """Return (content type, text)."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
        return response.headers["Content-Type"], response.read().decode()


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    metrics_server = MetricsServer("127.0.0.1", 0, 'a "run"')
    yield metrics_server
    if is_open(metrics_server.port):
        metrics_server.close()


def test_scrape_returns_newest_values_until_port_closes(server: MetricsServer) -> None:
    for loss in (3.0, 2.5):
        server.update({"train/loss": loss, "train/memory_bytes/stage 0": 7, "train/step": 4})
    content_type, text = scrape(server.port)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    lines = text.splitlines()
    assert 'megatron_train_loss{run="a \\"run\\""} 2.5' in lines and "# TYPE megatron_train_loss gauge" in lines
    assert 'megatron_train_memory_bytes{run="a \\"run\\"",key="stage 0"} 7.0' in lines and lines[-1] == "# EOF"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scrape(server.port, "/other")
    server.close()
    assert not is_open(server.port)


def test_metric_names_and_values_are_valid() -> None:
    text = format_metrics([("train/mlm loss", math.nan), ("train/a-b/c\nd", -math.inf), ("updated_s", 2)], "r")
    assert text == (
        '# TYPE megatron_train_a_b gauge\nmegatron_train_a_b{run="r",key="c\\nd"} -Inf\n'
        '# TYPE megatron_train_mlm_loss gauge\nmegatron_train_mlm_loss{run="r"} NaN\n'
        '# TYPE megatron_updated_s gauge\nmegatron_updated_s{run="r"} 2.0\n# EOF\n'
    )


def test_names_that_become_equal_are_served_once() -> None:
    """Prometheus rejects repeated samples."""
    text = format_metrics([("train/a b", 1.0), ("train/a_b", 2.0), ("train/a_b/x", 3.0)], "r")
    assert text == (
        '# TYPE megatron_train_a_b gauge\nmegatron_train_a_b{run="r"} 2.0\n'
        'megatron_train_a_b{run="r",key="x"} 3.0\n# EOF\n'
    )


def test_prometheus_parses_metrics(server: MetricsServer) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser", reason="pip install prometheus_client")
    server.update({"train/loss": 2.5, "train/mlm loss": math.nan, "train/lr/head \\ 1": math.inf})
    families = {family.name: family for family in parser.text_string_to_metric_families(scrape(server.port)[1])}
    assert families["megatron_train_loss"].samples[0].value == 2.5
    assert families["megatron_train_lr"].samples[0].labels == {"run": 'a "run"', "key": "head \\ 1"}


def test_used_port_is_an_error(server: MetricsServer, tmp_path: Path) -> None:
    callback = OpenMetrics()
    with pytest.raises(ConfigError, match=f"--metrics-port {server.port} cannot be opened on 127.0.0.1: .*in use"):
        callback.start(make_config(f"--metrics-port {server.port}"), tmp_path)


def scrape_in_run(port: int, folder: Path) -> Any:
    """Return a function for each rank that scrapes when the run has ended its last step."""

    def inject(rank: int) -> None:
        finish = OpenMetrics.finish

        def scrape_and_finish(self: OpenMetrics, *, has_failed: bool) -> None:
            (folder / f"scraped-{rank}").write_text(scrape(port)[1])
            finish(self, has_failed=has_failed)

        OpenMetrics.finish = scrape_and_finish  # type: ignore[method-assign]

    return inject


def test_rank_0_serves_recorded_values(corpus: Path, tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "run"
    argv = make_flags(corpus, folder, f"--train-iters 2 --pipe-parallel-size 2 --metrics-port {port}")
    assert train_ranks(2, argv, scrape_in_run(port, tmp_path))[0] == [0, 0]
    assert [path.name for path in tmp_path.glob("scraped-*")] == ["scraped-0"]
    loss = next(r["loss"] for r in reversed(read_metrics(folder / "metrics.jsonl")) if r["kind"] == "train")
    assert f'megatron_train_loss{{run="run"}} {loss!r}' in (tmp_path / "scraped-0").read_text().splitlines()
    assert not is_open(port)


def test_dashboard_uses_served_metrics() -> None:
    """The dashboard refers to metrics of docs/monitoring.md."""
    dashboard = json.loads((ROOT / "examples/monitoring/grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    documented = (ROOT / "docs/monitoring.md").read_text()
    assert len(expressions) >= 6
    for expression in expressions:
        name = expression.partition("megatron_")[2].partition("{")[0]
        metric = name.partition("_")[2]
        assert f"`{metric}`" in documented or metric in ("step", "timestamp_seconds"), expression


# Settings.


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--swanlab-mode local", "--swanlab-mode has no effect without --swanlab-project"),
        ("--metrics-host 0.0.0.0", "--metrics-host has no effect without --metrics-port"),
        ("--metrics-port 70000", "--metrics-port must be an integer of at least 1 and at most 65535"),
        ("--mlflow-tracking-uri https://***@host", "--mlflow-tracking-uri must be the full URI"),
    ],
)
def test_invalid_flags_are_rejected(flags: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.arguments.run_checks._is_installed", lambda package: True)
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
        make_config(flags)


def test_saved_settings_contain_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.arguments.run_checks._is_installed", lambda package: True)
    config = make_config("--mlflow-tracking-uri https://me:pass@host/x?token=abc&a=1")
    assert config.logging.mlflow_tracking_uri == "https://me:pass@host/x?token=abc&a=1"
    assert config.to_dict()["logging"]["mlflow_tracking_uri"] == "https://***@host/x?token=***&a=1"
    config = make_config("--mlflow-tracking-uri https://me:p@ss@host/x@y")  # an "@" that should be written as %40
    assert config.to_dict()["logging"]["mlflow_tracking_uri"] == "https://***@host/x@y"


# The real packages, in modes without a service.

RESTARTED_RUN = """
import sys
from pathlib import Path
from megatron.config import parse
from megatron.training.callbacks.{module} import {name}

folder, flags, first, stop, recorded = Path(sys.argv[1]), sys.argv[2].split(), *map(int, sys.argv[3:6])
callback = {name}()
callback.start(parse("--data-path none --dry-run --vocab-size 9".split() + flags, world_size=1), folder,
               {{"train": recorded}} if recorded else {{}})
for step in range(first, stop):
    callback.write("train", step, {{"loss": 10.0 - step, "lr": {{"a b": 1.0}}}})
callback.close()
"""


def run_twice(module: str, name: str, flags: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Record steps 1 to 5, then steps 3 to 7 in a second process; return both processes' output."""
    output = ""
    for first, stop, recorded in ((1, 6, 0), (3, 8, 5)):
        program = RESTARTED_RUN.format(module=module, name=name)
        command = [sys.executable, "-c", program, str(folder), flags, *map(str, (first, stop, recorded))]
        done = subprocess.run(
            command, env={**os.environ, **environment}, cwd=folder, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        output += done.stdout + done.stderr
    return output


@pytest.mark.slow
def test_real_mlflow_continues_run_without_repeated_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    pytest.importorskip("mlflow", reason=f"mlflow {TRACKERS_MISSING}")
    from mlflow.tracking import MlflowClient

    uri = f"file:{tmp_path / 'mlruns'}"
    output = run_twice(
        "mlflow", "MLflow", f"--mlflow-tracking-uri {uri}", tmp_path, {"MLFLOW_ALLOW_FILE_STORE": "true"}
    )
    assert "no further records" not in output
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    history = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(history) == [(step, 10.0 - step) for step in range(1, 8)]
    assert run.info.status == "FINISHED" and run.data.params["run.seed"] == "1234"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["local", "offline"])
def test_real_swanlab_continues_run_without_repeated_points(mode: str, tmp_path: Path) -> None:
    pytest.importorskip("swanlab", reason=f"swanlab {TRACKERS_MISSING}")
    output = run_twice("swanlab", "SwanLab", f"--swanlab-project p --swanlab-mode {mode}", tmp_path, {})
    assert "no further records" not in output
    assert json.loads((tmp_path / "swanlab.json").read_text())["id"]


@pytest.mark.slow
def test_real_wandb_accepts_calls_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install -e '.[wandb]'")
    output = run_twice("wandb", "Wandb", "--wandb-project p", tmp_path, {"WANDB_MODE": "offline"})
    assert "no further records" not in output
    run_id = json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))) >= 1
