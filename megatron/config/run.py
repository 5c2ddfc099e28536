"""The run itself: seed, what is said and when it ends."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.option import option


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Seed, log, early ends, and DeepSpeed's JSON."""

    seed: int = option(1234, "seed of weights, data order and dropout", minimum=0)
    deterministic: bool = option(
        False,
        "on CUDA: take kernels that add in the same order every time, slower, so that a run resumes bit for bit; on a "
        "CPU it does so anyway",
    )
    log_interval: int = option(10, "steps between progress lines", minimum=1)
    exit_interval: int = option(
        0, "save and stop when the step is a multiple of this", minimum=1, shown_default="never"
    )
    exit_duration_in_mins: float = option(0.0, "save and stop after so many minutes", above=0, shown_default="never")
    tensorboard_dir: str | None = option(None, "folder of TensorBoard events", shown_default="in the run folder")
    deepspeed_config: str | None = option(
        None, "DeepSpeed's JSON file", flag="--deepspeed_config", aliases=("--deepspeed-config",)
    )
    verbose_deepspeed: bool = option(False, "let DeepSpeed's own messages through")
    dry_run: bool = option(False, "print the start table and stop, without starting processes or reading data")
    progress: str = option("auto", "how progress is shown", choices=("auto", "bar", "plain"))
    local_rank: int | None = option(
        None,
        "device index on this node, as launchers pass it; must agree with LOCAL_RANK",
        flag="--local_rank",
        aliases=("--local-rank",),
        minimum=0,
        shown_default="LOCAL_RANK",
    )
