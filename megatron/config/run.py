"""RunConfig: seed, log lines, exit conditions."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.option import option

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Seed, logging, exit conditions, and DeepSpeed's JSON."""

    seed: int = option(1234, "seed of weights, data order and dropout", minimum=0, short="seed of the run")
    deterministic: bool = option(
        False,
        "on CUDA: deterministic kernels, which are slower, so that a resumed run is equal bit for bit; on a CPU "
        "this is always the case",
        aliases=("--deterministic-mode",),
    )
    log_interval: int = option(
        10,
        "steps between progress lines; 0: only the first and the last step",
        minimum=0,
        short="steps between log lines",
    )
    exit_interval: int = option(
        0, "save and exit at steps that are a multiple of this; 0: never", minimum=0, shown_default="never"
    )
    kill_switch_path: str | None = option(
        None,
        "save and exit once this file exists (checked after every step)",
        aliases=("--kill-switch-file",),
        shown_default="none",
    )
    exit_duration_in_mins: float = option(
        0.0, "save and exit after this number of minutes", above=0, shown_default="never"
    )
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
        "YAML, TOML or JSON file whose keys are flags; the config.json of a run folder repeats that run",
        short="YAML, TOML or JSON file with flags",
    )
    callback: str | None = option(
        None,
        "callbacks of your own as FILE.py:Class, separated by spaces or with the flag repeated: subclasses of "
        "megatron.training.Callback, constructed without arguments; their states are saved and resumed",
        join=shlex.join,
        repeats=True,
        shown_default="none",
    )
    strict_flags: bool = option(
        False, "reject ignored flags and keys of other trainers instead of listing them in the start table"
    )
    ignore_unknown_flags: bool = option(
        False,
        "drop unknown flags and keys of --config, including misspelt ones, with a warning that names the nearest "
        "known flag; without it they are errors",
    )
    verbose_deepspeed: bool = option(
        False, "print DeepSpeed's messages; a run without a pipeline then uses DeepSpeed's engine"
    )
    dry_run: bool = option(
        False,
        "print the start table and exit, without starting processes or reading data",
        short="print the start table and exit",
    )
    check_paths: bool = option(
        False,
        "with --dry-run: exit with code 2 if this machine lacks data files, the folder of --load, memory or the "
        "device; without it these are warnings",
    )
    prove: bool | None = option(
        None,
        "check the layout of the run, shrunk to small sizes, in fp64 against one process, and end the run before its "
        "first step if gradients or losses differ; the default on a CPU checks beside the first steps and does not "
        "delay them",
        constants={"--no-prove": False},
        shown_default="beside the first steps on a CPU, otherwise off",
        short="check the layout against one process",
    )
    prove_only: bool = option(
        False,
        "check the layout as --prove does, for at most 600 s, and exit with code 0 if it is correct, otherwise 1; "
        "needs no GPU and no launcher (WORLD_SIZE=N sets the number of ranks), and no data for the built-in models",
    )
    progress: str = option("auto", "form of the progress display", choices=("auto", "bar", "plain"))
    local_rank: int | None = option(
        None,
        "device index on this node, passed by launchers; must agree with LOCAL_RANK",
        flag="--local_rank",
        aliases=("--local-rank",),
        minimum=0,
        shown_default="LOCAL_RANK",
    )

    def problems(self) -> Iterator[str]:
        """Yield an error message for each invalid value in this section."""
        if self.strict_flags and self.ignore_unknown_flags:
            yield "--strict-flags and --ignore-unknown-flags exclude each other. Remove one of them"
        if self.kill_switch_path is not None and not self.dry_run and os.path.exists(self.kill_switch_path):
            yield (
                f"--kill-switch-path must name a file that does not exist yet, got {self.kill_switch_path}, which "
                "exists. Remove the file to start"
            )
