"""Memory and step of our ZeRO 0 to 3 and offload, beside the formulas and DeepSpeed's own ZeRO, in one run.

    python benchmarks/zero.py --json zero.json
    python benchmarks/zero.py --dtypes bf16 --stages 1 3 --rounds 3

Every contender is a set of processes, one for each replica, that trains the same GPT of plain ``torch.nn`` from the
same weights on the same tokens (the first losses must agree). They take turns, in an order that rotates; medians over
rounds are reported, and ratios within rounds. Bytes are counted in tensors, on the rank that has most: those that are
kept between two steps, and the most that a step adds (torch's profiler); the formulas are those of --dry-run. On CPUs
what is offloaded lies in the same memory and counts. A stage of DeepSpeed's that fails is told with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
import torch
import torch.distributed as dist

from benchmarks import step_profile
from benchmarks.contenders import GPTSizes, PlainGPT
from benchmarks.turns import Team, rotated, surroundings

# The contenders and their processes: a plain GPT on each replica, by our ZeRO or DeepSpeed's own.
#
# | name | what it is |
# |---|---|
# | ours 0 ... 3 | ``build_engine`` with ``--zero-stage``, as a run does it |
# | DeepSpeed 0 ... 3 | ``deepspeed.initialize`` of the same module with its own ``zero_optimization`` |
# | ... offload | ``--offload-optimizer``, with stage 3 ``--offload-parameters`` too; the keys of the same meaning |
#
# All have the same weights, batches, buckets of 32 MiB, AdamW of torch and no clipping.

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
    from megatron.training.mock_data import mock_tokenizer
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


class Replica:
    """One replica of a contender: takes steps and counts bytes, at once with the others."""

    def __init__(self, contender: Contender, case: Case, rank: int) -> None:
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about names that DeepSpeed uses
        self._inherited = step_profile.bytes_alive()  # a forked process has what its parent had
        self._step = build(contender, case, rank)

    def steps(self, first: int, number: int) -> tuple[float, float, list[float]]:
        """Take steps from ``first`` on; return seconds, processor seconds and the losses."""
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        losses = [self._step(each) for each in range(first, first + number)]
        return time.perf_counter() - start, time.process_time() - cpu, losses

    def memory(self, number: int) -> tuple[int, int]:
        """Take a step; return the bytes that are kept between steps, and the most that it adds."""
        kept, added = step_profile.measure(lambda: self._step(number))
        return kept - self._inherited, added


def expected(contender: Contender, case: Case) -> tuple[int, int]:
    """Return the bytes of ours that are kept between steps, and those of gradients, activations and gathered weights.

    They are those of ``megatron.costs.cost``. On CPUs what is offloaded lies in the same memory, so it counts.
    """
    from megatron.models import registry
    from megatron.training.estimates import zero_of

    config = config_of(contender, case)
    settings: dict[str, Any] = {"micro_batch_size": case.batch_size, "dtype": case.dtype}
    costs = registry.costs_of(config, is_on_cpu=True)
    units = case.sizes.num_layers + 3
    (memory,) = costs.memory_per_stage([0, units], zero=zero_of(config, case.replicas), **settings)
    kept = memory.weights + memory.optimizer + memory.host
    return kept, memory.gradients + memory.gathered + memory.activations + memory.logits


SMOKE = "--num-layers 2 --hidden-size 32 --vocab-size 64 --seq-length 16 --rounds 1 --steps 1 --dtypes fp32"
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
"""Of the first losses, as part of them."""


@dataclass
class Record:
    """What one contender told: seconds a step by round, losses, bytes on the rank that has most, and why it failed.

    Args:
        expected_kept, expected_added: by the formulas, of ours.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    kept: int = 0
    added: int = 0
    expected_kept: int | None = None
    expected_added: int | None = None
    failed: str = ""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the benchmark's options."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3], help="default: all")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(TOLERANCE), default=["fp32", "bf16"], help="default: both")
    parser.add_argument("--no-offload", action="store_true", help="leave out the contenders that offload")
    parser.add_argument("--replicas", type=int, default=2, help="processes of each contender (default: 2)")
    parser.add_argument("--num-layers", type=int, default=6, help="default: 6")
    parser.add_argument("--hidden-size", type=int, default=384, help="a multiple of 32 (default: 384)")
    parser.add_argument("--vocab-size", type=int, default=8192, help="default: 8192")
    parser.add_argument("--seq-length", type=int, default=256, help="default: 256")
    parser.add_argument("--batch-size", type=int, default=2, help="samples of a micro-batch (default: 2)")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a step (default: 2)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender that count (default: 7)")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps in a turn (default: 2)")
    parser.add_argument("--smoke", action="store_true", help=f"a run of seconds that says nothing: {SMOKE}")
    parser.add_argument("--json", type=Path, help="write the result here too")
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args([*SMOKE.split(), *words] if "--smoke" in words else words)
    if min(args.replicas, args.rounds, args.steps, args.micro_batches, args.batch_size, args.num_layers) < 1:
        parser.error("--replicas, --rounds, --steps, --micro-batches, --batch-size and --num-layers must be at least 1")
    if args.hidden_size % 32:
        parser.error(f"--hidden-size must be a multiple of 32, got {args.hidden_size}")
    return args


def case_of(args: argparse.Namespace, dtype: str) -> Case:
    """Return what is trained in ``dtype``."""
    sizes = GPTSizes(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.hidden_size // 32,
        vocab_size=args.vocab_size,
        seq_length=args.seq_length,
    )
    return Case(
        sizes=sizes,
        dtype=dtype,
        batch_size=args.batch_size,
        num_micro_batches=args.micro_batches,
        replicas=args.replicas,
    )


def measure(case: Case, args: argparse.Namespace, start_method: str) -> dict[str, Record]:
    """Let the contenders of one case take their turns; the first warms up and does not count."""
    records: dict[str, Record] = {}
    teams: dict[str, Team] = {}
    threads = max(1, len(os.sched_getaffinity(0)) // case.replicas)
    try:
        for contender in contenders(args.stages, not args.no_offload):
            records[contender.name] = _record(contender, case)
            teams[contender.name] = Team(
                contender.name, Replica, (contender, case), size=case.replicas, start_method=start_method,
                has_group=True, threads=threads,
            )  # fmt: skip
            _ask(teams, records, contender.name)
        for number in range(args.rounds + 1):
            for name in rotated(teams, number):
                answer = _ask(teams, records, name, "steps", number * args.steps, args.steps)
                if answer:
                    _note(records[name], answer, args.steps, counts=number > 0)
        for name in list(teams):
            held = _ask(teams, records, name, "memory", (args.rounds + 1) * args.steps) or [(0, 0)]
            records[name].kept, records[name].added = (max(each) for each in zip(*held, strict=True))
    finally:
        for team in teams.values():
            team.close()
    check_losses(case, records)
    return records


def _record(contender: Contender, case: Case) -> Record:
    kept, added = expected(contender, case) if contender.whose == "ours" else (None, None)
    return Record(expected_kept=kept, expected_added=added)


def _ask(teams: dict[str, Team], records: dict[str, Record], name: str, what: str = "", *args: int) -> list[Any]:
    """Return what a team answers, or wait until it is ready; a peer's that fails is closed, and its record says why.

    Raises:
        RuntimeError: one of ours has failed.
    """
    try:
        return teams[name].ask(what, *args) if what else teams[name].ready()
    except RuntimeError as error:
        if name.startswith("ours"):
            raise
        records[name].failed = str(error).strip().splitlines()[-1]
        teams.pop(name).close()
        return []


def _note(record: Record, answers: list[Any], steps: int, *, counts: bool) -> None:
    record.losses += answers[0][2]
    if counts:
        record.seconds.append(max(seconds for seconds, _, _ in answers) / steps)
        record.cpu_s.append(sum(cpu_s for _, cpu_s, _ in answers) / steps)


def check_losses(case: Case, records: dict[str, Record]) -> None:
    """Check that all contenders began with the same loss.

    Raises:
        RuntimeError: they did not: they do not train the same model.
    """
    first = {name: record.losses[0] for name, record in records.items() if record.losses}
    if first and max(first.values()) - min(first.values()) > TOLERANCE[case.dtype] * max(first.values()):
        raise RuntimeError(f"the first losses of {case.dtype} must agree, got {first}")


def ratios(records: dict[str, Record], name: str) -> list[float]:
    """Return the step of ``name`` over that of DeepSpeed's own of the same kind, by round; none if either has none."""
    peer = records.get(name.replace("ours", "DeepSpeed"))
    return [] if peer is None else [mine / its for mine, its in zip(records[name].seconds, peer.seconds, strict=False)]


def table(case: Case, records: dict[str, Record]) -> str:
    """Return the result as lines of text."""
    sizes = case.sizes
    lines = [
        f"{case.dtype}: {sizes.text}, hidden {sizes.hidden_size}, {case.replicas} replicas, {case.num_micro_batches} "
        f"micro-batches of {case.batch_size} x {sizes.seq_length}",
        f"  {'contender':22}{'kept MB':>9}{'formula':>9}{'+ a step':>10}{'formula':>9}{'s a step':>10}{'of theirs':>11}"
        f"{'last loss':>11}",
    ]
    for name, record in records.items():
        if record.failed:
            lines.append(f"  {name:22}failed: {record.failed}")
            continue
        found = ratios(records, name) if name.startswith("ours") else []
        ratio = f"{statistics.median(found):11.2f}" if found else f"{'':11}"
        parts = [record.kept, record.expected_kept, record.added, record.expected_added]
        kept, by_kept, added, by_added = (f"{each / 1e6:.1f}" if each is not None else "" for each in parts)
        seconds = statistics.median(record.seconds)
        lines.append(
            f"  {name:22}{kept:>9}{by_kept:>9}{added:>10}{by_added:>9}{seconds:>10.3f}{ratio}{record.losses[-1]:>11.4f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, start_method: str = "fork") -> dict[str, Any]:
    """Measure, print the tables, write the JSON."""
    args = parse_args(argv)
    told: dict[str, Any] = {**surroundings(), "options": {name: str(value) for name, value in vars(args).items()}}
    told["cases"] = {}
    for dtype in args.dtypes:
        case = case_of(args, dtype)
        records = measure(case, args, start_method)
        print(table(case, records), flush=True)
        told["cases"][dtype] = {
            name: asdict(record) | {"ratios": ratios(records, name) if name.startswith("ours") else []}
            for name, record in records.items()
        }
    if args.json:
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return told


if __name__ == "__main__":
    main()
