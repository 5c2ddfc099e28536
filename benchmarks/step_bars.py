"""What a step of ours is to reach beside others in the same run, and whether it did.

On a CPU the bars are set for the small sizes, and judged for whatever sizes are given; on a GPU they are for the large
ones alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Contenders = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Bar:
    """One thing to reach, what was measured, and what it must be ``at_least`` or, of memory, ``at_most``."""

    name: str
    found: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool:
        """Return whether it was reached."""
        return (self.at_least is None or self.found >= self.at_least) and (
            self.at_most is None or self.found <= self.at_most
        )

    def __str__(self) -> str:
        bound = f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"
        return f"{'met   ' if self.is_met else 'MISSED'} {self.name}: {self.found:.3f}, {bound}"


OF_PRODUCTS = {"gpt2": {"ours": 0.72, "ours-compiled": 0.80}}
"""Share of the rate of this machine's matrix products, on a CPU."""
OF_THE_SHEET = {"gpt2": 0.50, "t5": 0.42}
"""Share of the GPU's peak by its data sheet, with the larger sizes: the better of ours and ours compiled."""
SPEEDS = {
    "gpt2": {
        ("ours", "plain"): 1.05,
        ("ours-compiled", "plain-compiled"): 1.05,
        ("ours", "hf"): 1.25,
        ("ours-compiled", "hf"): 1.4,
    },
    "t5": {("ours", "hf"): 1.3},
}
"""Times as fast as others, on a CPU, by medians of rounds."""
IN_LESS_MEMORY = {"gpt2": ("hf", "plain"), "t5": ("hf",)}


def bars(family: str, kind: str, contenders: Contenders, *, is_large: bool = False) -> Iterator[Bar]:
    """Yield what of it was measured: a contender that did not take part is not asked for.

    Args:
        is_large: the sizes are the larger ones.
    """
    if kind != "cpu" and not is_large:
        return
    if kind != "cpu":
        shares = [contenders[name]["mfu_sheet"] for name in ("ours", "ours-compiled") if name in contenders]
        known = [share for share in shares if share is not None]
        if known and family in OF_THE_SHEET:
            yield Bar("MFU of the data sheet", max(known), at_least=OF_THE_SHEET[family])
        return
    for name, share in OF_PRODUCTS.get(family, {}).items():
        if name in contenders:
            yield Bar(f"MFU of {name}", contenders[name]["mfu"], at_least=share)
    for (ours, other), times in SPEEDS.get(family, {}).items():
        if ours in contenders and other in contenders:
            yield Bar(f"speed of {ours} over {other}", contenders[other]["speed_of_ours"][ours][1], at_least=times)
    for other in IN_LESS_MEMORY.get(family, ()):
        for ours in ("ours", "ours-compiled"):
            if ours in contenders and other in contenders:
                share = contenders[ours]["peak_memory_bytes"] / contenders[other]["peak_memory_bytes"]
                yield Bar(f"peak memory of {ours} over {other}'s", share, at_most=1.0)
