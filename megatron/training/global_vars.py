"""Global access for scripts: get_args, get_config, get_tokenizer, get_streams.

Only scripts and this package use these functions; lower layers receive the values as arguments.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron import object_store
from megatron.arguments.messages import with_variables
from megatron.config import Config
from megatron.errors import DataError

if TYPE_CHECKING:
    from megatron.data import BlendPaths
    from megatron.data.text_corpus import TextSettings


@dataclass
class _Current:
    config: Config | None = None
    tokenizer: Any = None
    streams: Any = None
    args: argparse.Namespace | None = None
    extra: dict[str, Any] = field(default_factory=dict)


_current = _Current()


def set_current(config: Config, tokenizer: Any, streams: Any) -> None:
    """Set the values that the ``get_*`` functions return."""
    _current.config, _current.tokenizer, _current.streams = config, tokenizer, streams
    _current.args = config.namespace()


def get_args() -> argparse.Namespace:
    """Return all flags as a flat namespace with the names that Megatron and CPM scripts use."""
    return _require(_current.args, "namespace of arguments")


def get_config() -> Config:
    """Return the configuration, structured by concern."""
    return _require(_current.config, "configuration")


def get_data_paths() -> BlendPaths:
    """Return corpora by split, and the settings for reading them."""
    from megatron.data import BlendPaths  # imports numpy, which --help does not need

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
        order=settings.data_order,
        surplus=settings.mid_level_dataset_surplus,
        exclude=settings.exclude,
        text=_text_settings(get_config()) if settings.text_corpora else None,
        shuffle_window=settings.shuffle_window,
    )


def _text_settings(config: Config) -> TextSettings:
    """Return how text corpora in --data-path are encoded.

    The token files are in --data-cache-path, otherwise in a folder next to the run folder, which all hosts share.
    """
    from megatron.data.text_corpus import TextSettings  # imports numpy, which --help does not need

    settings, tokenizer = config.data, _current.tokenizer
    run_folder = config.checkpoint.save or config.checkpoint.load
    next_to_run = Path(run_folder).parent if run_folder and not object_store.is_remote(run_folder) else Path("runs")
    arguments = None
    if tokenizer is not None and settings.tokenizer_type != "NullTokenizer":
        arguments = {
            "tokenizer_type": settings.tokenizer_type,
            "vocab_file": settings.vocab_file,
            "merge_file": settings.merge_file,
            "tokenizer_path": settings.tokenizer_path,
            "eod_token": tokenizer.eod_name,
        }
    return TextSettings(
        cache_folder=(Path(settings.data_cache_path) if settings.data_cache_path else next_to_run) / "encoded-text",
        tokenizer=arguments,
        identity="" if arguments is None else tokenizer.identity,
        json_keys=(settings.json_key,),
        max_bad_lines=settings.max_bad_lines,
        num_workers=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def get_tokenizer() -> Any:
    """Return the tokenizer.

    Raises:
        DataError: the run has none.
    """
    if _current.tokenizer is None and _current.config is not None:
        raise DataError(missing_tokenizer(_current.config))
    return _require(_current.tokenizer, "tokenizer")


def current_tokenizer() -> Any:
    """Return the tokenizer, or None if the run has none."""
    return _current.tokenizer


def missing_tokenizer(config: Config) -> str:
    """Return the error message for a script that needs a tokenizer when no flag names one."""
    if config.data.is_mock:
        size = config.model.vocab_size or "N"
        return (
            "--data-path mock needs a vocabulary, got no tokenizer. Add --tokenizer-type NullTokenizer --vocab-size "
            f"{size}, or name a tokenizer with --tokenizer-path"
        )
    problem = (
        "this script needs a tokenizer, got no --tokenizer-path and no --vocab-file. Set --tokenizer-path to the "
        "tokenizer of the data; tools/train_tokenizer.py trains one"
    )
    return with_variables([problem], os.environ)[0]


def get_chat_template() -> Any:
    """Return the chat template that --sft renders conversations with.

    Raises:
        DataError: the run has no tokenizer or no template, or it cannot be read.
    """
    from megatron.tokenizer.chat import find_template  # importing jinja2 takes 0.1 s; only --sft needs it

    return find_template(get_tokenizer(), get_config().data.chat_template)


def get_streams() -> Any:
    """Return this rank's source of dropout masks."""
    return _require(_current.streams, "source of dropout masks")


def _require(value: Any, description: str) -> Any:
    if value is None:
        raise RuntimeError(f"there is no {description} yet: it exists only while pretrain() runs")
    return value
