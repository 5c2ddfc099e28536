"""Plot module errors in execution order, with one panel per step phase."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

Errors = Mapping[str, float]
MIN_ERROR = 1e-18
"""Smaller errors, including zero, are drawn at this value."""
MAX_ERROR = 1e3
"""Larger errors, including infinite ones, are drawn at this value."""
INCHES_PER_NAME = 0.22


def plot_errors(
    curves: Mapping[str, Mapping[str, float]], tolerance: float, first: str | None, path: Path, title: str
) -> None:
    """Plot each name's largest error in one panel per phase, and mark the first error beyond its tolerance.

    Args:
        curves: phase -> name -> error, in plotting order.
        tolerance: value drawn as a horizontal line.
        first: phase and name to mark, such as "forward: layers.1"; None: no mark.
    """
    curves = {phase: errors for phase, errors in curves.items() if errors}
    longest = max(len(errors) for errors in curves.values())
    size = (max(7.0, INCHES_PER_NAME * longest + 1.5), 3.6 * len(curves))
    figure, panels = pyplot.subplots(len(curves), 1, figsize=size, squeeze=False)
    for axes, (phase, errors) in zip(panels[:, 0], curves.items(), strict=True):
        values = [min(max(error, MIN_ERROR), MAX_ERROR) for error in errors.values()]
        axes.plot(range(len(values)), values, marker=".", label=phase)
        axes.axhline(tolerance, color="tab:gray", linestyle="--", label=f"tolerance {tolerance:g}")
        for idx, name in enumerate(errors):
            if f"{phase}: {name}" == first:
                axes.plot(
                    [idx], [values[idx]], "o", color="tab:red", fillstyle="none", label="first beyond the tolerance"
                )
        axes.set_yscale("log")
        axes.set_xticks(range(len(values)), list(errors), rotation=90, fontsize=6)
        axes.set_ylabel("relative error")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
