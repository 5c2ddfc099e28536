"""get_args, get_config, get_tokenizer, get_streams; building the tokenizer."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field, replace
from typing import Any

from megatron import log
from megatron.arguments.flag_values import with_variables
from megatron.config import Config
from megatron.data import BlendPaths
from megatron.errors import ConfigError, DataError
from megatron.models.registry import has_part, load
from megatron.tokenizer import build
from megatron.training.end_of_document import choose_eod

# What a script asks for by name while ``pretrain`` runs: arguments, configuration, tokenizer, dropout.
#
# Only scripts and this package read these; everything below takes what it needs as an argument.


@dataclass
class _Current:
    config: Config | None = None
    tokenizer: Any = None
    streams: Any = None
    args: argparse.Namespace | None = None
    extra: dict[str, Any] = field(default_factory=dict)


_current = _Current()


def set_current(config: Config, tokenizer: Any, streams: Any) -> None:
    """Make these what scripts are told until the next call."""
    _current.config, _current.tokenizer, _current.streams = config, tokenizer, streams
    _current.args = config.namespace()


def get_args() -> argparse.Namespace:
    """Return all flags with the flat names that Megatron and CPM scripts use."""
    return _needed(_current.args, "namespace of arguments")


def get_config() -> Config:
    """Return the configuration by concern."""
    return _needed(_current.config, "configuration")


def get_data_paths() -> BlendPaths:
    """Return which corpora the flags name for each split, and how they are read."""
    settings = get_config().data
    return BlendPaths(
        **settings.corpora,
        split=settings.split,
        split_by=settings.split_by,
        data_impl=settings.data_impl,
        cache_path=settings.data_cache_path,
        objects_path=settings.object_storage_cache_path,
        objects_bytes=int(settings.object_storage_cache_gb * 1e9),
        mixture_schedule=settings.mixture_schedule,
    )


def get_tokenizer() -> Any:
    """Return the tokenizer.

    Raises:
        DataError: the run has none.
    """
    if _current.tokenizer is None and _current.config is not None:
        raise DataError(missing_tokenizer(_current.config))
    return _needed(_current.tokenizer, "tokenizer")


def missing_tokenizer(config: Config) -> str:
    """Return the message for a script that needs a tokenizer where no flag names one."""
    if config.data.is_mock:
        size = config.model.vocab_size or "N"
        return (
            "--data-path mock needs a vocabulary, got no tokenizer. Add --tokenizer-type NullTokenizer --vocab-size "
            f"{size}, or name a tokenizer with --tokenizer-path"
        )
    problem = (
        "this script needs a tokenizer, got no --tokenizer-path and no --vocab-file. Name the tokenizer of the data; "
        "tools/train_tokenizer.py trains one"
    )
    return with_variables([problem], os.environ)[0]


def get_chat_template() -> Any:
    """Return the chat template that --sft renders conversations with.

    Raises:
        DataError: the run has no tokenizer or no template, or it cannot be read.
    """
    from megatron.tokenizer.chat import find_template  # jinja2 takes 0.1 s, for --sft alone

    return find_template(get_tokenizer(), get_config().data.chat_template)


def get_streams() -> Any:
    """Return this rank's source of dropout masks."""
    return _needed(_current.streams, "source of dropout masks")


def _needed(value: Any, what: str) -> Any:
    if value is None:
        raise RuntimeError(f"there is no {what} yet: it exists while pretrain() runs")
    return value


# The ids of a run: those of its tokenizer's text, and those that its family puts behind them.


def with_tokenizer(config: Config) -> tuple[Any, Config]:
    """Return the tokenizer, where one is named, and the configuration with its vocabulary."""
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
    choose_eod(tokenizer, config)
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
    """Return the ids that samples of the family hold: ``vocab_size`` counts them all."""
    has_own = has_part(config.family, "data")
    return load(config.family, "data").special_tokens(tokenizer, config) if has_own else tokenizer
