"""Small BERT models and batches for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron.models.bert.model import BertModelArgs

VOCAB, SEQ, BATCH = 101, 13, 4  # 101 is a prime, so that every tensor size needs padding
SMALL = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 16,
    "kv_hidden_size": 8, "ff_hidden_size": 40, "layernorm_epsilon": 1e-12,
}  # fmt: skip


def bert_model_args(**overrides: Any) -> BertModelArgs:
    """Return the args of the small model, with ``overrides``."""
    return BertModelArgs(**{**SMALL, **overrides})


@dataclass
class BertBatch:
    """Arguments of ``BertModel.forward``."""

    tokens: torch.Tensor
    token_types: torch.Tensor
    segments: torch.Tensor | None
    labels: torch.Tensor
    loss_mask: torch.Tensor
    is_random: torch.Tensor


def make_bert_batch(seed: int = 0, *, is_padded: bool = True, num_rows: int = BATCH, length: int = SEQ) -> BertBatch:
    """Return random samples of two segments, with labels for some tokens; with ``is_padded`` their lengths differ."""
    generator = torch.Generator().manual_seed(seed)
    # Id 0 is left out: it is Hugging Face's padding id, whose embedding row never gets a gradient there.
    tokens, labels = (torch.randint(1, VOCAB, (num_rows, length), generator=generator) for _ in range(2))
    positions = torch.arange(length).expand(num_rows, length)
    boundaries = torch.randint(2, length - 4, (num_rows, 1), generator=generator)
    is_real = (
        positions < torch.randint(length - 3, length, (num_rows, 1), generator=generator)
        if is_padded
        else positions >= 0
    )
    mask = (torch.rand(num_rows, length, generator=generator) < 0.2 + 0.1 * (seed % 4)) & is_real
    mask[:, 1] = True
    is_random = torch.randint(0, 2, (num_rows,), generator=generator)
    segments = is_real.int() - 1 if is_padded else None
    return BertBatch(tokens, (positions >= boundaries).long(), segments, labels, mask.float(), is_random)
