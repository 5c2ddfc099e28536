"""Checks of ``--dry-run`` beyond the configuration. No torch.

* Combinations of flags that a run rejects only after building the tokenizer, the data sets or the model are errors.
* Missing files, memory and devices are warnings, because a plan is often made on another machine; ``--check-paths``
  turns them into errors.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron import accelerators, hub, object_store
from megatron.arguments.other_programs import PROGRAMS
from megatron.checkpoint.checkpoint_args import RUNS_DIR, find_source
from megatron.checkpoint.huggingface.config import config_to_huggingface
from megatron.config import Config
from megatron.config.data import FIM_TOKENS
from megatron.costs.memory import Memory
from megatron.errors import CheckpointError, DataError
from megatron.log import human_bytes
from megatron.models.registry import FAMILIES
from megatron.training.estimates import DRIVER_FILES
from megatron.training.global_vars import missing_tokenizer
from megatron.training.vocabulary import family_vocabulary

BUILTIN_PROGRAMS = frozenset(
    [
        *PROGRAMS,
        *(Path(family.program).name for family in FAMILIES.values()),
        *(f"pretrain_{name}.py" for name in FAMILIES),
    ]
)
"""Programs of this repository, whose data sets need a tokenizer."""
EOD_FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def combination_problems(config: Config, tokenizer: Any, program: str = "") -> Iterator[str]:
    """Yield errors about combinations of flags that a run would reject after its start.

    Args:
        tokenizer: the tokenizer; None if no flag names one.
        program: program file name; a user's program may read data without a tokenizer.
    """
    explicit_flags = config.explicit_fields
    if tokenizer is None:
        yield from tokenizer_problems(config, program)
        for name in ("sample_prompts", "eval_tasks"):
            if name in explicit_flags:
                flag = f"--{name.replace('_', '-')}"
                yield f"{flag} needs a tokenizer, got none. Set --tokenizer-path, or leave {flag} out"
    elif _needs_tokenizer(config, program):
        yield from _vocabulary_problems(config, tokenizer)
    yield from _empty_split_problems(config)
    if config.checkpoint.export_hf_interval:
        try:
            config_to_huggingface(config, "")
        except (CheckpointError, ValueError) as error:
            yield f"--export-hf-interval: {error}. Leave the flag out"


def tokenizer_problems(config: Config, program: str) -> Iterator[str]:
    """Yield an error if the program's data need a tokenizer; called for runs without one."""
    if _needs_tokenizer(config, program):
        yield missing_tokenizer(config)


def _needs_tokenizer(config: Config, program: str) -> bool:
    """Return True if the program is built-in and its data need a tokenizer."""
    return any(config.data.corpora.values()) and not config.data.is_script_data and program in BUILTIN_PROGRAMS


def _vocabulary_problems(config: Config, tokenizer: Any) -> Iterator[str]:
    """Yield errors about flags that need tokens or a chat template which the tokenizer lacks."""
    data = config.data
    has_eod = getattr(tokenizer, "has_eod", True)
    if flags := [f"--{name.replace('_', '-')}" for name in EOD_FLAGS if getattr(data, name) and not has_eod]:
        yield f"{', '.join(flags)} need an end-of-document token, but the tokenizer has none"
    if data.fim_rate and not any(all(tokenizer.token_to_id(name) is not None for name in row) for row in FIM_TOKENS):
        token_sets = " or ".join(" ".join(row) for row in FIM_TOKENS)
        yield f"--fim-rate {data.fim_rate:g} needs a vocabulary with the tokens {token_sets}. Leave it out"
    if data.sft is not None:
        from megatron.tokenizer.chat import find_template  # jinja2 takes 0.1 s

        try:
            find_template(tokenizer, data.chat_template)
        except DataError as error:
            yield str(error)
    if (
        config.family_config.is_encoder_decoder
        and data.has_dynamic_spans
        and len(config.family_config.parsed_denoisers) > 1
    ):
        modes = family_vocabulary(tokenizer, config).modes
        if missing_modes := [
            denoiser.kind for denoiser in config.family_config.parsed_denoisers if denoiser.kind not in modes
        ]:
            yield (
                "each of several denoisers needs a mode token, but the tokenizer has none for "
                f"{', '.join(missing_modes)}"
            )


def _empty_split_problems(config: Config) -> Iterator[str]:
    """Yield errors about splits that the run needs although ``--split`` gives them no documents."""
    data, (train, _, test) = config.data, config.data.split_shares
    if config.checkpoint.eval_only and not test:
        yield f"--eval-only needs a test split, but --split {data.split} assigns it no documents. Change --split"
    if not config.checkpoint.eval_only and config.batch.train_iters and not train:
        yield f"training needs documents, but --split {data.split} assigns it none. Change --split"


def machine_problems(
    config: Config, world_size: int, memory: Sequence[Memory], *, run_name: str = "", makes_data: bool = False
) -> Iterator[str]:
    """Yield messages about files, memory and devices that the run needs and this machine lacks.

    Args:
        memory: estimated memory per rank, by stage.
        run_name: prefix of the program's run folders.
        makes_data: the run script makes the token files before the run.
    """
    if not makes_data:
        yield from config.data.missing_files(reads_span_files=config.family_config.READS_SPAN_FILES, on_any_node=True)
    yield from _load_problems(config, run_name)
    yield from _device_problems(config, world_size)
    yield from _memory_problems(config, world_size, memory)


def _load_problems(config: Config, run_name: str) -> Iterator[str]:
    """Yield messages about a missing run or folder for --resume or --load."""
    flags = config.checkpoint
    if flags.resume and not flags.load_if_exists and find_source(vars(flags), run_name) is None:
        runs = RUNS_DIR.resolve() / f"{run_name}-*"
        yield f"--resume needs a run with a checkpoint in {runs}, found none. Start without --resume"
    if flags.load is None or flags.load_if_exists or object_store.is_remote(flags.load):
        return
    path = Path(flags.load)
    if not path.is_dir():
        missing_text = (
            f"--load must name a folder, got {path}, which does not exist (looked in {Path.cwd()}). Correct the path"
        )
        yield hub.load_problem(path) or missing_text
    elif not any(path.iterdir()):
        yield f"--load must name a folder with a checkpoint, got {path}, which is empty. Correct the path"


def _num_gpus() -> int:
    """Count NVIDIA GPUs by device files; 1 with another vendor's driver."""
    nvidia = len(list(Path("/dev").glob(DRIVER_FILES[0])))
    return nvidia or int(any(next(Path("/dev").glob(name), None) for name in DRIVER_FILES[1:]))


def _local_ranks(world_size: int) -> int:
    """Return the number of ranks on this machine."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(int(text), world_size) if text.isdecimal() and int(text) else world_size


def _device_problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield a message if --device cuda is set and this machine has too few GPUs."""
    num_gpus, num_ranks = _num_gpus(), _local_ranks(world_size)
    if config.parallel.device != "cuda":
        return
    if not num_gpus:
        yield "--device cuda needs a GPU, but this machine has none (no /dev/nvidia*, /dev/kfd). Use --device cpu"
    elif num_gpus < num_ranks and Path("/dev/nvidia0").exists() and config.parallel.distributed_backend != "gloo":
        yield (
            f"each rank needs a separate GPU, got {num_ranks} ranks and {num_gpus} GPUs on this machine. Use more nodes"
        )


def _memory_problems(config: Config, world_size: int, memory: Sequence[Memory]) -> Iterator[str]:
    """Yield a message if the estimate exceeds the GPU's memory, or the ranks together exceed the host's memory."""
    num_ranks = _local_ranks(world_size)
    is_on_gpu = config.parallel.device == "cuda" or (config.parallel.device == "auto" and _num_gpus() > 0)
    host_memory = [stage.host if is_on_gpu else stage.total + stage.host for stage in memory]
    if is_on_gpu:
        peak_bytes, limit_bytes = max(stage.total for stage in memory), gpu_bytes()
        if limit_bytes is not None and peak_bytes > limit_bytes:
            yield (
                f"a rank needs about {human_bytes(peak_bytes)}, but a GPU has {human_bytes(limit_bytes)}. "
                f"{_MEMORY_ADVICE}"
            )
    elif config.parallel.device not in ("auto", "cpu", *accelerators.BUILT_IN):
        return
    # If all ranks are on this host, they cover the stages evenly; otherwise assume that all have the largest stage.
    needed_bytes = (
        sum(host_memory) * num_ranks // len(memory) if num_ranks == world_size else max(host_memory) * num_ranks
    )
    if needed_bytes > host_bytes():
        yield (
            f"{num_ranks} {'rank needs' if num_ranks == 1 else 'ranks need'} about {human_bytes(needed_bytes)} of host "
            f"memory, but this machine has {human_bytes(host_bytes())}. {_MEMORY_ADVICE}"
        )


_MEMORY_ADVICE = (
    "Use more ranks, a smaller --batch-size, --checkpoint-activations or --zero-stage; docs/memory.md has more"
)


def host_bytes() -> int:
    """Return the memory of this machine or its container in bytes."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # "max" means no limit
        return physical


def gpu_bytes() -> int | None:
    """Query the smallest GPU's memory in bytes from nvidia-smi, or None."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return None
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return min(int(line) for line in text.split()) * 1024**2
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
