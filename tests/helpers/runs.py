"""Complete training runs in forked ranks, on texts of this repository."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import pretrain_gpt2
from megatron.config import Config, parse, resolve_dtype
from megatron.data import IndexedDatasetBuilder
from megatron.errors import StopRequest
from megatron.runtime.exit_signals import StopRequests
from megatron.tokenizer import build
from megatron.training import Callback, initialize
from megatron.training.callbacks import metrics_writer, speed_monitor
from megatron.training.startup import pretrain, run
from megatron.training.step_result import StepResult
from megatron.training.trainer import Trainer
from tests.helpers.harness import fork_ranks

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "tests" / "golden" / "tokenizer.json"
LENGTH_FLAGS = {
    "gpt2": "--seq-length 32 --hidden-bias",
    "t5": "--enc-seq-length 32",
    "llama": "--seq-length 32 --num-query-groups 2",
    "mpt": "--seq-length 32",
    "bert": "--seq-length 32",
}
BASE_FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --batch-size 2 --gas 2 "
    "--train-iters 20 --lr 3e-3 --warmup 0.1 --log-interval 1 --eval-iters 1 --eval-interval 0 --split 900,50,50 "
    f"--device cpu --progress plain --tokenizer-path {TOKENIZER}"
).split()

INJECTED_CALLBACKS: list[Callback] = []
"""Callbacks for this rank's run, added by fault injectors (``inject_fault``); each forked rank has a separate list."""


class AfterUpdate(Callback):
    """Callback that calls a function with the trainer after each counted step, before the step is logged."""

    def __init__(self, callback: Callable[[Trainer], object]) -> None:
        self.callback = callback

    def on_after_update(self, result: StepResult) -> None:
        self.callback(self.trainer)


def inject_after_update(callback: Callable[[int, Trainer], object]) -> Callable[[int], None]:
    """Return a fault injector that calls ``callback(rank, trainer)`` after each counted step."""
    return lambda rank: INJECTED_CALLBACKS.append(AfterUpdate(lambda trainer: callback(rank, trainer)))


def write_corpus(folder: Path) -> Path:
    """Tokenize texts of this repository into ``folder`` and return the prefix of the token files."""
    tokenizer = build(tokenizer_path=TOKENIZER)
    prefix = folder / "texts"
    texts = sorted((ROOT / "examples" / "corpus").glob("*/*.txt"))
    with IndexedDatasetBuilder(
        prefix, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.identity, eod_id=tokenizer.eod_id
    ) as writer:
        for text in texts:
            tokens = tokenizer.encode(text.read_text(encoding="utf-8"))
            writer.add(np.array([*tokens, tokenizer.eod_id]))
    return prefix


def family_of(script: ModuleType) -> str:
    """Return the family that ``pretrain_<family>`` trains, in any package."""
    return script.__name__.rpartition("pretrain_")[2]


def make_flags(prefix: Path, folder: Path, extra: str = "", script: ModuleType = pretrain_gpt2) -> list[str]:
    """Return the command line of a run of ``script`` on ``prefix`` with the run folder ``folder``."""
    length = LENGTH_FLAGS[family_of(script)]
    return [*BASE_FLAGS, *length.split(), "--data-path", str(prefix), "--save", str(folder), *extra.split()]


def disable_slow_features() -> None:
    """Disable plots and the measurement of this CPU's speed, which together take longer than a small run."""
    metrics_writer.plot_losses = lambda *_: None  # type: ignore[assignment]
    speed_monitor._measure_matmul_flops = lambda: 1e9


def train_ranks(
    num_ranks: int,
    argv: list[str],
    inject_fault: Callable[[int], None] | None = None,
    script: ModuleType = pretrain_gpt2,
) -> tuple[list[int], Any]:
    """Train in forked ranks; return the exit code and the result (None) of each rank.

    Args:
        inject_fault: fault injector, called first in each forked process with the rank.

    Raises:
        AssertionError: a rank exited with code 1; the message has the tracebacks.
    """
    codes, results, reports = fork_ranks(
        num_ranks, _train_rank, argv, num_ranks, inject_fault, script.__name__, deadline_s=100.0
    )
    if any(code == 1 for code in codes):
        raise AssertionError("\n".join(reports))
    return codes, results


def parse_script_config(script: ModuleType, argv: list[str], world_size: int) -> Config:
    """Return the configuration that ``script`` would parse."""
    defaults = getattr(script, "DEFAULTS", None)
    return parse(argv, world_size=world_size, family=family_of(script), defaults=defaults)


def _train_rank(
    rank: int, argv: list[str], num_ranks: int, inject_fault: Callable[[int], None] | None, script_name: str
) -> None:
    disable_slow_features()
    if inject_fault is not None:
        inject_fault(rank)
    script = sys.modules[script_name]
    config = resolve_dtype(parse_script_config(script, argv, num_ranks), "fp32")
    world = initialize.start(config)
    stop_requests = StopRequests()
    stop_requests.set_limits(config.run.exit_interval, 0.0, 0.0)
    providers = (script.train_valid_test_datasets_provider, script.model_provider, script.forward_step)
    try:
        run(config, world, *providers, config.family, stop_requests, INJECTED_CALLBACKS)
    except StopRequest:
        sys.exit(75)


def combine_injectors(*injectors: Callable[[int], None]) -> Callable[[int], None]:
    """Return a fault injector that calls all of ``injectors``."""

    def inject(rank: int) -> None:
        for injector in injectors:
            injector(rank)

    return inject


def launch_script(
    num_ranks: int,
    argv: list[str],
    log: Path,
    inject_fault: Callable[[int], None] | None = None,
    deadline_s: float = 60.0,
) -> list[int]:
    """Run ``pretrain_gpt2.py`` as its ranks do, including signals and exit codes; return the exit codes.

    Args:
        log: file to which all ranks append their output.
    """
    store = log.with_suffix(".store")
    store.unlink(missing_ok=True)  # left by an earlier start, whose ranks no longer answer
    codes, _, _ = fork_ranks(
        num_ranks, _run_script_rank, argv, log, store, inject_fault, deadline_s=deadline_s, init=False
    )
    return codes


def _run_script_rank(
    rank: int, argv: list[str], log: Path, store: Path, inject_fault: Callable[[int], None] | None
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["pretrain_gpt2.py", *argv]
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    _rendezvous_by_file(store)
    disable_slow_features()
    if inject_fault is not None:
        inject_fault(rank)
    script = pretrain_gpt2
    providers = (script.train_valid_test_datasets_provider, script.model_provider, script.forward_step)
    pretrain(*providers, callbacks=INJECTED_CALLBACKS)
    sys.exit(0)


def _rendezvous_by_file(store: Path) -> None:
    """Use a file for the rendezvous of the ranks, so that tests need no ports."""
    import torch.distributed as dist

    from megatron.runtime import rendezvous

    rendezvous.open_store = lambda rank, size, *_: dist.FileStore(str(store), size)
