"""The ids of a run: those of its tokenizer's text, and those that its family puts behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.config import Config
from megatron.data.bert_control import bert_tokens
from megatron.data.control_tokens import t5_tokens
from megatron.errors import ConfigError
from megatron.tokenizer import build as build_tokenizer


def with_tokenizer(config: Config) -> tuple[Any, Config]:
    """Return the tokenizer, where one is named, and the configuration with its vocabulary."""
    files = config.data
    if not (files.tokenizer_path or files.vocab_file):
        return None, config if config.model.vocab_size is None else config.with_vocab(config.model.vocab_size)
    tokenizer = build_tokenizer(
        files.tokenizer_type,
        vocab_file=files.vocab_file,
        merge_file=files.merge_file,
        tokenizer_path=files.tokenizer_path,
    )
    return tokenizer, with_vocabulary(tokenizer, config)


def with_vocabulary(tokenizer: Any, config: Config) -> Config:
    """Return the configuration with the ids of the tokenizer, and those that its family puts behind them.

    Raises:
        ConfigError: --vocab-size is too small, or --vocab-extra-ids was given and the tokenizer has sentinels.
    """
    own = len(tokenizer.sentinel_ids) if config.is_t5 else 0
    if own and "vocab_extra_ids" in config.given:
        raise ConfigError(
            "--vocab-extra-ids is for a tokenizer without sentinels, got --vocab-extra-ids "
            f"{config.t5.vocab_extra_ids} and a tokenizer with {own} of its own, which are used. Leave it out"
        )
    return config.with_vocab(tokens_of(tokenizer, config).vocab_size)


def tokens_of(tokenizer: Any, config: Config) -> Any:
    """Return the ids that samples of the family hold: ``vocab_size`` counts them all."""
    return TOKENS[config.family](tokenizer, config) if config.family in TOKENS else tokenizer


TOKENS: Mapping[str, Callable[[Any, Config], Any]] = {
    "t5": lambda tokenizer, config: t5_tokens(tokenizer, config.t5.vocab_extra_ids, config.t5.kinds),
    "bert": lambda tokenizer, config: bert_tokens(tokenizer),
}
"""Family that puts ids behind those of the text -> all of them."""
