"""The study in pictures: efficiency over devices by stages, where the time goes, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.scaling_parts.measured import Scaled
from benchmarks.scaling_points import TERMS, Prediction, best

COLOURS = ("#4878a8", "#79a8c8", "#e0b050", "#c87050", "#a05080", "#808080")
SERIES = {"strong": "strong scaling: samples of a step stay", "weak": "weak scaling: micro-batches of a replica stay"}


def draw_predicted(found: Sequence[Prediction], title: str, path: Path) -> None:
    """Draw, for both series, the efficiency of each number of stages and the terms of the fastest layout."""
    figure, axes = _axes(2, 2, (11.0, 7.0))
    for column, (series, told) in enumerate(SERIES.items()):
        _draw_efficiency(axes[0][column], [one for one in found if one.series == series])
        axes[0][column].set_title(told)
        _draw_terms(axes[1][column], found, series)
    axes[0][0].set_ylabel("share of a step spent on computing")
    axes[1][0].set_ylabel("the fastest that fits: shares of a step")
    axes[0][0].legend(title="stages", fontsize=8)
    axes[1][1].legend(fontsize=8, loc="center right")
    figure.suptitle(title)
    _save(figure, path)


def draw_measured(rows: Sequence[Scaled], title: str, path: Path) -> None:
    """Draw the measured efficiency of each layout beside that of its estimate."""
    figure, ((axis,),) = _axes(1, 1, (10.0, 4.5))
    places, one = range(len(rows) - 1), rows[0]
    axis.bar([x - 0.2 for x in places], [row.efficiency(one) for row in rows[1:]], 0.4, label="measured",
             color=COLOURS[0])  # fmt: skip
    axis.bar([x + 0.2 for x in places], [row.expected(one) for row in rows[1:]], 0.4, label="by the estimate",
             color=COLOURS[2])  # fmt: skip
    names = [f"{row.point.series}, {row.point.ranks} ranks\n" + row.point.name.replace(", ", "\n") for row in rows[1:]]
    axis.set_xticks(list(places), names, fontsize=7)
    axis.axhline(1.0, color="black", linewidth=0.5)
    axis.set_ylabel("tokens/s over that of one rank, by core")
    axis.legend(fontsize=8)
    axis.set_title(title)
    _save(figure, path)


def _draw_efficiency(axis: Any, found: Sequence[Prediction]) -> None:
    for stages, colour in zip(sorted({one.stages for one in found}), (*COLOURS, "black"), strict=False):
        own = [one for one in found if one.stages == stages]
        axis.plot([one.devices for one in own], [one.efficiency for one in own], color=colour, linewidth=1, alpha=0.6)
        for fits, style in ((True, "o"), (False, "x")):
            some = [one for one in own if one.fits == fits]
            label = str(stages) + ("" if any(one.fits for one in own) else " (does not fit)") if some else None
            axis.plot([one.devices for one in some], [one.efficiency for one in some], style, color=colour,
                      markersize=4, label=label)  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted({one.devices for one in found}))
    axis.set_xticklabels([f"{devices}" for devices in sorted({one.devices for one in found})], fontsize=8)
    axis.set_ylim(0, 1.02)
    axis.grid(alpha=0.3)


def _draw_terms(axis: Any, found: Sequence[Prediction], series: str) -> None:
    numbers = sorted({one.devices for one in found})
    fastest = [(devices, best(found, series, devices)) for devices in numbers]
    own = [(str(devices), one) for devices, one in fastest if one is not None]
    below = [0.0] * len(own)
    for term, colour in zip(TERMS, COLOURS, strict=True):
        shares = [one.share(term) for _, one in own]
        if max(shares, default=0.0) > 0:
            axis.bar([name for name, _ in own], shares, bottom=below, color=colour, label=term, width=0.7)
        below = [lower + share for lower, share in zip(below, shares, strict=True)]
    for place, (_, one) in enumerate(own):
        axis.text(place, 0.03, f"{one.stages} x {one.replicas}", rotation=90, ha="center", fontsize=7, color="white")
    axis.set_xlabel("devices; in the bars stages x replicas")
    axis.set_ylim(0, 1.02)


def _axes(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)
