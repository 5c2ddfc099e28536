"""LoggingConfig: layer norms, trackers, text samples, tasks, profiler."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.option import option, parse_steps
from megatron.config.secrets import MASK

if TYPE_CHECKING:
    pass


DEFAULT_PROFILE_STEPS = "11-12"
"""Steps of --profile without a value, as in Megatron-LM."""
DOCUMENT_LOSSES_MIB = 256
"""MiB of --log-document-losses without a value."""
TRACKERS = {
    "wandb_project": ("wandb", "wandb", ("wandb_exp_name", "wandb_save_dir", "wandb_entity")),
    "swanlab_project": ("swanlab", "swanlab", ("swanlab_mode",)),
    "mlflow_tracking_uri": ("mlflow", "mlflow", ()),
    "metrics_port": ("", "", ("metrics_host",)),
}
"""Field that enables a tracker -> its package, its extra, and the fields that take effect with it only."""
LOGGING_IN_TRAINING = (
    "log_layer_norms", "log_document_losses", "log_max_attention_logit", "profile", "eval_tasks"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Optional metrics, and the profiler."""

    log_layer_norms: bool = option(False, "also log the gradient norm of each layer at the steps of --log-interval")
    log_document_losses: int = option(
        0,
        "record the mean loss and the tokens of each document in each step in RUN/document_losses.jsonl, for "
        f"tools/audit.py: the newest N MiB, {DOCUMENT_LOSSES_MIB} without a number; 0: off",
        minimum=0,
        alone=str(DOCUMENT_LOSSES_MIB),
        family_kind="decoder",
        elsewhere="it is supported in decoders only; remove it",
    )
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
    swanlab_project: str | None = option(None, "project of SwanLab to log to")
    swanlab_mode: str = option(
        "cloud",
        "where SwanLab's records go; cloud: the service, after swanlab login; local: a folder for swanlab watch; "
        "offline: a folder for swanlab sync",
        choices=("cloud", "local", "offline"),
    )
    mlflow_tracking_uri: str | None = option(
        None,
        "tracking server or folder of MLflow to log to, such as http://host:5000 or file:mlruns; the experiment is "
        "MLFLOW_EXPERIMENT_NAME, and credentials are read from MLFLOW_TRACKING_*",
    )
    metrics_port: int | None = option(
        None,
        "port on rank 0's host at which Prometheus reads the newest metrics (/metrics, OpenMetrics)",
        minimum=1,
        maximum=65535,
    )
    metrics_host: str = option(
        "127.0.0.1", "address for --metrics-port; 0.0.0.0: all networks of the host, without authentication"
    )
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
        if MASK in (self.mlflow_tracking_uri or ""):
            yield (
                f"--mlflow-tracking-uri must be the full URI, got {self.mlflow_tracking_uri}, in which a run's "
                "config.json hides a secret. Set the flag again, with the credentials in MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD"
            )
        try:
            self.profiled_steps()
        except ValueError:
            yield f"--profile must be a step or a range of steps, counted from 1, such as 5-7; got {self.profile!r}"
