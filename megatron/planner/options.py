"""Flags of tools/plan.py, and their conversion to a planning task."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron import hub
from megatron.arguments import config_file, parse
from megatron.arguments.argparse_parsers import OneLineParser
from megatron.arguments.flag_values import all_options, scan
from megatron.arguments.model_choice import choose_model
from megatron.arguments.scan import Scan
from megatron.arguments.sources import PROGRAM
from megatron.config import Config
from megatron.config.family import DECODER_FAMILY
from megatron.errors import ConfigError
from megatron.models.architectures import list_model_types
from megatron.models.registry import FAMILIES
from megatron.planner.layout import Layout, layout_of
from megatron.planner.machine import DATA_SHEETS, Machine, check_nodes, machine_of
from megatron.planner.search import SearchSpec, divisors
from tds.schedule.simulate import AUTO

# From the command line to a planning task: the model, the machine, and the layouts to consider.
#
# The training program's flags describe the model and the layout. ``megatron.arguments.parse`` reads and checks them. A
# flag that has no effect on a plan is rejected. Layers and width are required. Other defaults depend on the family:
#
# | | gpt2 | t5 | llama | mpt | bert |
# |---|---|---|---|---|---|
# | --num-attention-heads | as in GPT-3 and GPT-2 | heads of size 64 up to a width of 1024, otherwise 128 | | | |
# | --seq-length | 2048 | 512 for the encoder | 2048 | 2048 | 512 |
# | --vocab-size | 50304 | 32128 | 32000 | 50368 | 30592 |

SMALL_HIDDEN_SIZE = 1024
"""Width up to which published models have heads of size 64; heads of wider models mostly have size 128."""
TOKENS_PER_STEP = 4 * 2**20
"""Approximate number of tokens per step without --global-batch-size."""
LAYOUT_FIELDS = {
    "model_parallel_size": "tensor",
    "pipe_parallel_size": "pipe",
    "pipeline_chunks": "chunks",
    "pipeline_schedule": "schedule",
    "pipeline_placement": "lies",
    "batch_size": "micro_batch_size",
    "gas": "num_micro_batches",
    "zero_stage": "zero_stage",
    "sequence_parallel": "sequence_parallel",
    "checkpoint_activations": "recompute",
    "recompute_granularity": "recompute",
    "expert_model_parallel_size": "expert",
}
"""Field of a section -> field of ``Layout``. A search varies these unless they are given."""
OTHER_PLAN_FIELDS = (
    "offload_optimizer", "offload_parameters", "checkpoint_num_layers", "partition_activations", "checkpoint_in_cpu",
    "dtype", "optimizer", "compile", "overlap_grad_reduce", "reset_attention_mask", "context_parallel_size",
    "cp_comm_type", "hierarchical_context_parallel_sizes", "expert_tensor_parallel_size", "fp8_format", "fp8_recipe",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
)  # fmt: skip
"""Other fields that affect a plan, in addition to the fields of the model and its sequence lengths."""
BATCH_FIELDS = ("model_parallel_size", "pipe_parallel_size", "batch_size")
"""Fields that determine the samples per step together with --gas."""
TENSOR_FIELDS, PIPE_FIELDS = (
    ("sequence_parallel",),
    ("pipeline_chunks", "pipeline_schedule", "pipeline_auto_schedules", "pipeline_placement", "pipeline_split_rank"),
)
"""Fields that take effect only with several tensor ranks, or several stages."""


@dataclass(frozen=True, kw_only=True)
class PlanningTask:
    """The planning task from the command line.

    Args:
        layout: the layout to evaluate with --fits; None searches for the best layouts.
        assumed: settings that were not given, as flags.
        config_file: --config path; None without this flag.
        file_fields: fields that this file sets to values other than the defaults.
        is_of_run: this file is a run's config.json.
    """

    config: Config
    machine: Machine
    search_spec: SearchSpec
    layout: Layout | None
    tokens: float | None
    assumed: tuple[str, ...]
    config_file: str | None = None
    file_fields: frozenset[str] = frozenset()
    is_of_run: bool = False


def planning_task(flags: argparse.Namespace, training_args: Sequence[str]) -> PlanningTask:
    """Build the planning task from the planner's ``flags`` and the training flags in ``training_args``.

    Raises:
        ConfigError: lists all problems with training flags, or the first problem with the planner's flags.
    """
    machine = machine_of(flags)
    world = flags.gpus or machine.devices_per_node
    check_nodes(world, machine)
    checkpoint_values, settings_file = from_checkpoint(flags.model, training_args)
    words, assumed = with_defaults(flags.model, training_args, machine, checkpoint_values)
    if settings_file is not None:
        assumed.append(f"the sizes of {settings_file}")
        words += ["--finetune"] * (
            settings_file.name == "config.json" and "--finetune" not in words
        )  # only weights are loaded
    cli_values, scanned = scan(training_args, (), flags.model).values, scan_with_config_file(training_args, flags.model)
    given_values = {**scanned.values, **checkpoint_values}
    if flags.fits:
        if flags.global_batch_size:
            words += ["--global-batch-size", str(flags.global_batch_size)]
        config = checked_config(words, world, flags.model, checkpoint_values)
        layout = layout_of(config, world)
        search_spec = SearchSpec(world_size=world, global_batch_size=layout.global_batch_size)
        if "batch_size" not in given_values:
            assumed.append(f"--batch-size {layout.micro_batch_size}")
    else:
        layout, config = None, with_placeholder_sizes(words, given_values, world, flags.model, checkpoint_values)
        batch = flags.global_batch_size or _batch_size(config, world, given_values, cli_values, assumed)
        search_spec = _search_spec(config, cli_values, world, batch, flags.top or 10)
    assumed += _default_flags(config, given_values)
    defaults = {option.name: option.default for _, option in all_options()}
    path = scanned.values.get("config")
    assumed += ["--gpu h100-80g"] * (not flags.gpu and not flags.machine) + [f"--gpus {world}"] * (not flags.gpus)
    return PlanningTask(
        config=config,
        machine=machine,
        search_spec=search_spec,
        layout=layout,
        tokens=flags.tokens,
        assumed=tuple(assumed),
        config_file=path,
        file_fields=frozenset(
            name for name in scanned.values.keys() - cli_values.keys() if scanned.values[name] != defaults[name]
        ),
        is_of_run=path is not None and config_file.RUN_MARKER_KEY in config_file.read_file(path).values,
    )


def scan_with_config_file(training_args: Sequence[str], family: str) -> Scan:
    """Scan ``training_args`` and complete the settings from the --config file."""
    scanned = scan(training_args, (), family)
    config_file.merge_config_file(scanned)
    return scanned


def _search_spec(
    config: Config, given_values: Mapping[str, Any], world: int, batch: int, num_layouts: int
) -> SearchSpec:
    """Specify a search with the command line's layout flags fixed, except for the schedule "auto".

    The layout in a --config file is not fixed, since that is the run's current layout.
    """
    base_layout = layout_of(config, config.parallel.replica_size)
    names = {LAYOUT_FIELDS[name] for name in given_values if name in LAYOUT_FIELDS and given_values[name] != AUTO}
    fixed = {name: getattr(base_layout, name) for name in names}
    return SearchSpec(
        world_size=world, global_batch_size=batch, num_layouts=num_layouts, fixed=fixed, base_layout=base_layout
    )


def _default_flags(config: Config, given_values: Mapping[str, Any]) -> Iterator[str]:
    """Yield flags for settings that the user did not set: recipe, family and optimizer defaults."""
    recipe = scan(FAMILIES[config.family].recipe, (), config.family).spelling
    yield from (text for name, text in recipe.items() if name not in given_values)
    for name, flag in FAMILIES[config.family].follows.items():
        if name not in given_values:
            yield (
                f"{flag} {getattr(config.family_config if hasattr(config.family_config, name) else config.model, name)}"
            )
    if "optimizer" not in given_values:
        yield f"--optimizer {config.optimizer.optimizer}"


def with_placeholder_sizes(
    words: Sequence[str],
    given_values: Mapping[str, Any],
    world: int,
    family: str,
    checkpoint_values: Mapping[str, Any] = MappingProxyType({}),
) -> Config:
    """Return a checked Config for a search, with placeholder sizes for the searched axes.

    If given flags require several tensor ranks or stages, the smallest size that passes the checks is used.

    Raises:
        ConfigError: lists all problems with the first sizes tried.
    """
    tensor = _candidate_sizes(given_values, "model_parallel_size", TENSOR_FIELDS, world)
    pipe = _candidate_sizes(given_values, "pipe_parallel_size", PIPE_FIELDS, world)
    first_error, context = None, max(int(given_values.get("context_parallel_size", 1)), 1)
    experts = max(int(given_values.get("expert_model_parallel_size", 1)), 1)
    for t, p in product(tensor, pipe):
        size_flags = ["--model-parallel-size", str(t)] * ("model_parallel_size" not in given_values and t > 1)
        size_flags += ["--pipe-parallel-size", str(p)] * ("pipe_parallel_size" not in given_values and p > 1)
        try:
            return checked_config(
                [*words, *size_flags], max(t, 1) * max(p, 1) * context * experts, family, checkpoint_values
            )
        except ConfigError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _candidate_sizes(
    given_values: Mapping[str, Any], name: str, dependent_fields: Sequence[str], world: int
) -> list[int]:
    if name in given_values:
        return [int(given_values[name])]
    return divisors(world)[1:9] or [1] if any(flag in given_values for flag in dependent_fields) else [1]


def family_of_load(training_args: Sequence[str]) -> str | None:
    """Return the model family that --config selects, otherwise the family of the model in --load.

    --config selects a family by the run that wrote the file, or by a model name in it. The result is None if neither
    flag determines a family.
    """
    choice = choose_model(training_args, {}, DECODER_FAMILY)
    if choice.source != PROGRAM:
        return choice.family
    flags = dict(scan(training_args).values)
    if "config" in flags:
        with suppress(ConfigError):
            values = config_file.read_file(flags["config"]).values
            if values.get(config_file.RUN_MARKER_KEY) in FAMILIES:
                return str(values[config_file.RUN_MARKER_KEY])
            flags.setdefault("load", values.get("load"))
    path = flags.get("load")
    if path is None:
        return None
    from megatron.checkpoint import checkpoint_args  # importing takes 10 ms; not needed for --help

    return checkpoint_args.detect_family(Path(path))


def from_checkpoint(family: str, training_args: Sequence[str]) -> tuple[dict[str, Any], Path | None]:
    """Read settings (field -> value) from --load; also return the path of the file with these settings.

    Only settings that the user did not set are returned. Without --load, the result is ({}, None).

    Raises:
        ConfigError: --load names a folder without a model.
        CheckpointError: raised by ``checkpoint_args.load_checkpoint_args``.
    """
    scanned = scan_with_config_file(training_args, family)
    path = scanned.values.get("load")
    if path is None:
        return {}, None
    from megatron.checkpoint import checkpoint_args

    source = checkpoint_args.read_source(Path(path), family)
    if source is None or isinstance(source.path, str):
        raise ConfigError(
            hub.load_problem(path)
            or f"--load must name a Hugging Face folder or a run, got {path}, which contains no model yet"
        )
    return checkpoint_args.load_checkpoint_args(scanned, {}), source.path


def with_defaults(
    family: str,
    training_args: Sequence[str],
    machine: Machine,
    checkpoint_values: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[list[str], list[str]]:
    """Complete the training flags with the family's defaults; return them and the assumed flags.

    Args:
        checkpoint_values: field -> value from a checkpoint; overrides the family's recipe.

    Raises:
        ConfigError: the layer count or the width is missing.
    """
    scanned, family_defaults = scan_with_config_file(training_args, family), FAMILIES[family]
    given_values = {**scanned.values, **checkpoint_values}
    recipe = scan(family_defaults.recipe, (), family).spelling
    # names of the settings from a checkpoint or --config file; a flag from the recipe would override them
    fixed = given_values.keys() - scan(training_args, (), family).values.keys()
    words = [word for name, text in recipe.items() if name not in fixed for word in text.split()]
    words, assumed = [*words, *training_args], []
    size_flags = {"num_layers": "--num-layers", "hidden_size": "--hidden-size"}
    missing = [flag for name, flag in size_flags.items() if name not in given_values]
    if "enc_layers" in given_values and "dec_layers" in given_values:
        missing = [flag for flag in missing if flag != "--num-layers"]
    if missing and not scanned.problems:
        raise ConfigError(f"the size of the model is required, got no {' and no '.join(missing)}. Set both")

    def assume(*flag_words: Any) -> None:
        words.extend(map(str, flag_words))
        assumed.append(" ".join(map(str, flag_words)))

    hidden = int(given_values.get("hidden_size") or 0)
    if hidden and "num_attention_heads" not in given_values:
        size = 128 if hidden % 128 == 0 and hidden > SMALL_HIDDEN_SIZE else 64
        heads = family_defaults.heads.get(hidden, hidden // size if hidden % size == 0 else 0)
        if heads:
            assume("--num-attention-heads", heads)
    length_field = "enc_seq_length" if family_defaults.model_type == "encoder-decoder" else "seq_length"
    if length_field not in given_values:
        max_length = checkpoint_values.get("max_position_embeddings", family_defaults.length)
        assume(f"--{length_field.replace('_', '-')}", min(family_defaults.length, max_length))
    if "vocab_size" not in given_values:
        assume("--vocab-size", family_defaults.vocabulary)
    if "dtype" not in given_values:
        assume("--bf16" if given_values.get("fp8_format") else f"--{machine.first_dtype}")
    return words, assumed


def checked_config(
    words: Sequence[str], world_size: int, family: str, checkpoint_values: Mapping[str, Any] = MappingProxyType({})
) -> Config:
    """Build a checked Config from the flags ``words`` and a checkpoint's ``checkpoint_values``.

    Raises:
        ConfigError: lists all problems, including flags that have no effect on a plan.
    """
    config = parse(
        [*words, "--dry-run"],
        world_size=world_size,
        env={},
        family=family,
        accepts_model=FAMILIES[family].model_type == "decoder",
        checkpoint_args=lambda *_: dict(checkpoint_values),
    )
    effective = {
        "seq_length",
        "requested_global_batch_size",
        "dry_run",
        "load",
        "finetune",
        "config",
        *LAYOUT_FIELDS,
        *OTHER_PLAN_FIELDS,
    }
    for section in (config.model, config.family_config):
        effective |= set(vars(section))
    cli_values = scan(
        words, (), family
    ).values  # a --config file may have flags without effect, since it is for a full run
    ignored = [
        f"--{name.replace('_', '-')}" for name in config.explicit_fields if name in cli_values and name not in effective
    ]
    if ignored:
        raise ConfigError(f"{', '.join(ignored)} has no effect on a plan. Remove it")
    return config


def _batch_size(
    config: Config, world: int, given_values: Mapping[str, Any], cli_values: Mapping[str, Any], assumed: list[str]
) -> int:
    """Return the samples per step: from --gas or a file, otherwise the device count times a power of two.

    The power of two is chosen such that a step has about ``TOKENS_PER_STEP`` tokens.

    Raises:
        ConfigError: --gas is given, but not the other settings that determine the samples per step.
    """
    micro = config.batch.micro_batch_size
    if requested := given_values.get("requested_global_batch_size"):
        return int(requested)
    if "gas" in given_values:
        missing = [f"--{name.replace('_', '-')}" for name in BATCH_FIELDS if name not in given_values]
        if missing and "gas" in cli_values:
            raise ConfigError(
                f"--gas in a search requires the samples per step, which also depend on {', '.join(missing)}. Set "
                "--global-batch-size or these flags, or remove --gas"
            )
        return config.batch.gas * micro * max(config.parallel.data_parallel_size(world), 1)
    min_batch = max(world // config.parallel.context_parallel_size, 1) * (micro if "batch_size" in given_values else 1)
    batch = min_batch * 2 ** max(0, round(math.log2(TOKENS_PER_STEP / config.tokens_per_sample / min_batch)))
    assumed.append(f"--global-batch-size {batch}")
    return int(batch)


# The planner's own flags.


def make_parser(description: str) -> argparse.ArgumentParser:
    """Build the parser for the planner's flags."""
    parser = OneLineParser(
        prog="plan.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=(*FAMILIES, *list_model_types()), help="family or Hugging Face model type")
    parser.add_argument("--gpus", type=positive_int, metavar="N", help="total number of devices (default: one node)")
    parser.add_argument("--gpu", metavar="NAME", help=f"device: {', '.join(DATA_SHEETS)} (default h100-80g)")
    parser.add_argument("--machine", type=Path, metavar="FILE", help="device and links measured by --calibrate")
    parser.add_argument(
        "--gpus-per-node", type=positive_int, metavar="N", help="devices per node (default 8, or FILE's)"
    )
    parser.add_argument(
        "--memory", type=positive_number, metavar="GB", help="memory of one device (default: from --gpu or FILE)"
    )
    parser.add_argument(
        "--global-batch-size", type=positive_int, metavar="B", help="samples per step (default: about 4 Mi tokens)"
    )
    parser.add_argument(
        "--tokens", type=positive_number, metavar="N", help="also report the days for N tokens, such as 300e9"
    )
    parser.add_argument("--fits", action="store_true", help="evaluate the given layout and how to make it fit")
    parser.add_argument("--top", type=positive_int, metavar="N", help="number of layouts to rank (default 10)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="measure this machine (30 s) and write FILE")
    parser.add_argument("--ranks", type=positive_int, metavar="N", help="with --calibrate: simultaneous processes")
    parser.add_argument("--device", metavar="KIND", help="with --calibrate: cpu or cuda (default: best available)")
    return parser


def check_flags(parser: argparse.ArgumentParser, flags: argparse.Namespace, training_args: Sequence[str]) -> None:
    """Exit with code 2 if the flags are not compatible."""
    if flags.calibrate is not None:
        others = [name for name, value in vars(flags).items() if value and name not in ("calibrate", "ranks", "device")]
        if others or training_args:
            got = " ".join([*(f"--{name.replace('_', '-')}" for name in others), *training_args])
            parser.error(f"--calibrate FILE cannot be combined with {got}. Calibrate, then plan with --machine FILE")
        return
    for name in ("ranks", "device"):
        if getattr(flags, name):
            parser.error(f"--{name} has no effect without --calibrate. Remove it")
    if flags.model is None:
        if path := scan(training_args).values.get("load"):
            parser.error(
                hub.load_problem(path)
                or f"--load must name a Hugging Face folder or a run with a checkpoint, got {path}, which "
                "contains no supported model. Correct the path, or set --model and the sizes"
            )
        if path := scan(training_args).values.get("config"):
            try:
                config_file.read_file(path)
            except ConfigError as error:  # more specific than the error for a missing --model
                parser.error(str(error))
        parser.error(
            f"--model is required, one of {', '.join(FAMILIES)}, unless --load names a folder or --config the "
            "config.json of a run, which contain the family"
        )
    if flags.gpu and flags.machine:
        parser.error("--gpu (a known device) and --machine (a file) cannot be combined. Use one of them")
    if flags.fits and flags.top:
        parser.error("--top (layouts to rank) and --fits (one layout) cannot be combined. Use one of them")


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def positive_number(text: str) -> float:
    """Parse a number above 0, such as 300e9."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, such as 300e9, got {text!r}")
    return value
