"""What to paste: the variables of a run script and its flags, for one layout."""

from __future__ import annotations

import shlex
from typing import Any

from megatron.arguments.values import all_options
from megatron.config.option import Option
from megatron.config.scan import scan
from megatron.models.registry import FAMILIES
from megatron.planner.layout import Layout
from megatron.stages import by_default

TOLD = {
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "enc_seq_length", "dec_seq_length",
    "model_parallel_size", "pipe_parallel_size", "pipeline_chunks", "pipeline_schedule", "batch_size", "gas",
    "requested_global_batch_size", "zero_stage", "sequence_parallel", "checkpoint_activations", "recompute_granularity",
    "offload_optimizer", "offload_parameters", "dtype", "dry_run",
}  # fmt: skip
"""Fields that are among the variables or said of the layout."""


def variables(config: Any, layout: Layout, devices_per_node: int) -> dict[str, int]:
    """Return name -> value of what is set in the run script or before it; nodes are whole, or there is one."""
    model, own, world = config.model, config.own, layout.world_size
    on_node = min(devices_per_node, world)
    lengths = {"SEQLEN": config.batch.seq_length}
    if own.is_encoder_decoder:
        lengths = {"ENC_SEQLEN": own.enc_seq_length, "DEC_SEQLEN": own.dec_seq_length}
    layers = {} if own.is_encoder_decoder and own.enc_layers != own.dec_layers else {"NLAYERS": model.num_layers}
    if own.is_encoder_decoder and own.enc_layers == own.dec_layers:
        layers = {"NLAYERS": own.enc_layers}
    found = vars(model) | vars(own)
    extra = {name: found[field] for name, field in FAMILIES[config.family].variables.items()}
    return {
        "GPUS_PER_NODE": on_node,
        "NNODES": world // on_node,
        "pp_size": layout.pipe,
        "mp_size": layout.tensor,
        **layers,
        "NHIDDEN": model.hidden_size,
        "NHEADS": model.num_attention_heads,
        **extra,
        **lengths,
        "BATCHSIZE": layout.micro_batch_size,
        "GAS": layout.num_micro_batches,
    }


def flags(config: Any, layout: Layout) -> list[str]:
    """Return the words behind the run script: what has no variable there."""
    words = [f"--{layout.dtype}"]
    if schedule := said_schedule(layout):
        words += ["--pipeline-schedule", schedule]
    if layout.chunks > 1:
        words += ["--pipeline-chunks", str(layout.chunks)]
    if layout.zero_stage:
        words += ["--zero-stage", str(layout.zero_stage)]
    if layout.recompute == "full":
        words += ["--checkpoint-activations"]
    elif layout.recompute == "selective":
        words += ["--recompute-granularity", "selective"]
    words += ["--sequence-parallel"] * layout.sequence_parallel
    words += ["--offload-optimizer"] * layout.offload_optimizer
    words += ["--offload-parameters"] * layout.offload_parameters
    return words + given_flags(config)


def said_schedule(layout: Layout) -> str | None:
    """Return the schedule where it is none that follows from stages and chunks."""
    return layout.schedule if layout.pipe > 1 and layout.schedule != by_default(layout.chunks) else None


def given_flags(config: Any) -> list[str]:
    """Return the flags that were given and are told neither by variables nor by the layout."""
    family = FAMILIES[config.family]
    told = TOLD | set(family.variables.values())
    if config.own.is_encoder_decoder and config.own.enc_layers == config.own.dec_layers:
        told |= {"enc_layers", "dec_layers"}
    recipe, words = scan(family.recipe, (), config.family).values, []
    sections = config.sections()
    for section, option in all_options():
        if section in sections and option.name in config.given and option.name not in told:
            value = getattr(sections[section], option.name)
            if recipe.get(option.name) != value:
                words += _spelled(option, value)
    return words


def _spelled(option: Option, value: Any) -> list[str]:
    """Return the words that give ``value`` to the field of ``option``."""
    constant = [flag for flag, stands_for in option.constants.items() if stands_for == value]
    if constant or value is True:
        return [constant[0] if constant else option.flag]
    return [] if value is False else [option.flag, str(value)]


def lines(config: Any, layout: Layout, devices_per_node: int) -> list[str]:
    """Return the lines for a shell: variables, and the run script with its flags."""
    told = [f"{name}={value}" for name, value in variables(config, layout, devices_per_node).items()]
    start = f"bash {FAMILIES[config.family].run_script} {shlex.join(flags(config, layout))}"
    return [" ".join(told[:4]) + " \\", "  " + " ".join(told[4:]) + " \\", "  " + start]
