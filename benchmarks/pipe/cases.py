"""What ``pipeline.py`` compares: models with a number of micro-batches on a grid of processes, and who takes part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.sizes import GPTSizes, Sizes, T5Sizes

Bounds = tuple[int, ...]
MOST_KEPT = 128
"""Micro-batches times layers whose activations one contender may keep."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison, all of whose contenders take turns.

    Args:
        bar: speed that ours must reach, as a part of two one-process runs side by side; None: reported without bars.
        balance: how much longer than the shortest the longest stage of our best may take, as measured ahead.
        loss_tolerance: how far apart the losses of contenders may be in their first steps.
    """

    name: str
    sizes: Sizes = field(default_factory=GPTSizes)
    micro_batch_size: int = 4
    num_micro_batches: int = 8
    num_stages: int = 2
    tensor: int = 1
    bar: float | None = None
    balance: float | None = None
    loss_tolerance: float = 1e-5

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.sizes.tokens_per_sample * self.micro_batch_size * self.num_micro_batches

    @property
    def has_gpipe(self) -> bool:
        """Whether GPipe takes part: where it keeps gigabytes, 24 GiB are not enough for all contenders together."""
        return self.num_micro_batches * self.sizes.num_layers <= MOST_KEPT


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Who trains it, and how.

    Args:
        kind: "alone", "side by side", "stock", "dualpipev", "torch" or "ours".
        layers: as in ``model.make_model``.
        partition: bounds, or the name of a method of the engine's.
        keeps_freed: let the allocator keep freed memory; our engine does so by itself.
    """

    name: str
    kind: str
    layers: str = "half"
    partition: Bounds | str = ()
    schedule: str = "1f1b"
    chunks: int = 1
    keeps_freed: bool = False

    @property
    def num_trials(self) -> int:
        """How many steps it takes before it runs as it will: "auto" tries schedules first."""
        return 4 if self.schedule == "auto" else 0

    def num_ranks(self, case: Case) -> int:
        """Return how many processes it runs in."""
        if self.kind in ("alone", "side by side"):
            return 1 if self.kind == "alone" else case.num_stages * case.tensor
        return case.num_stages * case.tensor


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
