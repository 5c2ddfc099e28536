"""Programs that cases of part ``faults`` start in separate processes; the first word selects the program.

    python benchmarks/gpu/workers.py reads FILE gpt2 --device cuda --bf16 --gas 4           # where the host waits
    python benchmarks/gpu/workers.py pressure FILE gpt2 --device cuda --bf16 --deterministic
    python benchmarks/gpu/workers.py ease FILE gpt2 --device cuda --bf16 --deterministic
    python -m torch.distributed.run --nproc-per-node 2 benchmarks/gpu/workers.py pause FILE BACKEND SCHEDULE
    python -m torch.distributed.run --nproc-per-node 2 benchmarks/gpu/workers.py plain FILE BACKEND SCHEDULE
    python benchmarks/gpu/workers.py nan@5 FLAGS...     # pretrain_gpt2.py with NaN losses in step 5
    python benchmarks/gpu/workers.py one-gpu FLAGS...   # pretrain_gpt2.py with all ranks on the first GPU

The first five write their results to FILE as JSON. "pressure" limits torch's allocator from the third step on, and
"ease" is the same without a limit. In "pause" the layers of a tds pipeline synchronize with the device and free cached
memory while messages are in flight, and "plain" is the same without pauses; on a CPU the two are equal. BACKEND is
nccl, gloo on a CPU, or host_copies, with which two ranks can share a GPU. "one-gpu" is for ranks that the launcher
starts.

The project and DeepSpeed are imported by the functions that need them, because DeepSpeed reads LOCAL_RANK on import.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # instead of the folder of this file, whose modules could shadow others

import torch  # noqa: E402

PROJECT_PREFIXES = (f"{ROOT}/megatron/", f"{ROOT}/tds/")
VOCAB = 512
WATCHED_STEPS = range(1, 3)
"""Steps 2 and 3, as indices from 0."""
LIMITED_STEPS = range(2, 6)
MIB = 2**20
SMALL = 2**19
"""Bytes of a block in torch's pool of small blocks, which the allocator does not use for larger tensors."""
SLACK = 64 * MIB


def make_engine(family: str, argv: list[str]) -> tuple[Any, Any]:
    """Return an engine on this process's device and an iterator over micro-batches of random tokens."""
    from megatron.arguments import parse
    from megatron.training import global_vars, initialize
    from megatron.training.data import RunData
    from megatron.training.mock_data import mock_tokenizer, random_data
    from megatron.training.setup import build_engine, make_streams

    script = importlib.import_module(f"pretrain_{family}")
    argv = [
        *f"--data-path none --vocab-size {VOCAB} --train-iters 20 --hidden-dropout 0 --attention-dropout 0".split(),
        *argv,
    ]
    config = parse(argv, world_size=1, family=family, defaults=getattr(script, "DEFAULTS", None)).with_vocab(VOCAB)
    world = initialize.start(config)
    streams = make_streams(config, world)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, world, streams, script.model_provider, script.forward_step)
    return engine, RunData({"train": random_data(config)}, None).batches("train", config, world)


def caller_location() -> str:
    """Return the innermost active function of the project, such as "tds/loss_reduction.py:read"."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PROJECT_PREFIXES):
            return f"{Path(name).relative_to(ROOT)}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


@contextmanager
def record_waits() -> Iterator[list[str]]:
    """Yield a list that receives a line for each wait of the host in the block, detected by CUDA's sync debug mode.

    This mode does not detect synchronizations of the whole device, so these calls are recorded separately.
    """
    from deepspeed.accelerator import get_accelerator

    waits: list[str] = []

    def note_wait(message: Warning | str, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):
            waits.append(f"wait in {caller_location()}")

    def note_synchronize(*_: Any, **__: Any) -> None:
        waits.append(f"synchronize in {caller_location()}")

    owners = (torch.cuda, torch.accelerator, get_accelerator())
    originals = [owner.synchronize for owner in owners]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note_wait
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for owner in owners:
                owner.synchronize = note_synchronize
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
            for owner, call in zip(owners, originals, strict=True):
                owner.synchronize = call


@contextmanager
def record_simulated_waits() -> Iterator[list[str]]:
    """Like ``record_waits``, but for a CPU: record the calls that would wait on a GPU."""
    from tests.helpers import host_reads

    with host_reads.count_waits() as waits:
        yield waits


def reads(family: str, argv: list[str]) -> dict[str, Any]:
    """Count the host waits in steps 2 and 3.

    Returns:
        ``steps``: number of steps. ``found``: location -> number of waits. ``is_noticed``: True if a deliberate wait is
        detected, which shows that detection works.
    """
    engine, batches = make_engine(family, argv)
    is_cuda = engine.device.type == "cuda" if isinstance(engine.device, torch.device) else "cuda" in str(engine.device)
    num_batches = engine.share.num_micro_batches * WATCHED_STEPS.stop
    batches = iter([next(batches) for _ in range(num_batches)])  # reading samples is host work and does not count
    for step in range(WATCHED_STEPS.start):
        engine.train_step(batches, step)
    watch = record_waits if is_cuda else record_simulated_waits
    with watch() as waits:
        for step in WATCHED_STEPS:
            engine.train_step(batches, step)
    with watch() as deliberate_waits:
        torch.ones(1, device=engine.device).item()
    return {"steps": len(WATCHED_STEPS), "found": Counter(waits), "is_noticed": len(deliberate_waits) == 1}


def limit_memory(peak: int) -> int:
    """Limit the memory of torch's allocator so that a step fits only if cached blocks are freed; return the bytes.

    The cached blocks are small ones, which the allocator does not use for larger tensors. Because of the limit for this
    process, allocations fail as on a full device, independent of the size of the device.
    """
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    blocks = [torch.empty(SMALL, dtype=torch.uint8, device="cuda") for _ in range((peak - reserved + SLACK) // SMALL)]
    del blocks
    limit = torch.cuda.memory_reserved() + 4 * MIB
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    return limit


def under_pressure(family: str, argv: list[str], *, is_pressed: bool) -> dict[str, Any]:
    """Return the losses of six steps, and the allocator's retries in the last four."""
    engine, batches = make_engine(family, argv)
    losses = [engine.train_step(batches, step).loss.hex() for step in range(LIMITED_STEPS.start)]
    peak = torch.cuda.max_memory_reserved()
    limit = limit_memory(peak) if is_pressed else 0
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    losses += [engine.train_step(batches, step).loss.hex() for step in LIMITED_STEPS]
    retries = torch.cuda.memory_stats()["num_alloc_retries"] - before
    return {"losses": losses, "retries": retries, "peak": peak, "limit": limit}


STEPS, MICRO_BATCHES, WIDTH, LAYERS = 6, 8, 256, 8
"""Steps, micro-batches, width and layers of the pipeline."""


class Paused(torch.nn.Module):
    """A layer that synchronizes with the device and frees cached memory in forward and backward if ``should_pause``."""

    def __init__(self, width: int, *, should_pause: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.should_pause = should_pause and torch.cuda.is_available()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.gelu(self.linear(x))
        if self.should_pause:
            free_device()
            if y.requires_grad:
                y.register_hook(lambda gradient: free_device())
        return y


def free_device() -> None:
    """Wait for the device, including kernels that wait for a message, and free torch's cached memory."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def pipeline_losses(backend: str, schedule: str, *, should_pause: bool) -> list[str]:
    """Return the losses of a pipeline of two stages whose layers may pause. Collective."""
    if torch.cuda.device_count() == 1:
        os.environ["LOCAL_RANK"] = "0"  # both stages on the one GPU; set before DeepSpeed reads it
    import tds as deepspeed

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if backend == "host_copies":
        from tds.p2p import host_copies

        host_copies.register()
    torch.distributed.init_process_group(backend)
    deepspeed.init_distributed(dist_backend=backend)
    torch.manual_seed(0)
    layers = [Paused(WIDTH, should_pause=should_pause) for _ in range(LAYERS)]
    module = deepspeed.PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "pipeline": {"schedule": schedule, "timeout_s": 40},
    }
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=torch.optim.SGD(module.parameters(), lr=5.0), config=config
    )
    data = deepspeed.utils.RepeatingLoader(
        [(torch.randn(4, WIDTH), torch.randn(4, WIDTH)) for _ in range(MICRO_BATCHES)]
    )
    return [float(engine.train_batch(data)).hex() for _ in range(STEPS)]


def nan_forward_step(step: int) -> Any:
    """Return GPT-2's forward step with NaN losses in the given step, counted from 1."""
    import pretrain_gpt2
    from megatron.training import get_config

    calls = count()

    def forward_step(data_iterator: Any, model: Any) -> tuple[Any, dict[str, Any]]:
        (total, number_of_tokens), _ = pretrain_gpt2.forward_step(data_iterator, model)
        current_step = next(calls) // get_config().batch.gas + 1
        loss = (total * float("nan") if current_step == step else total, number_of_tokens)
        return loss, {"lm loss": loss}

    return forward_step


def train(fault: str) -> None:
    """Run ``pretrain_gpt2.py`` with the remaining words of the command line and the fault ``fault``."""
    import pretrain_gpt2
    from megatron.training import pretrain

    forward_step = pretrain_gpt2.forward_step
    if fault == "one-gpu":
        os.environ["LOCAL_RANK"] = "0"
    else:
        forward_step = nan_forward_step(int(fault.removeprefix("nan@")))
    pretrain(pretrain_gpt2.train_valid_test_datasets_provider, pretrain_gpt2.model_provider, forward_step)


def main() -> None:
    """Run the program that the command line selects."""
    program = sys.argv.pop(1)
    if program in ("pause", "plain"):
        file, backend, schedule = sys.argv[1:]
        losses = pipeline_losses(backend, schedule, should_pause=program == "pause")
        if torch.distributed.get_rank() == 0:
            Path(file).write_text(json.dumps(losses))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    elif program in ("reads", "pressure", "ease"):
        file, family, *argv = sys.argv[1:]
        results = (
            reads(family, argv)
            if program == "reads"
            else under_pressure(family, argv, is_pressed=program == "pressure")
        )
        Path(file).write_text(json.dumps(results))
        sys.stdout.flush()
        os._exit(0)  # skips the shutdown of the group of one rank
    else:
        train(program)


if __name__ == "__main__":
    main()
