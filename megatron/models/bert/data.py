"""What BERT's samples hold beside the text, and random ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.config import Config
from megatron.data.bert_control import BertTokens, bert_tokens
from megatron.data.bert_samples import BertSamples


def special_tokens(tokenizer: Any, config: Config) -> BertTokens:
    """Return the ids that frame texts and stand for masked tokens."""
    return bert_tokens(tokenizer)


def random_dataset(config: Config, texts: Any, tokens: BertTokens, seed: int) -> BertSamples:
    """Return samples of ``texts``, as a token file has them; ``texts.vocab_size``: ids of text are below it."""
    own, every_third = config.own, np.arange(texts.vocab_size) % 3 != 0
    return BertSamples(
        texts,
        documents=(0, texts.num_documents),
        seq_length=config.batch.seq_length,
        tokens=tokens,
        seed=seed,
        has_pairs=own.binary_head,
        mask_prob=own.mask_prob,
        short_seq_prob=own.short_seq_prob,
        word_starts=every_third if own.whole_word_masking else None,
    )
