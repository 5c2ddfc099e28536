"""What is to be reached, and whether it is.

| what | bar |
|---|---|
| our 1F1B to the faster of the stock engine's and torch's at the same cut | at least 0.98 |
| our best to the stock engine at its best, DualPipeV included | at least 1.04 |
| our best to torch's 1F1B at its best cut | at least 1.05 |
| our best to two one-process runs side by side | the case's own |
| a recorded step to ``simulate`` with its costs | off by at most 0.05 |
| longest stage to the shortest at our best cut, by the layers' times | off by at most the case's own |
| tensors on the first stage, our 1F1B and ZB-H1 of one chunk to the stock engine at the same cut | at most 1 |

Chunks and GPipe have no bar of memory: they hold more micro-batches at a time, by design.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.pipe.case import Case
from benchmarks.pipe.record import Record, fastest, ratio

NO_MEMORY_BAR = "memory has no bar for chunks and gpipe: they hold more micro-batches at a time, by design"
MEMORY = "memory of the first stage"
SAME_CUT, BEST_OF_STOCK, BEST_OF_TORCH, PREDICTED = 0.98, 1.04, 1.05, 0.05


@dataclass(frozen=True)
class Bar:
    """Something to reach: ``ratio`` at least ``bar``, or at most where ``is_limit``."""

    told: str
    ratio: float
    bar: float
    is_limit: bool = False

    @property
    def is_met(self) -> bool:
        return self.ratio <= self.bar if self.is_limit else self.ratio >= self.bar

    def __str__(self) -> str:
        sign = "<=" if self.is_limit else ">="
        return f"{'met    ' if self.is_met else 'NOT MET'}  {self.ratio:6.3f} {sign} {self.bar:.3f}  {self.told}"


def bars(case: Case, records: Mapping[str, Record]) -> list[Bar]:
    """Return every bar of the case whose contenders took part; none with more ranks than the bars are meant for."""
    if case.tensor > 1:
        return []
    found = [*_same_cut(case, records), *_predicted(records)]
    if case.bar is None:
        return found
    ours = fastest(case, records.values(), "ours")
    rivals = [
        ("stock at its best", fastest(case, records.values(), "stock", "dualpipev"), BEST_OF_STOCK),
        ("torch at its best", fastest(case, records.values(), "torch"), BEST_OF_TORCH),
        ("two processes", fastest(case, records.values(), "side by side"), case.bar),
    ]
    found += _balanced(case, records)
    for told, rival, bar in rivals:
        if ours is not None and rival is not None:
            told = f"our best ({ours.contender.name}) to {told} ({rival.contender.name})"
            found.append(Bar(told, ratio(case, ours, rival), bar))
    return found


def _same_cut(case: Case, records: Mapping[str, Record]) -> list[Bar]:
    """Our 1F1B beside 1F1B of others on the same layers: speed, and memory of the first stage."""
    found = []
    for own in records.values():
        contender = own.contender
        if contender.kind != "ours" or contender.partition == "profile":
            continue
        rivals = [r for r in records.values() if r.contender.kind in ("stock", "torch") and r.cut == own.cut]
        rival = fastest(case, rivals, "stock", "torch")
        if rival is not None and contender.schedule == "1f1b" and case.bar is not None:
            told = f"{contender.name} to the faster 1F1B of others at this cut ({rival.contender.name})"
            found.append(Bar(told, ratio(case, own, rival), SAME_CUT))
        stock = fastest(case, rivals, "stock")
        is_lean = contender.schedule in ("1f1b", "zb-h1") and contender.chunks == 1
        if is_lean and stock is not None and own.first_stage_bytes and stock.first_stage_bytes:
            told = f"{MEMORY}, {contender.name} to {stock.contender.name}"
            found.append(Bar(told, sum(own.first_stage_bytes) / sum(stock.first_stage_bytes), 1.0, is_limit=True))
    return found


def _balanced(case: Case, records: Mapping[str, Record]) -> list[Bar]:
    """How far apart the stages of our best cut are; chunks are left out, for they have a balance of their own."""
    cut = [record for record in records.values() if record.contender.chunks == 1 and record.stage_s]
    best = fastest(case, cut, "ours")
    if case.balance is None or best is None:
        return []
    apart = max(best.stage_s) / min(best.stage_s) - 1.0
    return [Bar(f"stages of {best.contender.name} are apart by", apart, case.balance, is_limit=True)]


def _predicted(records: Mapping[str, Record]) -> list[Bar]:
    found = []
    for record in records.values():
        if record.measured_to_simulated:
            middle = statistics.median(record.measured_to_simulated)
            told = f"{record.contender.name}: measured step is {middle:.3f} of simulate's, off by"
            found.append(Bar(told, abs(middle - 1.0), PREDICTED, is_limit=True))
    return found
