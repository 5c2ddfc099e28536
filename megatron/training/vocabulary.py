"""The ids of a run: those of its tokenizer's text, and those that its family puts behind them."""

from __future__ import annotations

from typing import Any

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.models.registry import has_part, load
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
    own = len(tokenizer.sentinel_ids) if config.own.is_encoder_decoder else 0
    if own and "vocab_extra_ids" in config.given:
        raise ConfigError(
            "--vocab-extra-ids is for a tokenizer without sentinels, got --vocab-extra-ids "
            f"{config.own.vocab_extra_ids} and a tokenizer with {own} of its own, which are used. Leave it out"
        )
    return config.with_vocab(tokens_of(tokenizer, config).vocab_size)


def tokens_of(tokenizer: Any, config: Config) -> Any:
    """Return the ids that samples of the family hold: ``vocab_size`` counts them all."""
    has_own = has_part(config.family, "data")
    return load(config.family, "data").special_tokens(tokenizer, config) if has_own else tokenizer
