"""Defaults for data, tokenizer and split with --resume or --load: the continued run's settings.

No torch. The run scripts call ``python -m megatron.checkpoint.run_data NAME FLAGS`` to find out whether the continued
run uses the user's data or the sample data.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.arguments import config_file, script_defaults
from megatron.arguments.flag_values import family_options, scan
from megatron.arguments.model_choice import choose_model
from megatron.arguments.scan import Scan
from megatron.checkpoint import former, remote
from megatron.checkpoint.checkpoint_args import find_source
from megatron.checkpoint.manifest import newest_metadata
from megatron.config.data import DataConfig
from megatron.config.option import is_derived, options_of
from megatron.errors import JobError, marked
from megatron.models.registry import FAMILIES

CORPUS_FIELDS = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "sft", "valid_sft")
FIELD_GROUPS = (
    CORPUS_FIELDS,
    ("tokenizer_type", "tokenizer_path", "vocab_file", "merge_file"),
    ("enc_seq_length", "dec_seq_length", "noise_density", "mean_span_length", "denoisers"),
)
"""Groups of related fields: if the user sets one field of a group, no field of the group is taken from the run."""
HOST_FIELDS = (
    "data_impl", "data_cache_path", "object_storage_cache_path", "object_storage_cache_gb", "num_workers",
    "prefetch_factor",
)  # fmt: skip
"""Fields of ``DataConfig`` that control how this host reads the data, not which data is read."""
SAMPLE_FIELDS = ("seq_length", "seed", "vocab_extra_ids", "mask_prob", "whole_word_masking", "short_seq_prob")
"""Fields of other sections that determine the samples of a corpus."""
DATA_FIELDS = frozenset(
    [option.name for option in options_of(DataConfig) if option.name not in HOST_FIELDS]
    + [name for group in FIELD_GROUPS for name in group]
    + [*SAMPLE_FIELDS]
)
SAMPLE_DATA = ("data", "sample", "gpt2_text_document")
"""Last components of the path of the run scripts' sample data."""


@marked(is_of_this_rank=False)
def load_data_args(scanned: Scan, defaults: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Read the data settings of the continued or evaluated run as field -> value.

    The result has only fields that the user does not set. They override ``defaults``; a line is added to
    ``scanned.notes`` that lists the differing values. Fine-tuning starts a new run, so it takes no settings.

    Args:
        scanned: values from the command line and --config.
        defaults: field -> value of the run script's recipe.
        name: run name, for --resume.

    Raises:
        DataError: an object store cannot be read.
    """
    flags = {**defaults, **scanned.values}
    path = None if flags.get("finetune") else find_source(flags, name)
    saved = None if path is None else read_data_settings(path)
    if path is None or saved is None:
        return {}
    options = {option.name: option for option in family_options(scanned.family)}
    excluded = {field for group in FIELD_GROUPS for field in group if any(member in scanned.values for member in group)}
    inherited = {
        field: value
        for field, value in saved.items()
        if field in options and field not in scanned.values and field not in excluded
    }
    for field in ("data_path", "tokenizer_path"):
        if field in inherited and _is_moved(inherited[field], defaults.get(field)):
            inherited[field] = defaults[field]
    changed = {}
    for field, value in inherited.items():
        default = defaults.get(field, options[field].default)
        if value != default and not is_derived(options[field], default):  # the user did not set a derived length
            changed[field] = value
    if changed:
        words = [word for field, value in changed.items() for word in _flag_words(options[field].flag, value)]
        scanned.notes.append(f"data settings of {path}: {shlex.join(words)}")
    return inherited


def read_data_settings(path: Path | str) -> dict[str, Any] | None:
    """Read the data settings in a run's newest checkpoint as field -> value; None without a checkpoint.

    Args:
        path: a run folder, its checkpoint folder, a checkpoint, or a run's address in an object store.
    """
    newest = newest_metadata(path) if isinstance(path, Path) else remote.newest_metadata(path)
    config = None if newest is None else newest[1].get("config")
    if not isinstance(config, dict):
        return None
    sections = {
        name: values for name, values in former.convert_settings(config).items() if name not in ("deepspeed", "extra")
    }
    flat = {name: value for values in sections.values() if isinstance(values, dict) for name, value in values.items()}
    return {name: flat[name] for name in flat if name in DATA_FIELDS}


def uses_custom_data(name: str, words: list[str], env: Mapping[str, str]) -> bool:
    """Check if the flags ``words`` continue a run whose data are not the sample data.

    Args:
        name: the run's name, such as gpt2. If ``--model`` selects another family, that family's name is used instead.
        words: the training program's flags.
        env: environment variables, including MEGATRON_DEFAULTS.
    """
    program = name if name in FAMILIES else "gpt2"
    choice = choose_model(words, env, program)
    name = name if choice.family == program else choice.family
    scanned = scan(words, (), choice.family)
    config_file.merge_config_file(scanned)
    flags = {**script_defaults.environment_defaults(env, scanned, (), choice.recipe), **scanned.values}
    path = None if flags.get("finetune") else find_source(flags, name)
    saved = None if path is None else read_data_settings(path)
    corpora = [saved[field] for field in CORPUS_FIELDS if saved.get(field)] if saved else []
    return bool(corpora) and not all(_is_sample(path) for path in corpora)


def _is_sample(path: str) -> bool:
    return Path(path.strip("'\"")).parts[-len(SAMPLE_DATA) :] == SAMPLE_DATA


def _is_moved(saved_path: object, default_path: object) -> bool:
    """Return True if ``saved_path`` is missing, and ``default_path`` is the same sample data file in this checkout."""
    if not isinstance(saved_path, str) or not isinstance(default_path, str):
        return False
    old, new = Path(saved_path.strip("'\"")), Path(default_path.strip("'\""))
    is_same = old.parts[-3:] == new.parts[-3:] and old.parts[-3:-1] == SAMPLE_DATA[:2]
    return is_same and not any(old.parent.glob(f"{old.name}*"))


def _flag_words(flag: str, value: Any) -> Iterator[str]:
    """Generate the command-line words that set a flag; none for an unset value."""
    if value is True:
        yield flag
    elif value is not None and value is not False:
        yield from (flag, str(value))


if __name__ == "__main__":
    try:
        is_custom_data = uses_custom_data(sys.argv[1], sys.argv[2:], os.environ)
    except JobError:
        is_custom_data = False  # the training program reports the error
    if is_custom_data:
        sys.stdout.write("own\n")
