"""What T5's samples hold beside the text, and random ones."""

from __future__ import annotations

from typing import Any

from megatron.config import Config
from megatron.data.control_tokens import T5Tokens, t5_tokens
from megatron.data.t5_samples import T5Samples


def special_tokens(tokenizer: Any, config: Config) -> T5Tokens:
    """Return the ids that stand behind those of the text: sentinels, modes, start."""
    return t5_tokens(tokenizer, config.own.vocab_extra_ids, config.own.kinds)


def random_dataset(config: Config, texts: Any, tokens: T5Tokens, seed: int) -> T5Samples:
    """Return samples of ``texts``, as a token file has them."""
    own = config.own
    return T5Samples(
        texts,
        documents=(0, texts.num_documents),
        enc_seq_length=own.enc_seq_length,
        dec_seq_length=own.dec_seq_length,
        denoisers=own.kinds,
        tokens=tokens,
        seed=seed,
        reset_attention_mask=config.data.reset_attention_mask,
    )
