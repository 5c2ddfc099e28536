"""Settings of the data that would have no effect, and paths that a run will miss; as ``effects``, which calls it."""

from __future__ import annotations

from collections.abc import Iterator

from megatron import mixtures
from megatron.config.config import Config
from megatron.config.data import EACH, OWN_DATA, PATHS

OF_TOKEN_FILES = ("split", "split_by", "data_impl", "data_cache_path", "packing", "fim_rate", "fim_spm_rate")
"""Fields that act where token files are read, not the data that a script brings itself."""


def data_problems(config: Config) -> Iterator[str]:
    """Yield what was given and cannot act, and the paths that are missing beside others."""
    given, data = config.given, config.data
    yield from _path_problems(config)
    named = [*_flags(config, OF_TOKEN_FILES), *_flags(config, ("mixture_schedule",))]
    if named and data.is_own:
        yield f"{', '.join(named)} acts on token files only, got --data-path {OWN_DATA}. Leave it out, or give a path"
    elif "mixture_schedule" in given and data.training_path is None:
        yield (
            "--mixture-schedule changes the weights of several corpora, got no --data-path. Leave it out, or give "
            "several as 0.7 a 0.3 b"
        )
    if "prefetch_factor" in given and not data.num_workers:
        yield "--prefetch-factor acts with --num-workers 1 or more, got 0. Leave it out, or add --num-workers"
    if "fim_spm_rate" in given and not data.fim_rate:
        yield "--fim-spm-rate acts with --fim-rate above 0 only. Leave it out, or add --fim-rate"
    checkpoint = config.checkpoint
    anew = "--finetune" if checkpoint.finetune else "--eval-only" if checkpoint.eval_only else None
    if checkpoint.allow_data_change and anew:
        yield (
            "--allow-data-change acts where the samples of a checkpoint go on, got "
            f"{anew}, which reads none of them. Leave it out"
        )


def data_notes(config: Config, world_size: int) -> Iterator[str]:
    """Yield what scripts pass for several runs and has no effect in this one."""
    data, reads = config.data, splits_read(config)
    unread = [flag for name, flag in PATHS.items() if name in config.given and not reads.get(name, True)]
    if unread:
        yield f"{', '.join(unread)} has no effect: this run reads no such split"
    if data.mixture_schedule is not None and data.training_path is not None and not config.checkpoint.eval_only:
        yield from _late_step_notes(config, world_size)


def splits_read(config: Config) -> dict[str, bool]:
    """Return for each of --train-data-path, --valid-data-path, --test-data-path (as fields) whether it will be read."""
    batch, eval_only = config.batch, config.checkpoint.eval_only
    trains, evaluates = batch.train_iters > 0 and not eval_only, batch.eval_iters > 0
    validates = evaluates and batch.eval_interval > 0 and not eval_only
    return dict(zip(EACH, (trains, validates, evaluates), strict=True))


def _path_problems(config: Config) -> Iterator[str]:
    data, named = config.data, _flags(config, ("split", "split_by"))
    each = [name for name in EACH if getattr(data, name) is not None]
    if not each or data.data_path is not None:
        return
    if named:
        yield (
            f"{', '.join(named)} acts on --data-path only, got a path for each split. Leave it out, or give --data-path"
        )
    missing = [PATHS[name] for name, is_read in splits_read(config).items() if is_read and name not in each]
    if missing:
        off = "" if missing == [PATHS["train_data_path"]] else ", or turn off what reads it (--eval-iters 0)"
        got, them = ", ".join(PATHS[name] for name in each), "them" if len(missing) > 1 else "it"
        yield (
            f"each split that is read must have its path, got {got} without {' and '.join(missing)}. "
            f"Give {them} too{off}, or give --data-path, which --split cuts into three"
        )


def _late_step_notes(config: Config, world_size: int) -> Iterator[str]:
    data, parallel = config.data, config.parallel
    sizes = config.batch.sizes(world_size // (parallel.model_parallel_size * parallel.num_stages))
    samples, each = sizes.consumed_after(config.batch.train_iters), config.tokens_per_sample
    steps = mixtures.parse_schedule(data.mixture_schedule or "", len(mixtures.parse_paths(data.training_path or "")))
    late = [str(tokens) for tokens, _ in steps if -(-tokens // each) >= samples]
    if late:
        yield (
            f"--mixture-schedule: the run ends after {samples * each} tokens, so the weights from {', '.join(late)} on "
            "have no effect"
        )


def _flags(config: Config, names: tuple[str, ...]) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name in names if name in config.given]
