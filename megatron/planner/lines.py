"""What to paste: the variables of a run script and its flags, for one layout."""

from __future__ import annotations

import shlex
from typing import Any

from megatron.config.option import RUN_SCRIPTS
from megatron.planner.layout import Layout
from megatron.stages import MANY_CHUNKS, ONE_CHUNK

RECIPE = {
    "gpt2": ("--hidden-bias", "--attention-dropout", "0", "--hidden-dropout", "0"),
    "t5": ("--attention-dropout", "0", "--hidden-dropout", "0"),
    "llama": (),
    "mpt": (),
    "bert": (),
}
"""Family -> what its run script says of the model where the user does not: plans begin with the same."""


def variables(config: Any, layout: Layout, devices_per_node: int) -> dict[str, int]:
    """Return name -> value of what is set in the run script or before it."""
    model, own, world = config.model, config.own, layout.world_size
    on_node = min(devices_per_node, world)
    while world % on_node:
        on_node -= 1
    lengths = {"SEQLEN": config.batch.seq_length}
    if config.is_t5:
        lengths = {"ENC_SEQLEN": own.enc_seq_length, "DEC_SEQLEN": own.dec_seq_length}
    layers = {} if config.is_t5 and own.enc_layers != own.dec_layers else {"NLAYERS": model.num_layers}
    if config.is_t5 and own.enc_layers == own.dec_layers:
        layers = {"NLAYERS": own.enc_layers}
    extra = {"NGROUPS": own.num_query_groups, "NFF": model.ff_hidden_size} if config.family == "llama" else {}
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
    if layout.pipe > 1 and layout.schedule not in (ONE_CHUNK[0], *MANY_CHUNKS):
        words += ["--pipeline-schedule", layout.schedule]
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
    return words + model_flags(config)


def model_flags(config: Any) -> list[str]:
    """Return the flags of the model that differ from what follows from the variables."""
    model, own, words = config.model, config.own, []
    if config.is_t5 and own.enc_layers != own.dec_layers:
        words += ["--enc-layers", str(own.enc_layers), "--dec-layers", str(own.dec_layers)]
    if model.kv_hidden_size * model.num_attention_heads != model.hidden_size:
        words += ["--kv-hidden-size", str(model.kv_hidden_size)]
    if config.family != "llama" and model.ff_hidden_size != 4 * model.hidden_size:
        words += ["--ff-hidden-size", str(model.ff_hidden_size)]
    given = {"activation": "--activation", "vocab_size": "--vocab-size", "optimizer": "--optimizer"}
    values = {"activation": model.activation, "vocab_size": model.vocab_size, "optimizer": config.optimizer.optimizer}
    for name, flag in given.items():
        if name in config.given:
            words += [flag, str(values[name])]
    switches = {"untie_embeddings": "--untie-embeddings-and-output-weights", "hidden_bias": "--hidden-bias"}
    recipe = RECIPE[config.family]
    words += [flag for name, flag in switches.items() if name in config.given and flag not in recipe]
    return words


def lines(config: Any, layout: Layout, devices_per_node: int) -> list[str]:
    """Return the lines for a shell: variables, and the run script with its flags."""
    told = [f"{name}={value}" for name, value in variables(config, layout, devices_per_node).items()]
    start = f"bash {RUN_SCRIPTS[config.family]} {shlex.join(flags(config, layout))}"
    return [" ".join(told[:4]) + " \\", "  " + " ".join(told[4:]) + " \\", "  " + start]
