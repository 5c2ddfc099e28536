"""The table of model families. Their parts are imported by name on first use. Does not import torch.

A family is the object ``FAMILY`` in the config.py of its folder: its configuration section, its program and the dotted
names of its parts. The types of the parts are in ``megatron.models.parts``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron.config.config import SECTIONS, Config
from megatron.config.family import DECODER_MODEL, ModelFamily
from megatron.config.pipeline_layout import layout_bounds, parse_layout
from megatron.models.bert.config import FAMILY as BERT
from megatron.models.gpt2.config import FAMILY as GPT2
from megatron.models.llama.config import FAMILY as LLAMA
from megatron.models.mpt.config import FAMILY as MPT
from megatron.models.t5.config import FAMILY as T5

if TYPE_CHECKING:
    from torch import nn

    from megatron.costs.cost import Costs
    from megatron.models.common.huggingface import HFFormat
    from megatron.models.common.parallel_context import ParallelContext
    from megatron.models.parts import CostsOf, DataParts, ModelParts, PipelineClass
    from megatron.mpu.topology import Topology
    from tds.user_functions import BatchFn

FAMILIES: dict[str, ModelFamily] = {}
"""Name -> family, in the order of docs/flags.md."""


def register(family: ModelFamily) -> None:
    """Register a family: its flags are accepted and its parts are used from now on.

    Raises:
        ValueError: the name is already used by another family or by a configuration section of all families.
    """
    if family.name in FAMILIES or family.name in SECTIONS:
        raise ValueError(f"the family name {family.name} is already in use. Rename the family")
    FAMILIES[family.name] = family


for _family in (GPT2, T5, LLAMA, MPT, BERT):
    register(_family)


def family_of(name: str) -> ModelFamily:
    """Return the family called ``name``.

    Raises:
        ValueError: there is no such family.
    """
    if name not in FAMILIES:
        raise ValueError(f"family must be {' or '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def family_titles(*family_types: str) -> str:
    """Return a comma-separated list of family titles for messages.

    Args:
        family_types: kinds of families to include, such as "decoder" or "encoder"; default: all families.
    """
    return ", ".join(
        family.title for family in FAMILIES.values() if not family_types or family.model_type in family_types
    )


def is_common_decoder(family: str) -> bool:
    """Return True if ``family`` uses the common decoder and its settings, and only changes their defaults."""
    entry = FAMILIES.get(family)
    return (
        entry is not None and entry.model_type == "decoder" and not entry.has_section and entry.model == DECODER_MODEL
    )


# The parts of a family.


def model_parts(family: str) -> ModelParts[Any]:
    """Return the model builder, model arguments and initial weights of ``family``, for runs without a pipeline."""
    parts: ModelParts[Any] = _import_object(family_of(family).model)
    return parts


def pipeline_class(family: str) -> PipelineClass:
    """Return the pipelined model class of ``family``."""
    pipeline: PipelineClass = _import_object(family_of(family).pipeline)
    return pipeline


def data_parts(family: str) -> DataParts[Any] | None:
    """Return the data parts of a family, or None if its samples are plain token sequences."""
    name = family_of(family).data
    parts: DataParts[Any] | None = _import_object(name) if name else None
    return parts


def huggingface_formats(family: str) -> tuple[HFFormat, ...]:
    """Return the Hugging Face formats of a family, one per model type; empty if it has none."""
    name = family_of(family).huggingface
    formats: tuple[HFFormat, ...] = _import_object(name) if name else ()
    return formats


def costs_of(config: Config, *, is_on_cpu: bool = False) -> Costs:
    """Return the costs of the model of ``config`` for its sample lengths.

    Args:
        is_on_cpu: the model is trained on a CPU, where different activations are saved for backward.
    """
    costs: CostsOf = _import_object(family_of(config.family).costs)
    return costs(config, is_on_cpu)


def _import_object(object_name: str) -> Any:
    """Import and return the object ``module:attribute``."""
    module_name, _separator, attribute = object_name.partition(":")
    return getattr(importlib.import_module(module_name), attribute)


# The model of a run.


def bounds_of(config: Config, num_stages: int) -> list[int]:
    """Return the layer bounds of the pipeline chunks, from --pipeline-model-parallel-layout or balanced by cost."""
    parallel = config.parallel
    if parallel.pipeline_layout is not None and num_stages > 1:
        return layout_bounds(parse_layout(parallel.pipeline_layout))
    return costs_of(config).stage_bounds(num_stages, parallel.chunks, parallel.placement)


def build_model(
    config: Config, context: ParallelContext, topology: Topology | None = None, batch_fn: BatchFn | None = None
) -> nn.Module:
    """Return the model of ``config``, sharded over the tensor-parallel group of ``context``.

    Args:
        topology: rank topology of the training run. If given, activation recomputation is set up as configured, and
            with a pipeline only this rank's stage is built. None: build the full model without recomputation.
        batch_fn: with a pipeline, converts a micro-batch to the inputs of the first stage and arguments of the loss.
    """
    parts = model_parts(config.family)
    args = parts.args(config, for_training=topology is not None)
    if topology is None or not config.parallel.has_pipeline:
        return parts.model(args, context)
    partition_method = config.parallel.partition_method
    partition = bounds_of(config, topology.pipe) if partition_method == "balanced" else partition_method
    return pipeline_class(config.family).for_run(
        config, args, context, topology, partition=partition, batch_fn=batch_fn
    )
