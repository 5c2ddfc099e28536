"""The comparisons that ``pipeline.py`` makes of each family of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.pipe.case import Case
from benchmarks.sizes import GPTSizes, T5Sizes

MAIN = GPTSizes(num_layers=8, hidden_size=256, num_attention_heads=8, vocab_size=8192, seq_length=256)
DEEP = replace(MAIN, num_layers=16, vocab_size=4096)
SMALL = GPTSizes(num_layers=3, hidden_size=32, num_attention_heads=4, vocab_size=64, seq_length=16)
T5_MAIN = T5Sizes(num_layers=8, hidden_size=256, num_attention_heads=8, vocab_size=11776, enc_seq_length=256)
"""With this vocabulary the decoder's side and the head make up for what the encoder's layers leave over."""
T5_LOSS_TOLERANCE = 5e-5
"""Stages add up the gradients of tied tables in another order, which Adam's first steps blow up."""
T5_SMALL = T5Sizes(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=256, enc_seq_length=16)
KINDS = {"gpt2": ("main", "deep", "tensor"), "t5": ("main",)}


def cases_of(model: str, kinds: Sequence[str], micro_batches: Sequence[int], *, is_smoke: bool) -> list[Case]:
    """Return the cases of ``kinds``, in the order of their running; the main one with each number of micro-batches."""
    batch = 2 if is_smoke else 4
    if model == "t5":
        sizes = T5_SMALL if is_smoke else T5_MAIN
        t5 = Case(name="t5", sizes=sizes, micro_batch_size=batch, balance=0.03, loss_tolerance=T5_LOSS_TOLERANCE)
        return [replace(t5, name=f"t5 m={m}", num_micro_batches=m, bar=_at_8(m, 0.85)) for m in micro_batches]
    main, deep = (SMALL, replace(SMALL, num_layers=4)) if is_smoke else (MAIN, DEEP)
    found = []
    if "main" in kinds:
        case = Case(name="main", sizes=main, micro_batch_size=batch)
        found += [replace(case, name=f"m={m}", num_micro_batches=m, bar=_at_8(m, 0.93)) for m in micro_batches]
    if "deep" in kinds:
        found.append(Case(name="deep m=16", sizes=deep, micro_batch_size=batch, num_micro_batches=16, bar=0.94))
    if "tensor" in kinds:
        found.append(Case(name="tensor m=8", sizes=main, micro_batch_size=batch, num_micro_batches=8, tensor=2))
    return found


def _at_8(num_micro_batches: int, bar: float) -> float | None:
    return bar if num_micro_batches == 8 else None
