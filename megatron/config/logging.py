"""LoggingConfig: layer norms, Weights & Biases, text samples, tasks, profiler."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.option import option, parse_steps

if TYPE_CHECKING:
    pass


DEFAULT_PROFILE_STEPS = "11-12"
"""Steps of --profile without a value, as in Megatron-LM."""
WANDB_ONLY = ("wandb_exp_name", "wandb_save_dir", "wandb_entity")
"""Fields that take effect with --wandb-project only."""
LOGGING_IN_TRAINING = ("log_layer_norms", "log_max_attention_logit", "profile", "eval_tasks")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Optional metrics, and the profiler."""

    log_layer_norms: bool = option(False, "also log the gradient norm of each layer at the steps of --log-interval")
    sample_prompts: str | None = option(
        None,
        "prompts, each in quotes, that the model continues at the end of training, printed to the console; T5 "
        "fills the gaps <extra_id_0>, <extra_id_1> ... of each",
        join=shlex.join,
        short="prompts to continue at the end",
    )
    prompt_bos: bool = option(
        True,
        "do not start --sample-prompts and the contexts of --eval-tasks with bos_token, even if the tokenizer adds it",
        flag="",
        constants={"--no-prompt-bos": False},
    )
    eval_tasks: str | None = option(
        None,
        "YAML file with lm_eval tasks to evaluate during training every --eval-tasks-interval steps and at the "
        "end: tasks, include_path (own task files), num_fewshot, limit",
    )
    eval_tasks_interval: int = option(0, "with --eval-tasks: steps between evaluations; 0: only at the end", minimum=0)
    wandb_project: str | None = option(
        None,
        "project of Weights & Biases to log to; WANDB_MODE=offline writes to a folder",
        short="log to Weights & Biases",
    )
    wandb_exp_name: str | None = option(
        None, "name of the run at Weights & Biases", aliases=("--wandb-name",), shown_default="the run folder's name"
    )
    wandb_save_dir: str | None = option(None, "folder for wandb's files", shown_default="in the run folder")
    wandb_entity: str | None = option(None, "team or user of the project", shown_default="wandb's default")
    profile: str | None = option(
        None,
        "steps to profile with torch's profiler, counted from 1, such as 5-7 or 5: a Perfetto trace per rank and a "
        "table of the slowest operators in RUN/profile",
        alone=DEFAULT_PROFILE_STEPS,
    )

    def profiled_steps(self) -> range:
        """Parse the steps to profile.

        Raises:
            ValueError: the range is empty, or a number is not an integer of at least 1.
        """
        return parse_steps(self.profile) if self.profile is not None else range(0)

    def problems(self) -> Iterator[str]:
        """Yield an error message for each invalid value in this section."""
        try:
            self.profiled_steps()
        except ValueError:
            yield f"--profile must be a step or a range of steps, counted from 1, such as 5-7; got {self.profile!r}"
