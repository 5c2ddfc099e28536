"""A run's vocabulary: the tokenizer's ids and the model family's additional ids."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron import log
from megatron.config import Config
from megatron.errors import ConfigError
from megatron.models.registry import data_parts
from megatron.tokenizer import build
from megatron.training.end_of_document import choose_eod

if TYPE_CHECKING:
    from megatron.mpu.groups import Group


def with_tokenizer(config: Config, world: Group | None = None) -> tuple[Any, Config]:
    """Build the tokenizer (None if no flag names one) and a configuration with its vocabulary. Collective.

    Args:
        world: the run's world group; None: this process only.
    """
    settings, is_null = config.data, config.data.tokenizer_type == "NullTokenizer"
    if not (settings.tokenizer_path or settings.vocab_file or is_null):
        return None, config if config.model.vocab_size is None else config.with_vocab(config.model.vocab_size)
    tokenizer = build(
        settings.tokenizer_type,
        vocab_file=settings.vocab_file,
        merge_file=settings.merge_file,
        tokenizer_path=settings.tokenizer_path,
        vocab_size=config.model.vocab_size,
    )
    choose_eod(tokenizer, config, world)
    config = replace(config, data=replace(config.data, eod_token=tokenizer.eod_name))
    if is_null:  # a family may append ids, which makes the vocabulary larger than --vocab-size
        config = replace(config, model=replace(config.model, vocab_size=None))
    return tokenizer, with_vocabulary(tokenizer, config)


def with_vocabulary(tokenizer: Any, config: Config) -> Config:
    """Copy the configuration with the vocabulary size: the tokenizer's ids and the family's additional ids.

    Raises:
        ConfigError: --vocab-size is too small, or --vocab-extra-ids was given and the tokenizer has sentinels.
    """
    num_sentinels = len(tokenizer.sentinel_ids) if config.family_config.is_encoder_decoder else 0
    if num_sentinels and "vocab_extra_ids" in config.explicit_fields:
        raise ConfigError(
            "--vocab-extra-ids needs a tokenizer without sentinels, got --vocab-extra-ids "
            f"{config.family_config.vocab_extra_ids} and a tokenizer with {num_sentinels} sentinels, which are used. "
            "Leave the flag out"
        )
    num_rows, vocabulary = config.model.vocab_size, family_vocabulary(tokenizer, config)
    num_ids = vocabulary.vocab_size
    has_only_text_ids = vocabulary is tokenizer and not config.data.fim_rate
    if num_rows is not None and num_ids > num_rows and has_only_text_ids and tokenizer.text_vocab_size <= num_rows:
        log.info(
            f"the tokenizer has {num_ids} ids and the model {num_rows} rows: the ids from {num_rows} on are special "
            "tokens, which do not occur in plain text"
        )
        tokenizer.num_rows, num_ids = num_rows, num_rows
    return config.with_vocab(num_ids)


def family_vocabulary(tokenizer: Any, config: Config) -> Any:
    """Return the ``Vocabulary`` for the family's samples: the tokenizer's ids and the family's additional ids."""
    data = data_parts(config.family)
    return tokenizer if data is None else data.special_tokens(tokenizer, config)
