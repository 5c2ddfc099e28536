"""The contenders of ``zero.py`` and their processes: a plain GPT on each replica, by our ZeRO or DeepSpeed's own.

| name | what it is |
|---|---|
| ours 0 ... 3 | ``build_engine`` with ``--zero-stage``, as a run does it |
| DeepSpeed 0 ... 3 | ``deepspeed.initialize`` of the same module with its own ``zero_optimization`` |
| ... offload | ``--offload-optimizer``, with stage 3 ``--offload-parameters`` too; the keys of the same meaning |

All have the same weights, batches, buckets of 32 MiB, AdamW of torch and no clipping.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import PlainGPT
from benchmarks.memory import bytes_alive, measure
from benchmarks.sizes import GPTSizes

LR, BETAS, EPSILON = 1e-3, (0.9, 0.95), 1e-8
Step = Callable[[int], float]
THEIR_BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
BUCKET = 2**23
"""Numbers of each: 32 MiB of fp32, as ours are. Their own default, 5e8, takes 2 GB of buffers whatever the model."""


@dataclass(frozen=True, order=True)
class Contender:
    """Whose ZeRO, and how much of it."""

    whose: str
    stage: int
    offloads: bool = False

    @property
    def name(self) -> str:
        return f"{self.whose} {self.stage}{' offload' if self.offloads else ''}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What all contenders of a case train.

    Args:
        batch_size: samples of a micro-batch on a replica.
    """

    sizes: GPTSizes
    dtype: str
    batch_size: int
    num_micro_batches: int
    replicas: int

    def batch(self, replica: int, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and labels [b, s], other ones on each replica."""
        number = (step * self.num_micro_batches + micro_batch) * self.replicas + replica
        text = self.sizes.batch(self.batch_size, number)["text"]
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def contenders(stages: list[int], offload: bool) -> list[Contender]:
    """Return ours and DeepSpeed's of each stage, then those that offload; its stage 0 has nothing to offload."""
    found = [Contender(whose, stage) for stage in stages for whose in ("ours", "DeepSpeed")]
    if offload:
        found += [Contender(whose, stage, True) for stage in stages if stage > 0 for whose in ("ours", "DeepSpeed")]
    return found


def build(contender: Contender, case: Case, rank: int) -> Step:
    """Return a step of ``contender`` on this replica: its number to its loss here. Collective."""
    return (_ours if contender.whose == "ours" else _theirs)(contender, case, rank)


def _model(case: Case) -> PlainGPT:
    torch.manual_seed(0)
    model = PlainGPT(case.sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
    return model


def config_of(contender: Contender, case: Case) -> Any:
    """Return the configuration of ours as a user's flags give it."""
    from megatron.arguments import parse

    sizes = case.sizes
    line = (
        f"--num-layers {sizes.num_layers} --hidden-size {sizes.hidden_size} --num-attention-heads "
        f"{sizes.num_attention_heads} --seq-length {sizes.seq_length} --max-position-embeddings {sizes.seq_length} "
        f"--hidden-bias --data-path none --device cpu --batch-size {case.batch_size} --gas {case.num_micro_batches} "
        f"--{case.dtype} --zero-stage {contender.stage} --lr {LR} --weight-decay 0 --clip-grad 0 --adam-beta1 "
        f"{BETAS[0]} --adam-beta2 {BETAS[1]} --adam-eps {EPSILON}"
    )
    if contender.offloads:
        line += " --offload-optimizer" + " --offload-parameters" * (contender.stage == 3)
    return parse(line.split(), world_size=case.replicas).with_vocab(sizes.vocab_size)


def _ours(contender: Contender, case: Case, rank: int) -> Step:
    from megatron.training import global_vars, initialize
    from megatron.training.parity import mock_tokenizer
    from megatron.training.setup import build_engine, make_streams

    config = config_of(contender, case)
    here = initialize.start(config)
    streams = make_streams(config, here)
    global_vars.set_current(config, mock_tokenizer(config), streams)

    def forward_step(data: Iterator[Any], module: Any) -> Any:
        return module(*next(data)), {}

    engine = build_engine(config, here, streams, lambda: _model(case), forward_step)

    def step(number: int) -> float:
        batches = (case.batch(rank, number, each) for each in range(case.num_micro_batches))
        return engine.train_step(batches, number).loss

    return step


def deepspeed_config(contender: Contender, case: Case) -> dict[str, Any]:
    """Return DeepSpeed's JSON for its own ZeRO."""
    zero: dict[str, Any] = {"stage": contender.stage, **dict.fromkeys(THEIR_BUCKETS, BUCKET)}
    if contender.offloads:
        zero["offload_optimizer"] = {"device": "cpu"}
        if contender.stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": case.batch_size,
        "gradient_accumulation_steps": case.num_micro_batches,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({"bf16": {"enabled": True}} if case.dtype == "bf16" else {}),
    }


def _theirs(contender: Contender, case: Case, rank: int) -> Step:
    import deepspeed

    import tds

    tds.quiet()
    model = _model(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPSILON, weight_decay=0.0, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(contender, case))

    def step(number: int) -> float:
        total = torch.zeros(())
        for each in range(case.num_micro_batches):
            loss = engine(*case.batch(rank, number, each))
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / case.num_micro_batches
        torch.distributed.all_reduce(total)
        return float(total) / case.replicas

    return step


PATIENCE_S = 600.0


class Team:
    """The processes of ``contender``; they wait in a pipe between two turns."""

    def __init__(self, contender: Contender, case: Case, threads: int, start_method: str) -> None:
        self.contender = contender
        self._place = tempfile.TemporaryDirectory(prefix="megatron-zero-")
        context = multiprocessing.get_context(start_method)
        self._pipes: list[Connection] = []
        self._ranks: list[Any] = []
        for rank in range(case.replicas):
            near, far = context.Pipe()
            args = (contender, case, rank, threads, Path(self._place.name), far)
            self._ranks.append(context.Process(target=_rank, args=args, daemon=True))  # type: ignore[attr-defined]
            self._ranks[-1].start()
            far.close()
            self._pipes.append(near)

    def hear(self) -> list[Any]:
        """Return what each rank tells.

        Raises:
            RuntimeError: one failed; its traceback is the message.
        """
        told = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(PATIENCE_S):
                raise RuntimeError(f"{self.contender.name}: rank {rank} did not answer within {PATIENCE_S:g} s")
            try:
                told.append(pipe.recv())
            except EOFError:
                told.append(f"rank {rank} died")
        failures = [each for each in told if isinstance(each, str)]
        if failures:
            raise RuntimeError(f"{self.contender.name}: {failures[0]}")
        return told

    def ask(self, what: str, first: int, number: int) -> list[Any]:
        """Let the ranks take ``number`` steps from step ``first``, or measure the memory of one; see ``hear``."""
        for pipe in self._pipes:
            pipe.send((what, first, number))
        return self.hear()

    def dismiss(self) -> None:
        """Let the processes end."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self._ranks:
            process.join(timeout=20.0)
            if process.is_alive():
                process.kill()
        self._place.cleanup()


def _rank(contender: Contender, case: Case, rank: int, threads: int, place: Path, pipe: Connection) -> None:
    try:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.replicas), LOCAL_WORLD_SIZE=str(case.replicas),
            MASTER_ADDR="localhost", MASTER_PORT="0", DS_ACCELERATOR="cpu",
        )  # fmt: skip
        torch.set_num_threads(threads)
        inherited = bytes_alive()  # a forked process has what its parent had
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about names that DeepSpeed uses
        store = dist.FileStore(str(place / "store"), case.replicas)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=case.replicas)
        step = build(contender, case, rank)
        pipe.send(b"ready")
        while (order := pipe.recv()) is not None:
            what, first, number = order
            pipe.send(_timed(step, first, number) if what == "steps" else _memory(step, first, inherited))
    except EOFError:
        return
    except BaseException:
        pipe.send(traceback.format_exc())


def _timed(step: Any, first: int, number: int) -> tuple[float, float, list[float]]:
    """Return seconds, processor seconds and the losses."""
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    losses = [step(each) for each in range(first, first + number)]
    return time.perf_counter() - start, time.process_time() - cpu, losses


def _memory(step: Any, first: int, inherited: int) -> tuple[int, int]:
    """Return the bytes that are kept between steps, and the most that a step adds."""
    kept, added = measure(lambda: step(first))
    return kept - inherited, added
