"""From the words of the command line to a question: which model, on what machine, in which layouts.

What describes the model or a layout is the training's own flags, read and checked by ``megatron.config.parse``; a flag
that changes nothing here is refused. What is left out of the model is what follows for its family:

| | gpt2 | t5 | llama | mpt | bert |
|---|---|---|---|---|---|
| --num-attention-heads | heads of 128 numbers, or of 64 | | | | |
| --seq-length | 2048 | 512 to the encoder | 2048 | 2048 | 512 |
| --vocab-size | 50304 | 32128 | 32000 | 50368 | 30592 |
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from megatron.config import Config, parse
from megatron.config.option import FAMILIES
from megatron.config.scan import scan
from megatron.errors import ConfigError
from megatron.planner.devices import SHEETS, device
from megatron.planner.layout import Layout, layout_of
from megatron.planner.lines import RECIPE
from megatron.planner.machine import Machine
from megatron.planner.search import Search

LENGTHS = {"gpt2": 2048, "t5": 512, "llama": 2048, "mpt": 2048, "bert": 512}
VOCABULARIES = {"gpt2": 50304, "t5": 32128, "llama": 32000, "mpt": 50368, "bert": 30592}
TOKENS = 4 * 2**20
"""Of a step, about, where --global-batch-size is not given."""
LAYOUT = {
    "model_parallel_size": "tensor",
    "pipe_parallel_size": "pipe",
    "pipeline_chunks": "chunks",
    "pipeline_schedule": "schedule",
    "batch_size": "micro_batch_size",
    "gas": "num_micro_batches",
    "zero_stage": "zero_stage",
    "sequence_parallel": "sequence_parallel",
    "checkpoint_activations": "recompute",
    "recompute_granularity": "recompute",
}
"""Field of a section -> field of ``Layout``: what a search may vary, unless it is given."""
TAKEN = (
    "offload_optimizer", "offload_parameters", "checkpoint_num_layers", "partition_activations", "checkpoint_in_cpu",
    "dtype", "optimizer", "compile", "overlap_grad_reduce", "reset_attention_mask",
)  # fmt: skip
"""Other fields that are read, beside those of the model and its lengths."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the command line asks.

    Args:
        layout: the one to look at with --fits; None: the best ones are sought.
        assumed: what was not said, in words.
    """

    config: Config
    machine: Machine
    wanted: Search
    layout: Layout | None
    tokens: float | None
    assumed: tuple[str, ...]


class OneLineParser(argparse.ArgumentParser):
    """Ends with code 2 and one line, without the usage in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of the flags that are the planner's own."""
    parser = OneLineParser(
        prog="plan.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=tuple(FAMILIES), help="family of the model")
    parser.add_argument("--gpus", type=positive, metavar="N", help="devices in all (default: those of one node)")
    parser.add_argument("--gpu", metavar="NAME", help=f"kind of device: {', '.join(SHEETS)} (default h100-80g)")
    parser.add_argument("--machine", type=Path, metavar="FILE", help="device and links as --calibrate measured them")
    parser.add_argument("--gpus-per-node", type=positive, metavar="N", help="devices of a node (default 8, or as FILE)")
    parser.add_argument("--memory", type=number, metavar="GB", help="memory of a device (default: the device's own)")
    parser.add_argument(
        "--global-batch-size", type=positive, metavar="B", help="samples of a step (default: about 4 Mi tokens)"
    )
    parser.add_argument("--tokens", type=number, metavar="N", help="also tell the days for so many tokens, as 300e9")
    parser.add_argument("--fits", action="store_true", help="look at the one layout that is given, and how to fit it")
    parser.add_argument("--top", type=positive, metavar="N", help="layouts in the ranking (default 10)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="measure this machine, about 30 s, and write it")
    parser.add_argument("--ranks", type=positive, metavar="N", help="with --calibrate: processes that work at once")
    parser.add_argument("--device", metavar="KIND", help="with --calibrate: cpu or cuda (default: what is there)")
    return parser


def check_flags(parser: argparse.ArgumentParser, flags: argparse.Namespace, rest: Sequence[str]) -> None:
    """End with code 2 unless the flags go together."""
    if flags.calibrate is not None:
        others = [name for name, value in vars(flags).items() if value and name not in ("calibrate", "ranks", "device")]
        if others or rest:
            got = " ".join([*(f"--{name.replace('_', '-')}" for name in others), *rest])
            parser.error(f"--calibrate FILE measures and does nothing else, got {got} too. Plan with --machine FILE")
        return
    for name in ("ranks", "device"):
        if getattr(flags, name):
            parser.error(f"--{name} acts with --calibrate only. Leave it out")
    if flags.model is None:
        parser.error(f"--model must be given, one of {', '.join(FAMILIES)}")
    if flags.gpu and flags.machine:
        parser.error("--gpu names a known device and --machine a file: give one of them")
    if flags.fits and flags.top:
        parser.error("--top counts what is ranked, and --fits looks at one layout: give one of them")


def question(flags: argparse.Namespace, rest: Sequence[str]) -> Question:
    """Return what the planner's ``flags`` and the training's flags in ``rest`` ask.

    Raises:
        ConfigError: all problems of the training's flags, or one of the planner's.
    """
    machine = machine_of(flags)
    words, assumed = with_defaults(flags.model, rest)
    world = flags.gpus or machine.devices_per_node
    found = scan(rest, (), flags.model)
    fixed = {LAYOUT[name] for name in found.values if name in LAYOUT}
    if not flags.fits:
        grid = [int(found.values.get(name, 1)) for name in ("model_parallel_size", "pipe_parallel_size")]
        config = checked(words, max(grid[0], 1) * max(grid[1], 1), flags.model)
        batch = flags.global_batch_size or _batch_size(config, world, assumed)
        plain = layout_of(config, config.parallel.model_parallel_size * config.parallel.num_stages)
        values = {name: getattr(plain, name) for name in fixed}
        wanted = Search(world_size=world, global_batch_size=batch, number=flags.top or 10, fixed=values, plain=plain)
        return Question(
            config=config, machine=machine, wanted=wanted, layout=None, tokens=flags.tokens, assumed=tuple(assumed)
        )
    if flags.global_batch_size:
        words += ["--global-batch-size", str(flags.global_batch_size)]
    config = checked(words, world, flags.model)
    layout = layout_of(config, world)
    wanted = Search(world_size=world, global_batch_size=layout.global_batch_size)
    return Question(
        config=config, machine=machine, wanted=wanted, layout=layout, tokens=flags.tokens, assumed=tuple(assumed)
    )


def machine_of(flags: argparse.Namespace) -> Machine:
    """Return the machine that the flags name.

    Raises:
        ConfigError: there is no such device, or the file cannot be read.
    """
    machine = Machine.load(flags.machine) if flags.machine else device(flags.gpu or "h100-80g")
    if flags.gpus_per_node:
        machine = replace(machine, devices_per_node=flags.gpus_per_node)
    if flags.memory:
        machine = replace(machine, memory_bytes=int(flags.memory * 1e9))
    return machine


def with_defaults(family: str, rest: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words with those that follow for the family, and what was assumed."""
    given = scan(rest, (), family).values
    words, assumed = [*RECIPE[family], *rest], []

    def assume(flag: str, value: Any) -> None:
        words.extend((flag, str(value)))
        assumed.append(f"{flag} {value}")

    hidden = int(given.get("hidden_size") or 0)
    if hidden and "num_attention_heads" not in given:
        size = 128 if hidden % 128 == 0 else 64
        if hidden % size == 0:
            assume("--num-attention-heads", hidden // size)
    length, field = ("--enc-seq-length", "enc_seq_length") if family == "t5" else ("--seq-length", "seq_length")
    if field not in given:
        assume(length, LENGTHS[family])
    if "vocab_size" not in given:
        assume("--vocab-size", VOCABULARIES[family])
    return words, assumed


def checked(words: Sequence[str], world_size: int, family: str) -> Config:
    """Return the Config of ``words``, of which each acts on a plan.

    Raises:
        ConfigError: all problems at once.
    """
    config = parse([*words, "--dry-run"], world_size=world_size, env={}, family=family)
    own = {"seq_length", "requested_global_batch_size", "dry_run", *LAYOUT, *TAKEN}
    for section in (config.model, config.own):
        own |= set(vars(section))
    idle = [f"--{name.replace('_', '-')}" for name in config.given if name not in own]
    if idle:
        raise ConfigError(f"{', '.join(idle)} changes nothing in a plan. Leave it out")
    return config


def _batch_size(config: Config, world: int, assumed: list[str]) -> int:
    """Return the multiple of the world's size that comes nearest to ``TOKENS``."""
    batch = world * max(1, round(TOKENS / config.tokens_per_sample / world))
    assumed.append(f"--global-batch-size {batch}")
    return batch


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def number(text: str) -> float:
    """Return a number above 0, such as 300e9."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, such as 300e9, got {text!r}")
    return value
