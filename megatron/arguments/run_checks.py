"""Checks of debugging, logging and stability settings that need more than one section of the configuration."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config.debug import DEBUG_IN_TRAINING, DUMP_ONLY
from megatron.config.logging import LOGGING_IN_TRAINING, TRACKERS

if TYPE_CHECKING:
    from megatron.config.config import Config


def debug_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each debugging flag that has no effect or excludes another flag."""
    debug = config.debug
    flags = [_flag(name) for name in DUMP_ONLY if name in config.explicit_fields]
    if flags and debug.debug_dump is None:
        yield f"{', '.join(flags)} has no effect without --debug-dump. Add --debug-dump FOLDER, or remove it"
    if debug.debug_nan and config.stability.is_guarded:
        yield (
            f"--debug-nan ends the run at the first NaN, but --stability-guard {config.stability.stability_guard} "
            "continues after it. Remove one of them; --debug-dump also names the module and works with the guard"
        )
    yield from _dump_step_problems(config)
    flags = [_flag(name) for name in DEBUG_IN_TRAINING if name in config.explicit_fields]
    if flags and config.checkpoint.eval_only:
        yield f"{', '.join(flags)} applies to training only, got --eval-only. Remove one of them"
    if debug.is_enabled and config.parallel.compile:
        yield (
            f"{'--debug-dump' if debug.debug_dump else '--debug-nan'} inspects the modules within layers, which "
            "compiled layers do not have, got --compile. Remove one of them"
        )


def _may_be_longer(config: Config) -> bool:
    """Return True if the last step also depends on the samples consumed by earlier starts of this run."""
    is_continued = bool(config.checkpoint.load or config.checkpoint.resume) and not config.checkpoint.finetune
    return is_continued and (config.batch.train_samples is not None or config.batch.train_tokens is not None)


def _dump_step_problems(config: Config) -> Iterator[str]:
    """Yield an error message if the run ends before the first step to dump."""
    debug, last = config.debug, config.batch.train_iters
    if debug.debug_dump is None or _may_be_longer(config) or any(True for _ in debug.problems()):
        return
    first = min(steps.start for steps in debug.steps())
    if first > last:
        yield (
            f"--debug-dump-steps must name a step of the run, got {debug.debug_dump_steps} and --train-iters {last}: "
            "nothing would be written. Name earlier steps, or raise --train-iters"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def logging_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each logging flag that has no effect, excludes another flag, or lacks a package."""
    logging_config = config.logging
    for field, (package, extra, dependent_fields) in TRACKERS.items():
        is_enabled = getattr(logging_config, field) is not None
        flags = [_flag(name) for name in dependent_fields if name in config.explicit_fields]
        if flags and not is_enabled:
            yield f"{', '.join(flags)} has no effect without {_flag(field)}. Add {_flag(field)}, or remove it"
        # Only rank 0 imports the package.
        if is_enabled and package and os.environ.get("RANK", "0") == "0" and not _is_installed(package):
            yield (
                f"{_flag(field)} needs the package {package}, which is not installed. Run pip install -e '.[{extra}]' "
                f"or pip install {package}, or remove the flag: metrics.jsonl and TensorBoard's files are always "
                "written"
            )
    flags = [_flag(name) for name in LOGGING_IN_TRAINING if name in config.explicit_fields]
    if flags and config.checkpoint.eval_only:
        yield f"{', '.join(flags)} applies to training only, got --eval-only. Remove one of them"
    if logging_config.log_document_losses and (config.data.is_mock or config.data.is_script_data):
        yield (
            "--log-document-losses needs documents of token files or conversations, got --data-path "
            f"{config.data.data_path}. Remove one of them"
        )
    parallel = config.parallel
    split_by = {
        "--sequence-parallel": parallel.sequence_parallel,
        "--context-parallel-size": parallel.context_parallel_size > 1,
    }
    for flag in (name for name, is_split in split_by.items() if is_split and logging_config.sample_prompts):
        yield (
            f"--sample-prompts generates one token at a time, which {flag} cannot split over the ranks. Remove "
            "--sample-prompts, and use tools/generate.py on the run's checkpoint"
        )
    if not logging_config.prompt_bos and logging_config.sample_prompts is None and logging_config.eval_tasks is None:
        yield "--no-prompt-bos has no effect without --sample-prompts or --eval-tasks. Remove it, or add one of them"
    yield from _task_problems(config)
    yield from _profile_step_problems(config)


def _task_problems(config: Config) -> Iterator[str]:
    logging_config = config.logging
    if logging_config.eval_tasks is None:
        if "eval_tasks_interval" in config.explicit_fields:
            yield (
                "--eval-tasks-interval has no effect without --eval-tasks FILE. Add --eval-tasks, or remove the "
                "interval"
            )
        return
    if not os.path.isfile(logging_config.eval_tasks):
        yield f"--eval-tasks must name a file of tasks, got {logging_config.eval_tasks}, which is not a file"
    if os.environ.get("RANK", "0") == "0" and not _is_installed("lm_eval"):  # only rank 0 imports it
        yield (
            "--eval-tasks needs the package lm_eval, which is not installed. Run pip install -e '.[eval]', or remove "
            "the flag and evaluate the run's checkpoints with tools/evaluate.py on another machine"
        )
    if config.parallel.context_parallel_size > 1:
        yield (
            "--eval-tasks evaluates texts of any length, which --context-parallel-size cannot split over the ranks. "
            "Remove --eval-tasks, and use tools/evaluate.py on the run's checkpoint"
        )


def _profile_step_problems(config: Config) -> Iterator[str]:
    """Yield an error message if the run ends before the last step to profile."""
    logging_config, last = config.logging, config.batch.train_iters
    if logging_config.profile is None or _may_be_longer(config) or any(True for _ in logging_config.problems()):
        return
    if logging_config.profiled_steps()[-1] > last:
        yield (
            f"--profile must name steps of the run, got {logging_config.profile} and --train-iters {last}. Name "
            "earlier steps, or raise --train-iters"
        )


def _is_installed(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


def stability_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each stability flag that has no effect or needs another flag."""
    stability, checkpoint = config.stability, config.checkpoint
    if "stability_patience" in config.explicit_fields and not stability.is_guarded:
        yield (
            "--stability-patience has no effect without --stability-guard skip or rollback, got --stability-guard "
            "off. Remove it, or add --stability-guard"
        )
    has_saves = checkpoint.save_interval or checkpoint.minutes
    if stability.rolls_back and not has_saves and not checkpoint.eval_only:
        yield (
            "--stability-guard rollback needs a checkpoint of this run, got --save-interval-minutes 0, so that none "
            "is saved before the end. Add --save-interval N, or use --stability-guard skip"
        )


def stability_notes(config: Config, world_size: int) -> Iterator[str]:
    """Yield a note for each stability flag that is accepted although it has no effect."""
    if "drift_interval" in config.explicit_fields and config.stability.drift_interval and world_size == 1:
        yield "--drift-interval has no effect on one rank: there are no copies to compare"
