"""RunConfig, StabilityConfig, LoggingConfig (layer norms, W&B, profiler), DebugConfig (dumps, NaN search)."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.option import option, steps_of

if TYPE_CHECKING:
    from megatron.config.config import Config

# The run itself: seed, what is said and when it ends.


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Seed, log, early ends, and DeepSpeed's JSON."""

    seed: int = option(1234, "seed of weights, data order and dropout", minimum=0, short="seed of the run")
    deterministic: bool = option(
        False,
        "on CUDA: take kernels that add in the same order every time, slower, so that a run resumes bit for bit; on a "
        "CPU it does so anyway",
        aliases=("--deterministic-mode",),
    )
    log_interval: int = option(
        10,
        "steps between progress lines; 0: the first and the last step only",
        minimum=0,
        short="steps between log lines",
    )
    exit_interval: int = option(
        0, "save and stop when the step is a multiple of this; 0: never", minimum=0, shown_default="never"
    )
    kill_switch_path: str | None = option(
        None,
        "save and stop after the step at whose end this file is there",
        aliases=("--kill-switch-file",),
        shown_default="none",
    )
    exit_duration_in_mins: float = option(0.0, "save and stop after so many minutes", above=0, shown_default="never")
    tensorboard_dir: str | None = option(None, "folder of TensorBoard events", shown_default="in the run folder")
    deepspeed_config: str | None = option(
        None,
        "DeepSpeed's JSON file",
        flag="--deepspeed_config",
        aliases=("--deepspeed-config", "--deepscale_config"),
        short="DeepSpeed's JSON file",
    )
    config: str | None = option(
        None,
        "YAML, TOML or JSON file with flags, whose keys are their names; the config.json of a run folder repeats it",
        short="YAML, TOML or JSON file with flags",
    )
    strict_flags: bool = option(
        False, "reject ignored flags and keys of other trainers instead of listing them in the start table"
    )
    ignore_unknown_flags: bool = option(
        False,
        "drop unknown flags and keys of --config with a warning that names the nearest known flag, misspelt flags "
        "included; without it they are errors",
    )
    verbose_deepspeed: bool = option(False, "let DeepSpeed's own messages through")
    dry_run: bool = option(
        False,
        "print the start table and stop, without starting processes or reading data",
        short="print the start table and stop",
    )
    check_paths: bool = option(
        False,
        "with --dry-run: end with code 2 if this machine lacks data files, the folder of --load, memory or the device; "
        "without it they are warnings",
    )
    progress: str = option("auto", "how progress is shown", choices=("auto", "bar", "plain"))
    local_rank: int | None = option(
        None,
        "device index on this node, as launchers pass it; must agree with LOCAL_RANK",
        flag="--local_rank",
        aliases=("--local-rank",),
        minimum=0,
        shown_default="LOCAL_RANK",
    )

    def problems(self) -> Iterator[str]:
        """Yield the problems of this section."""
        if self.strict_flags and self.ignore_unknown_flags:
            yield "--strict-flags and --ignore-unknown-flags exclude each other. Leave one of them out"
        if self.kill_switch_path is not None and not self.dry_run and os.path.exists(self.kill_switch_path):
            yield (
                f"--kill-switch-path must name a file that is not there yet, got {self.kill_switch_path}, which is. "
                "Remove it to start"
            )


# What a run writes down of its own tensors, for comparing it with another one, and the search for the first NaN.

STEPS = "1-3"
DUMP_ONLY = ("debug_dump_steps", "debug_dump_modules", "debug_dump_tensors")
"""Fields that act with --debug-dump only."""
DEBUG_IN_TRAINING = ("debug_dump", "debug_nan")


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """The dump of tensors' statistics, and the check for numbers that are not finite."""

    debug_dump: str | None = option(
        None,
        "folder for the statistics of each module's inputs, outputs and their gradients, of weights and of their "
        "gradients, by rank, step and micro-batch; tools/compare_dumps.py compares two such folders",
    )
    debug_dump_steps: str = option(STEPS, "steps that --debug-dump writes, counted from 1, as 1-3,10")
    debug_dump_modules: str = option(
        "", "modules and parameters that --debug-dump writes: a regular expression, searched in their names",
        shown_default="all",
    )  # fmt: skip
    debug_dump_tensors: bool = option(False, "--debug-dump also writes the tensors themselves")
    debug_nan: bool = option(
        False,
        "look for NaN and infinity in each module's inputs, outputs and their gradients, at every step; the first one "
        "ends the run ahead of the update and names the module that made it",
    )

    @property
    def is_on(self) -> bool:
        """True where anything is to be looked at."""
        return self.debug_dump is not None or self.debug_nan

    def steps(self) -> list[range]:
        """Return the steps to dump, as ranges.

        Raises:
            ValueError: the text names none, or not whole numbers from 1 on.
        """
        return [steps_of(word) for word in self.debug_dump_steps.split(",")]

    def wanted(self) -> re.Pattern[str]:
        """Return the pattern of the names to dump.

        Raises:
            re.error: it cannot be read.
        """
        return re.compile(self.debug_dump_modules)

    def problems(self) -> Iterator[str]:
        """Yield what cannot be read."""
        try:
            self.steps()
        except ValueError:
            yield (
                "--debug-dump-steps must be steps from 1 on and ranges of them, joined by commas, as 1-3,10; got "
                f"{self.debug_dump_steps!r}"
            )
        try:
            self.wanted()
        except re.error as error:
            yield f"--debug-dump-modules must be a regular expression, got {self.debug_dump_modules!r} ({error})"


def debug_problems(config: Config) -> Iterator[str]:
    """Yield what cannot act, or cannot work with another flag."""
    debug = config.debug
    if config.parallel.overlaps_passes and (debug.debug_dump is not None or debug.debug_nan):
        yield (
            "--debug-dump and --debug-nan look at one pass at a time, got --overlap-forward-backward "
            "(--overlap-moe-expert-parallel-comm) too. Leave it out meanwhile: the numbers are the same"
        )
    named = [_flag(name) for name in DUMP_ONLY if name in config.given]
    if named and debug.debug_dump is None:
        yield f"{', '.join(named)} acts with --debug-dump only. Add --debug-dump FOLDER, or leave it out"
    if debug.debug_nan and config.stability.is_guarded:
        yield (
            f"--debug-nan ends the run at the first NaN, --stability-guard {config.stability.stability_guard} goes on "
            "behind it. Leave one of them out; --debug-dump names the module, too, and lets the guard go on"
        )
    yield from _dumped_beyond_run(config)
    named = [_flag(name) for name in DEBUG_IN_TRAINING if name in config.given]
    if named and config.checkpoint.eval_only:
        yield f"{', '.join(named)} acts in training only, got --eval-only. Leave one out"
    if debug.is_on and config.parallel.compile:
        yield (
            f"{'--debug-dump' if debug.debug_dump else '--debug-nan'} looks into layers, and compiled ones have no "
            "modules within, got --compile. Leave one of them out"
        )


def _may_be_longer(config: Config) -> bool:
    """Return True if the last step also depends on the samples that an earlier start has consumed."""
    is_continued = bool(config.checkpoint.load or config.checkpoint.resume) and not config.checkpoint.finetune
    return is_continued and (config.batch.train_samples is not None or config.batch.train_tokens is not None)


def _dumped_beyond_run(config: Config) -> Iterator[str]:
    """Yield that the run has none of the steps to dump."""
    debug, last = config.debug, config.batch.train_iters
    if debug.debug_dump is None or _may_be_longer(config) or any(True for _ in debug.problems()):
        return
    first = min(steps.start for steps in debug.steps())
    if first > last:
        yield (
            f"--debug-dump-steps must name a step of the run, got {debug.debug_dump_steps} and --train-iters {last}: "
            "nothing would be written. Name earlier steps, or train for longer"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# What a run shows beside its log line: norms by layer, Weights & Biases, and the profile of some steps.

PROFILE_ALONE = "11-12"
"""Of --profile alone, as Megatron-LM has it."""
WANDB_ONLY = ("wandb_exp_name", "wandb_save_dir", "wandb_entity")
"""Fields that act with --wandb-project only."""
LOGGING_IN_TRAINING = ("log_layer_norms", "profile", "eval_tasks")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Metrics on request, and the profiler."""

    log_layer_norms: bool = option(
        False, "record the norm of the gradients of each layer, too, at the steps of --log-interval"
    )
    sample_prompts: str | None = option(
        None,
        "texts from which the model goes on when the training is done, each in quotes, to be read on the screen; T5 "
        "fills the gaps <extra_id_0>, <extra_id_1> ... of each",
        join=shlex.join,
        short="texts to go on from at the end",
    )
    prompt_bos: bool = option(
        True,
        "start --sample-prompts and the contexts of --eval-tasks with the bos_token where the tokenizer adds one",
        flag="",
        constants={"--no-prompt-bos": False},
    )
    eval_tasks: str | None = option(
        None,
        "a file (YAML) that names tasks of lm_eval, evaluated on the model in training at the end and every "
        "--eval-tasks-interval steps: tasks, include_path (own task files), num_fewshot, limit",
    )
    eval_tasks_interval: int = option(
        0, "with --eval-tasks: steps between evaluations; 0: at the end of the training alone", minimum=0
    )
    wandb_project: str | None = option(
        None,
        "send the metrics to this project of Weights & Biases; WANDB_MODE=offline writes them to a folder",
        short="send metrics to Weights & Biases",
    )
    wandb_exp_name: str | None = option(
        None, "name of the run there", aliases=("--wandb-name",), shown_default="the run folder's"
    )
    wandb_save_dir: str | None = option(None, "folder of wandb's own files", shown_default="in the run folder")
    wandb_entity: str | None = option(None, "team or user that the project is of", shown_default="wandb's own")
    profile: str | None = option(
        None,
        "record these steps, counted from 1, as 5-7 or 5, with torch's profiler: a trace of each rank for Perfetto and "
        "a table of the operators that take longest, in RUN/profile",
        alone=PROFILE_ALONE,
    )

    def profiled(self) -> range:
        """Return the steps to profile.

        Raises:
            ValueError: the text names none, or not whole numbers from 1 on.
        """
        return steps_of(self.profile) if self.profile is not None else range(0)

    def problems(self) -> Iterator[str]:
        """Yield what cannot be read."""
        try:
            self.profiled()
        except ValueError:
            yield f"--profile must be a step from 1 on or a range of steps, as 5-7; got {self.profile!r}"


def logging_problems(config: Config) -> Iterator[str]:
    """Yield what cannot act, or cannot work here."""
    seeing = config.seeing
    named = [_flag(name) for name in WANDB_ONLY if name in config.given]
    if named and not seeing.wandb_project:
        yield f"{', '.join(named)} acts with --wandb-project only. Add --wandb-project NAME, or leave it out"
    if seeing.wandb_project and os.environ.get("RANK", "0") == "0" and not _has("wandb"):  # which alone imports it
        yield (
            "--wandb-project needs the package wandb, which is not installed here. Run pip install "
            "-e '.[wandb]' or pip install wandb, or leave the flag out: metrics.jsonl and TensorBoard's files "
            "are written anyway"
        )
    named = [_flag(name) for name in LOGGING_IN_TRAINING if name in config.given]
    if named and config.checkpoint.eval_only:
        yield f"{', '.join(named)} acts in training only, got --eval-only. Leave one out"
    parallel = config.parallel
    cut_by = {
        "--sequence-parallel": parallel.sequence_parallel,
        "--context-parallel-size": parallel.context_parallel_size > 1,
    }
    for flag in (name for name, cuts in cut_by.items() if cuts and seeing.sample_prompts):
        yield (
            f"--sample-prompts reads one new token at a time, which {flag} cannot cut over the ranks. Leave the "
            "prompts out, and use tools/generate.py on the run's checkpoint"
        )
    if not seeing.prompt_bos and seeing.sample_prompts is None and seeing.eval_tasks is None:
        yield "--no-prompt-bos has no effect without --sample-prompts or --eval-tasks. Add one, or leave it out"
    yield from _task_problems(config)
    yield from _profiled_beyond_run(config)


def _task_problems(config: Config) -> Iterator[str]:
    """Yield why tasks cannot be evaluated in this run."""
    seeing = config.seeing
    if seeing.eval_tasks is None:
        if "eval_tasks_interval" in config.given:
            yield "--eval-tasks-interval acts with --eval-tasks FILE only. Add it, or leave the interval out"
        return
    if not os.path.isfile(seeing.eval_tasks):
        yield f"--eval-tasks must be a file that names tasks, got {seeing.eval_tasks}, which is none"
    if os.environ.get("RANK", "0") == "0" and not _has("lm_eval"):  # which alone imports it
        yield (
            "--eval-tasks needs the package lm_eval, which is not installed here. Run pip install -e '.[eval]', or "
            "leave the flag out and evaluate the run's checkpoints with tools/evaluate.py elsewhere"
        )
    if config.parallel.context_parallel_size > 1:
        yield (
            "--eval-tasks reads texts of any length, which --context-parallel-size cannot cut over the ranks. Leave "
            "the tasks out, and use tools/evaluate.py on the run's checkpoint"
        )


def _profiled_beyond_run(config: Config) -> Iterator[str]:
    """Yield that the run has not all of the steps to profile."""
    seeing, last = config.seeing, config.batch.train_iters
    if seeing.profile is None or _may_be_longer(config) or any(True for _ in seeing.problems()):
        return
    if seeing.profiled()[-1] > last:
        yield (
            f"--profile must name steps of the run, got {seeing.profile} and --train-iters {last}. Name earlier steps, "
            "or train for longer"
        )


def _has(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


# What a run does about steps whose numbers are wrong, and how it looks for copies of weights that have drifted.

GUARDS = ("off", "skip", "rollback")
DRIFT_INTERVAL = 100


@dataclass(frozen=True, kw_only=True)
class StabilityConfig:
    """The guard against bad steps, and the comparison of copies."""

    stability_guard: str = option(
        "off",
        "what is done about a step whose loss or gradient norm is not finite or far above the steps before it: off "
        "ends the run (not finite) or only says so (far above); skip leaves the step out on all ranks; rollback does "
        "so too, and after --stability-patience in a row goes back to a good checkpoint and leaves their data out",
        choices=GUARDS,
    )
    stability_sigma: float = option(
        6.0, "standard deviations above the mean of the last steps from which a loss or norm is far above", above=0
    )
    stability_window: int = option(128, "good steps that count as the last ones; half of them must be there", minimum=4)
    stability_patience: int = option(
        5, "bad steps in a row after which --stability-guard skip ends the run and rollback goes back", minimum=1
    )
    drift_interval: int = option(
        DRIFT_INTERVAL,
        "steps between comparisons of all copies of each weight on replicas, tensor ranks and stages; 0: never",
        minimum=0,
        aliases=("--check-weight-hash-across-dp-replicas-interval",),
    )

    @property
    def is_guarded(self) -> bool:
        """True where bad steps are skipped."""
        return self.stability_guard != "off"

    @property
    def goes_back(self) -> bool:
        """True where bad steps in a row lead back to a checkpoint."""
        return self.stability_guard == "rollback"


def stability_problems(config: Config) -> Iterator[str]:
    """Yield what cannot act, or cannot work without another flag."""
    stability, checkpoint = config.stability, config.checkpoint
    if "stability_patience" in config.given and not stability.is_guarded:
        yield (
            "--stability-patience acts with --stability-guard skip or rollback only, got --stability-guard off. Leave "
            "it out, or add --stability-guard"
        )
    has_saves = checkpoint.save_interval or checkpoint.minutes
    if stability.goes_back and not has_saves and not checkpoint.eval_only:
        yield (
            "--stability-guard rollback goes back to a checkpoint of this run, got --save-interval-minutes 0: there is "
            "none before the end. Add --save-interval N, or use --stability-guard skip"
        )


def stability_notes(config: Config, world_size: int) -> Iterator[str]:
    """Yield what was given, cannot act, and does no harm."""
    if "drift_interval" in config.given and config.stability.drift_interval and world_size == 1:
        yield "--drift-interval has no effect on one rank: there are no copies to compare"
