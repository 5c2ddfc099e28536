"""A picture of how long the documents of one or several corpora are."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from megatron import files
from megatron.data.inspect.lengths import Lengths

_BINS_PER_DECADE = 10


def bounds(longest: int) -> np.ndarray:
    """Return the bounds of bins from 1 on, rising whole numbers, evenly spread on a logarithmic axis, above ``longest``
    in the end."""
    decades = np.log10(max(longest, 1) + 1)
    exponents = np.linspace(0, decades, max(int(np.ceil(decades * _BINS_PER_DECADE)), 1) + 1)
    return np.unique(np.ceil(10**exponents).astype(np.int64))


def draw(corpora: Mapping[str, Lengths], path: Path) -> None:
    """Write a PNG with one line for each corpus, by its name; empty documents stand in the legend, not on the axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    edges = bounds(max((int(lengths.values.max(initial=1)) for lengths in corpora.values()), default=1))
    for name, lengths in corpora.items():
        axes.stairs(lengths.histogram(edges), edges, label=_legend(name, lengths), fill=len(corpora) == 1, alpha=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("tokens of a document")
    axes.set_ylabel("documents")
    axes.legend(loc="upper right", fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace_bytes(path, picture.getvalue())


def _legend(name: str, lengths: Lengths) -> str:
    if not lengths.num_documents:
        return f"{name}: no documents"
    empty = f", {lengths.num_empty} empty" if lengths.num_empty else ""
    return f"{name}: {lengths.num_documents} documents, median {lengths.quantile(0.5)}{empty}"
