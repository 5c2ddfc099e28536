"""BERT's loss: the mean over masked tokens and the mean over samples, added.

Both means are over the global batch, and a batch in a loss is known to no micro-batch. So what is summed is

    masked + next_sentence * predictions / samples      counted by masked tokens

with the tokens to predict and the samples of the whole step, which follow from the numbers of its samples
(``megatron.data.step_predictions``). Divided by all masked tokens that is the sum of the two means, in any layout.
Whole words may leave a token of what is to be predicted unmasked; then the second mean weighs that much more than 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.model.head import LazyLogits, Logits, whole_logits
from megatron.model.loss import model_loss
from megatron.model.sizes import Place, Sizes

Pair = tuple[torch.Tensor, torch.Tensor]
Outputs = Logits | tuple[Logits, torch.Tensor]
"""Logits of words, or these and the scores of the second segment [b, 2]."""


def whole_outputs(outputs: Outputs) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return ``outputs`` with the logits themselves."""
    if isinstance(outputs, (torch.Tensor, LazyLogits)):
        return whole_logits(outputs)
    words, scores = outputs
    return whole_logits(words), scores


def bert_loss(
    logits: Outputs,
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    is_random: torch.Tensor | None = None,
    step_predictions: torch.Tensor | None = None,
    *,
    sizes: Sizes,
    place: Place,
) -> Pair | dict[str, Pair]:
    """Return (sum, count) over the masked tokens; with two heads both losses and, as "loss", what is trained on.

    Shapes:
        logits    [s, b, v/t] or what they are made of; or that and [b, 2]
        labels    [b, s] token ids, looked at where ``loss_mask`` [b, s] is not 0
        is_random [b], 1 where the second segment is from elsewhere
        step_predictions [2], tokens to predict and samples of the step; None: those of this batch
    """
    if isinstance(logits, (torch.Tensor, LazyLogits)):
        return model_loss(logits, labels, loss_mask, sizes, place)
    words, scores = logits
    if is_random is None:
        raise ValueError("a BERT with two heads needs is_random, whether the second segment is from elsewhere")
    masked, num_masked = model_loss(words, labels, loss_mask, sizes, place)
    wide = scores.dtype if scores.dtype == torch.float64 else torch.float32
    following = F.cross_entropy(scores.to(wide), is_random, reduction="sum")
    num_samples = num_masked.new_full((), len(is_random))
    if step_predictions is None:
        share = num_masked / num_samples
    else:
        predictions, samples = step_predictions.to(wide)  # not fp64, which some devices lack
        share = predictions / samples
    return {
        "loss": (masked + following * share, num_masked),
        "mlm loss": (masked.detach(), num_masked),
        "nsp loss": (following.detach(), num_samples),
    }
