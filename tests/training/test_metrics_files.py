"""Metrics of a run that was killed stay readable, and hold each step once."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.training.callbacks.metrics_writer import MetricsWriter, plot_losses, read_metrics


def write_metrics(folder: Path, steps: range, resumed_step: int | None = None) -> MetricsWriter:
    writer = MetricsWriter(folder, folder / "tensorboard", resumed_step)
    for step in steps:
        writer.write("train", step, {"loss": float(step)})
    return writer


def recorded_steps(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize("resumed_step", [3, 2, None])
def test_truncated_last_line_of_killed_run_is_dropped(resumed_step: int | None, tmp_path: Path) -> None:
    write_metrics(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind":"train","st')
    first_step = 4 if resumed_step is None else resumed_step + 1
    write_metrics(tmp_path, range(first_step, 6), resumed_step)
    assert recorded_steps(tmp_path) == [1, 2, 3, 4, 5]
    assert path.read_bytes().count(b"\n") == 5


@pytest.mark.parametrize("remove_folder", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("elsewhere"))])
def test_lost_run_folder_is_named_in_error(remove_folder: Callable[[Path], object], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    writer = write_metrics(folder, range(1, 3))
    writer._events.close()  # its thread would complain by itself
    remove_folder(folder)
    with pytest.raises(ConfigError, match=f"the run folder {folder} .* was deleted or moved") as error_info:
        writer.write("train", 3, {"loss": 0.0})
    assert error_info.value.is_of_this_rank


def test_lost_tensorboard_folder_is_named_in_error(tmp_path: Path) -> None:
    writer = write_metrics(tmp_path, range(1, 3))
    writer._events.add_scalar = raise_file_not_found
    with pytest.raises(ConfigError, match=f"TensorBoard's folder {tmp_path / 'tensorboard'} was deleted or moved"):
        writer.write("train", 3, {"loss": 0.0})


def raise_file_not_found(*scalar: object) -> None:
    raise FileNotFoundError(2, "No such file or directory")


def test_truncate_to_step_drops_later_records(tmp_path: Path) -> None:
    writer = write_metrics(tmp_path, range(1, 6))
    writer.truncate_to_step(2)
    assert recorded_steps(tmp_path) == [1, 2]
    writer.write("save", 2, {"durable_s": 0.1})
    writer.write("train", 3, {"loss": 0.0})
    assert recorded_steps(tmp_path) == [1, 2, 2, 3]


def test_loss_plot_starts_at_step_1_and_shows_uniform_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    (tmp_path / "config.json").write_text('{"model": {"vocab_size": 8192}}')
    write_metrics(tmp_path, range(1, 20)).close()
    (axes,) = figures[0].axes
    assert axes.get_xlim()[0] == 1
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert lines["ln(8,192) = 9.01: uniform prediction"] == pytest.approx([math.log(8192)] * 2)
    assert (tmp_path / "loss.png").exists()
    (tmp_path / "config.json").unlink()
    plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert [line.get_label() for line in figures[1].axes[0].get_lines()] == ["train"]
