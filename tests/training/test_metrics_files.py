"""Metrics of a run that was killed stay readable, and hold each step once."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.training.callbacks.metrics_writer import MetricsWriter, draw_losses, read_metrics


def write(folder: Path, steps: range, resumed_step: int | None = None) -> MetricsWriter:
    writer = MetricsWriter(folder, folder / "tensorboard", resumed_step)
    for step in steps:
        writer.write("train", step, {"loss": float(step)})
    return writer


def steps_in(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize("resumed_step", [3, 2, None])
def test_a_line_that_a_kill_cut_off_spoils_no_other(resumed_step: int | None, tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind":"train","st')
    first = 4 if resumed_step is None else resumed_step + 1
    write(tmp_path, range(first, 6), resumed_step)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]
    assert path.read_bytes().count(b"\n") == 5


@pytest.mark.parametrize("lose", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("elsewhere"))])
def test_a_run_folder_that_is_lost_in_mid_run_is_named(lose: Callable[[Path], object], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    writer = write(folder, range(1, 3))
    writer._events.close()  # its thread would complain by itself
    lose(folder)
    with pytest.raises(ConfigError, match=f"the run folder {folder} .* was deleted or moved") as caught:
        writer.write("train", 3, {"loss": 0.0})
    assert caught.value.is_of_this_rank


def test_tensorboards_folder_that_is_lost_in_mid_run_is_named(tmp_path: Path) -> None:
    writer = write(tmp_path, range(1, 3))
    writer._events.add_scalar = refuse
    with pytest.raises(ConfigError, match=f"TensorBoard's folder {tmp_path / 'tensorboard'} was deleted or moved"):
        writer.write("train", 3, {"loss": 0.0})


def refuse(*scalar: object) -> None:
    raise FileNotFoundError(2, "No such file or directory")


def test_going_back_drops_what_comes_again(tmp_path: Path) -> None:
    writer = write(tmp_path, range(1, 6))
    writer.truncate_to_step(2)
    assert steps_in(tmp_path) == [1, 2]
    writer.write("save", 2, {"durable_s": 0.1})
    writer.write("train", 3, {"loss": 0.0})
    assert steps_in(tmp_path) == [1, 2, 2, 3]


def test_the_picture_begins_at_step_1_and_has_the_loss_of_knowing_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot

    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    (tmp_path / "config.json").write_text('{"model": {"vocab_size": 8192}}')
    write(tmp_path, range(1, 20)).close()
    (axes,) = kept[0].axes
    assert axes.get_xlim()[0] == 1
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert lines["ln(8,192) = 9.01: uniform prediction"] == pytest.approx([math.log(8192)] * 2)
    assert (tmp_path / "loss.png").exists()
    (tmp_path / "config.json").unlink()
    draw_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert [line.get_label() for line in kept[1].axes[0].get_lines()] == ["train"]
