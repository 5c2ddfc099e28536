"""The vocabulary of a run: token ids of its tokenizer and those that the model family adds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron import log
from megatron.config import Config
from megatron.errors import ConfigError
from megatron.models.registry import data_parts
from megatron.mpu.groups import SINGLE, Group
from megatron.tokenizer import build
from megatron.training.end_of_document import choose_eod


def with_tokenizer(config: Config, world: Group = SINGLE) -> tuple[Any, Config]:
    """Return the tokenizer, where one is named, and the configuration with its vocabulary. Collective.

    Args:
        world: all ranks of the run.
    """
    files, is_null = config.data, config.data.tokenizer_type == "NullTokenizer"
    if not (files.tokenizer_path or files.vocab_file or is_null):
        return None, config if config.model.vocab_size is None else config.with_vocab(config.model.vocab_size)
    tokenizer = build(
        files.tokenizer_type,
        vocab_file=files.vocab_file,
        merge_file=files.merge_file,
        tokenizer_path=files.tokenizer_path,
        vocab_size=config.model.vocab_size,
    )
    choose_eod(tokenizer, config, world)
    config = replace(config, data=replace(config.data, eod_token=tokenizer.eod_name))
    if is_null:  # behind whose ids a family may put others
        config = replace(config, model=replace(config.model, vocab_size=None))
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
    rows, tokens = config.model.vocab_size, tokens_of(tokenizer, config)
    needed = tokens.vocab_size
    uses_text_only = tokens is tokenizer and not config.data.fim_rate
    if rows is not None and needed > rows and uses_text_only and tokenizer.text_vocab_size <= rows:
        log.info(
            f"the tokenizer has {needed} ids and the model {rows} rows: the ids from {rows} on are special tokens, "
            "which plain text never becomes"
        )
        tokenizer.num_rows, needed = rows, rows
    return config.with_vocab(needed)


def tokens_of(tokenizer: Any, config: Config) -> Any:
    """Return the ids in samples of the family, a ``Vocabulary``, with those that it adds to the tokenizer's."""
    data = data_parts(config.family)
    return tokenizer if data is None else data.special_tokens(tokenizer, config)
