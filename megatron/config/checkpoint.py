"""CheckpointConfig: what is saved and where, and the checkpoint from which a run starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron import object_store
from megatron.config.option import option

DEFAULT_MINUTES = 30.0
"""Minutes between checkpoints of a run that sets no interval; at most this much work is lost."""
DEFAULT_NUM_CHECKPOINTS = 2
"""Number of checkpoints to keep if they are saved at the default interval."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Run folder and checkpoints."""

    save: str | None = option(
        None, "run folder: checkpoints, metrics, plots", shown_default="runs/<script>-<time>", short="run folder"
    )
    load: str | None = option(
        None,
        "run folder or checkpoint to resume from, also in an object store (s3://...); with --finetune also a "
        "Hugging Face folder, whose weights are loaded",
        short="run folder or checkpoint to resume from",
    )
    save_remote: str | None = option(
        None,
        "location in an object store (s3://bucket/run) to which checkpoints and Hugging Face exports are uploaded "
        "in the background; the run waits for the uploads at its end",
    )
    save_interval: int = option(
        0,
        "steps between checkpoints; 0: by time only",
        minimum=0,
        aliases=("--persistent-save-interval",),
        short="steps between checkpoints",
    )
    save_interval_minutes: float | None = option(
        None,
        "minutes between checkpoints; 0: never by time. The last step and a stop always save",
        minimum=0,
        shown_default=f"{DEFAULT_MINUTES:g}, keeping the last {DEFAULT_NUM_CHECKPOINTS}; 0 with --save-interval",
    )
    checkpoint_format: str | None = option(
        None,
        "format of saved checkpoints: native: any layout can load it; deepspeed: DeepSpeed's files, for the layout "
        "that saved them. --load detects the format",
        choices=("native", "deepspeed"),
        shown_default="that of the run folder's checkpoints; native in a new one",
    )
    export_hf_interval: int = option(
        0,
        "steps between Hugging Face exports, written in the background to hf/step-XXXXXXXX in the run folder, and "
        "after the last step; 0: none",
        minimum=0,
    )
    async_save: bool = option(False, "copy the state and write the checkpoint while training continues")
    on_save_error: str = option(
        "continue",
        "reaction to a failed save during training; a failed save at the end always ends the run with code 3",
        choices=("continue", "stop"),
    )
    resume: bool = option(
        False, "resume from the newest checkpoint of the newest run", short="resume from the newest checkpoint"
    )
    load_if_exists: bool = option(False, "start from scratch if --load or --resume finds no checkpoint")
    strict_load: bool = option(
        False, "exit with code 3 if the newest checkpoint is damaged, instead of loading an older one"
    )
    no_load_optim: bool = option(False, "do not load optimizer state and loss scale")
    no_load_rng: bool = option(False, "do not load random states")
    load_weights_only: bool = option(
        False,
        "continue at the checkpoint's step and sample with its weights, and with new optimizer state, loss scale "
        "and random states",
    )
    allow_data_change: bool = option(
        False,
        "resume although the data differ from the checkpoint's: an unchanged corpus continues at its position, one "
        "with another sample length after as many tokens, others start at their first sample",
    )
    allow_vocab_change: bool = option(
        False, "load although the tokenizer differs from the checkpoint's; the vocabulary sizes must be equal"
    )
    finetune: bool = option(False, "load weights only, and count steps and samples from 0")
    resize_vocab: bool = option(
        False,
        "with --finetune: load weights with another vocabulary size; shared rows are loaded, new rows are the mean "
        "of the saved ones",
    )
    no_save_optim: bool = option(False, "do not save optimizer state; such a checkpoint cannot be resumed exactly")
    eval_only: bool = option(False, "evaluate the loaded model on the test split and exit")
    keep_last: int | None = option(None, "number of checkpoints to keep", minimum=1, shown_default="all")
    keep_every: int | None = option(
        None,
        "with --keep-last: also keep checkpoints whose step is a multiple of this",
        minimum=1,
        shown_default="none",
    )

    @property
    def is_default_interval(self) -> bool:
        """True if no flag sets an interval between checkpoints."""
        return not self.save_interval and self.save_interval_minutes is None

    @property
    def is_deepspeed(self) -> bool:
        """True if checkpoints are written in DeepSpeed's layout."""
        return self.checkpoint_format == "deepspeed"

    @property
    def minutes(self) -> float:
        """Minutes between checkpoints that are saved by time; 0 for never."""
        if self.save_interval_minutes is not None:
            return self.save_interval_minutes
        return DEFAULT_MINUTES if self.is_default_interval else 0.0

    def problems(self) -> Iterator[str]:
        """Yield an error message for each flag that lacks a checkpoint to load or contradicts another flag."""
        if self.load is not None and self.resume:
            yield f"--load and --resume exclude each other, got --load {self.load} and --resume. Remove one of them"
        need_checkpoint = (
            "load_if_exists", "strict_load", "no_load_optim", "no_load_rng", "load_weights_only", "finetune",
            "eval_only", "allow_data_change", "allow_vocab_change", "resize_vocab",
        )  # fmt: skip
        for name in need_checkpoint if self.load is None and not self.resume else ():
            if getattr(self, name):
                yield f"{_flag(name)} needs a checkpoint, got none. Add --load FOLDER"
        for name in ("finetune", "eval_only", "no_load_optim", "no_load_rng") if self.load_weights_only else ():
            if getattr(self, name):
                yield (
                    "--load-weights-only loads the weights and continues at the checkpoint's step and sample, which "
                    f"excludes {_flag(name)}. Remove {_flag(name)}"
                )
        if self.save is not None and object_store.is_remote(self.save):
            yield (
                f"--save must be a local or shared folder that all nodes can access, got {self.save}. Set it to such "
                f"a folder, and add --save-remote {self.save}"
            )
        if self.save_remote is not None and not object_store.is_remote(self.save_remote):
            yield (
                "--save-remote must be a location in an object store such as s3://bucket/run, got "
                f"{self.save_remote}. Use --save for a folder"
            )
        if self.resize_vocab and not self.finetune:
            yield (
                "--resize-vocab changes the shape of the embedding, so the checkpoint's training state cannot be "
                "resumed. Add --finetune"
            )
        if self.load_if_exists and self.eval_only:
            yield (
                "--eval-only requires a checkpoint, got --load-if-exists, with which it may be missing. Remove one of "
                "them"
            )
        if self.keep_every is not None and self.keep_last is None:
            yield (
                f"--keep-every {self.keep_every} has no effect without --keep-last K: all checkpoints are kept. Add "
                "--keep-last K"
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
