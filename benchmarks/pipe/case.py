"""What is measured: a model with its number of micro-batches on a grid of processes, and who takes part."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.sizes import GPTSizes, Sizes

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
