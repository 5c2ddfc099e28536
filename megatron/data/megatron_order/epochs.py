"""EpochPlan: the epochs that Megatron shuffles together for a corpus, and the sample count in them."""

from __future__ import annotations

from typing import NamedTuple

_SEPARATE_BELOW = 0.80
"""The last epoch is shuffled separately if the run needs a smaller fraction of its samples."""


class EpochPlan(NamedTuple):
    """One corpus's epochs in a run.

    Megatron concatenates the documents of all epochs in a run in one order, splits the concatenation into samples, and
    permutes the samples of all epochs together. If the run ends early in the last epoch, the last epoch's documents and
    samples are permuted on their own and follow the others. The order therefore depends on the run length.

    Args:
        num_epochs: epochs that are built; the fewest that contain the run's samples.
        num_samples: samples in these epochs. They overlap epoch boundaries.
        num_samples_before_last: samples that are permuted before the others. Equal to ``num_samples`` unless the last
            epoch is separate.
    """

    num_epochs: int
    num_samples: int
    num_samples_before_last: int

    @property
    def has_separate_last(self) -> bool:
        """True if the last epoch is permuted separately."""
        return self.num_samples_before_last < self.num_samples


def plan_epochs(num_tokens: int, seq_length: int, num_samples: int, extra_tokens: int = 1) -> EpochPlan:
    """Plan the epochs from which a run draws at least ``num_samples`` samples.

    Args:
        num_tokens: tokens in one epoch; at least 1.
        seq_length: tokens by which neighbouring samples are apart.
        extra_tokens: tokens that neighbouring samples share: 1 with a label for the last input, else 0.
    """
    num_epochs = max(1, -(-(num_samples * seq_length + extra_tokens) // num_tokens))
    total = (num_epochs * num_tokens - extra_tokens) // seq_length
    if num_epochs == 1:
        return EpochPlan(1, total, total)
    before_last = ((num_epochs - 1) * num_tokens - extra_tokens) // seq_length
    per_epoch = (num_tokens - extra_tokens) // seq_length
    is_separate = num_samples - before_last < int(_SEPARATE_BELOW * per_epoch)
    return EpochPlan(num_epochs, total, before_last if is_separate else total)
