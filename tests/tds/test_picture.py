"""Pictures of time lines have a box for each action, numbers where they fit, and their bubble in the title."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from tds import plot
from tds.schedule import Costs, Span, Timeline, schedule_named, simulate, validate
from tds.trace import MeasuredStep


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved, in place of files."""
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, out: saved.append(self))
    return saved


def draw_schedule(name: str, p: int, m: int, c: int, out: Any) -> Timeline:
    order = schedule_named(name, c)
    stages = [order(p, m, stage) for stage in range(p)]
    timeline = simulate(stages, Costs.even(p * c), c)
    plot.draw_planned(name, timeline, validate(stages, m, num_chunks=c), m, c, out)
    return timeline


def figure_texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in (*figure.texts, *(t for axes in figure.axes for t in axes.texts))]


@pytest.mark.parametrize(("name", "p", "m", "c"), [("zb-h1", 8, 16, 1), ("interleaved", 4, 6, 3), ("1f1b", 1, 1, 1)])
def test_plot_has_one_labelled_box_per_action(name: str, p: int, m: int, c: int, figures: list[Figure]) -> None:
    timeline = draw_schedule(name, p, m, c, "no file")
    (axes,) = figures[0].axes
    idle, *boxes = [collection for collection in axes.collections if isinstance(collection, PolyCollection)]
    actions = [span.action for spans in timeline.spans for span in spans]
    assert sum(len(collection.get_paths()) for collection in boxes) == len(actions) and len(idle.get_paths()) == p
    assert len(boxes) == len({(type(action), action.chunk) for action in actions}), "a colour for each kind and chunk"
    numbers = [text for text in figure_texts(figures[0]) if text.isdecimal()]
    assert sorted(numbers) == sorted(str(action.micro_batch) for action in actions)


def test_box_positions_match_timeline(figures: list[Figure]) -> None:
    timeline = draw_schedule("gpipe", 2, 1, 1, "no file")
    (axes,) = figures[0].axes
    boxes = [collection for collection in axes.collections if isinstance(collection, PolyCollection)][1:]
    corners = {tuple(path.vertices[:, 0][[0, 1]]) for collection in boxes for path in collection.get_paths()}
    assert corners == {(span.start_s, span.end_s) for spans in timeline.spans for span in spans}


def test_plot_shows_sizes_bubble_and_idle_time_per_stage(figures: list[Figure]) -> None:
    draw_schedule("1f1b", 2, 4, 1, "no file")
    drawn = figure_texts(figures[0])
    assert "1f1b, 2 stages, 4 micro-batches: bubble 20.0 %" in drawn
    assert "idle 20.0 %, 2 in flight" in drawn and "idle 20.0 %, 1 in flight" in drawn
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert legend == ["forward", "backward", "idle"]


def test_measured_step_is_plotted_above_its_simulation(figures: list[Figure]) -> None:
    order = schedule_named("zb-h1")
    costs = Costs.even(2, 0.01, 0.01, 0.01)
    planned = simulate([order(2, 4, stage) for stage in range(2)], costs)
    slow = Timeline(
        tuple(tuple(Span(s.action, 2 * s.start_s, s.start_s + s.end_s) for s in row) for row in planned.spans)
    )
    plot.draw_measured(MeasuredStep(7, 0, "zb-h1", 1, 4, slow, costs), "no file")
    (figure,) = figures
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        f"measured: step {1e3 * slow.step_s:.4g} ms", "simulated with the measured costs: step 130 ms",
    ]  # fmt: skip
    assert figure.axes[0].get_position().y0 > figure.axes[1].get_position().y1
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim(), "one scale of time"
    title = f"zb-h1, 2 stages, 4 micro-batches, step 7: bubble {100 * slow.bubble:.1f} % measured, 7.7 % predicted"
    assert title in figure_texts(figure)


@pytest.mark.parametrize(("p", "m"), [pytest.param(64, 12, marks=pytest.mark.slow), (2, 1)])
def test_plot_size_is_bounded(p: int, m: int, tmp_path: Path) -> None:
    out = tmp_path / "schedule.png"
    draw_schedule("zb-h1", p, m, 1, out)
    width, height = struct.unpack(">II", out.read_bytes()[16:24])
    assert width == 1920 and 200 < height < 1600


def test_action_colours_differ_in_brightness() -> None:
    def brightness(colour: str) -> float:
        red, green, blue = to_rgb(colour)
        return 0.299 * red + 0.587 * green + 0.114 * blue

    groups = (("Forward", "Backward"), ("Forward", "BackwardInput", "BackwardWeight"))
    brightness_by_name = {action_type.__name__: brightness(colour) for action_type, (colour, _) in plot.COLOURS.items()}
    for names in groups:
        for first, second in itertools.combinations(names, 2):
            assert abs(brightness_by_name[first] - brightness_by_name[second]) > 0.07, (first, second)
