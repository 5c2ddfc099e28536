"""The families of models, a line each, and their parts by name: the one table of families. No torch.

``load(family, part)`` imports a file of the family's folder:

| part | has | of a decoder without the file |
|---|---|---|
| cost | ``costs(config, is_on_cpu)``; no torch | ``megatron.costs.decoder_cost`` |
| model | ``model_args(config)``, ``<Prefix>Model(args, place)``, ``weight_init(config)``, | ``common.decoder`` |
| | ``example_inputs(config, words)``, of a decoder ``GENERATION`` | |
| pipeline | ``<Prefix>ModelPipe``, ``layer_specs`` | ``common.pipeline`` |
| huggingface | ``FORMAT`` | there is none |
| data | where samples are the family's own: ``special_tokens(tokenizer, config)``, ``random_dataset(...)`` | |
| generate | of a family that generates and is no decoder | |

Their classes are ``DecoderModel`` and ``DecoderPipe``. So a decoder that has nothing of its own but settings and names
is config.py and huggingface.py.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from megatron.config.config import SECTIONS
from megatron.config.family import ModelFamily
from megatron.config.pipeline_layout import layout_bounds, parse_layout
from megatron.models.bert.config import FAMILY as BERT
from megatron.models.gpt2.config import FAMILY as GPT2
from megatron.models.llama.config import FAMILY as LLAMA
from megatron.models.mpt.config import FAMILY as MPT
from megatron.models.t5.config import FAMILY as T5

FAMILIES: dict[str, ModelFamily] = {}
"""Name -> family, in the order of docs/flags.md."""
COMMON = "megatron.models.common"
PLAIN = {"model": f"{COMMON}.decoder", "pipeline": f"{COMMON}.pipeline", "cost": "megatron.costs.decoder_cost"}
"""Part -> what a decoder without such a file has in its place: the plain decoder's."""


def register(family: ModelFamily) -> None:
    """Add a family: its flags are taken from here on, and its parts are looked for beside its section, then in PLAIN.

    Raises:
        ValueError: there is one of that name, or a section of every run has it.
    """
    if family.name in FAMILIES or family.name in SECTIONS:
        raise ValueError(f"a family needs a name of its own, got {family.name}, which is taken. Rename it")
    FAMILIES[family.name] = family


_OWN = (
    GPT2,
    T5,
    LLAMA,
    MPT,
    BERT,
)
for _family in _OWN:
    register(_family)


def family_of(name: str) -> ModelFamily:
    """Return the family of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in FAMILIES:
        raise ValueError(f"family must be {' or '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def titles(*kinds: str) -> str:
    """Return the families of ``kinds``, of all where none are given, as messages list them."""
    return ", ".join(family.title for family in FAMILIES.values() if not kinds or family.kind in kinds)


def load(family: str, part: str) -> ModuleType:
    """Return the module with a part of a family: "cost", "model", "pipeline", "huggingface", "data", "generate".

    It is the file of its folder; a decoder that has none there has the plain decoder's, by ``PLAIN``.

    Raises:
        ValueError: there is no such family.
        ModuleNotFoundError: it has no such part.
    """
    return importlib.import_module(_module_of(family_of(family), part))


def has_part(family: str, part: str) -> bool:
    """Return whether the family has such a part; imports nothing but folders."""
    return importlib.util.find_spec(_module_of(family_of(family), part)) is not None


def _module_of(family: ModelFamily, part: str) -> str:
    own = f"{family.package}.{part}"
    is_plain = family.kind == "decoder" and part in PLAIN and importlib.util.find_spec(own) is None
    return PLAIN[part] if is_plain else own


def is_common_decoder(family: str) -> bool:
    """Return whether a model of ``family`` is the common decoder with settings that others may have as well."""
    line = FAMILIES.get(family)
    if line is None or line.kind != "decoder" or line.has_section:
        return False
    return _module_of(line, "model") == PLAIN["model"]


def costs_of(config: Any, *, is_on_cpu: bool = False) -> Any:
    """Return the ``Costs`` of the model of ``config``, a ``Config``, at the lengths of its samples.

    Args:
        is_on_cpu: where it is trained; what it keeps depends on that.
    """
    return load(config.family, "cost").costs(config, is_on_cpu)


def bounds_of(config: Any, stages: int) -> list[int]:
    """Return the bounds of the pieces in layers as the pipeline counts them: as --pipeline-model-parallel-layout says,
    else balanced."""
    parallel = config.parallel
    if parallel.pipeline_layout is not None and stages > 1:
        return layout_bounds(parse_layout(parallel.pipeline_layout))
    bounds: list[int] = costs_of(config).stage_bounds(stages, parallel.chunks, parallel.placement)
    return bounds


def build_model(config: Any, place: Any, topology: Any = None, get_batch_pipe: Any = None) -> Any:
    """Return the model of ``config``, cut over the tensor group of ``place``.

    Without ``topology`` it is whole, in one module. With it, the ``Topology`` of the run, it is what the run trains: it
    recomputes what ``config`` says, and with a pipeline it is the stage of this rank.

    Args:
        get_batch_pipe: given a micro-batch, what the first stage takes and what the loss takes.
    """
    if topology is None:
        return _class_of(config.family, "model")(load(config.family, "model").model_args(config), place)
    switches = importlib.import_module(f"{COMMON}.transformer").recompute_switches(config)
    args, parallel, batch = load(config.family, "model").model_args(config, **switches), config.parallel, config.batch
    if not parallel.has_pipeline:
        return _class_of(config.family, "model")(args, place)
    partition = parallel.partition_method
    if partition == "balanced":
        partition = bounds_of(config, topology.pipe)
    kind = _class_of(config.family, "pipeline")
    stages = kind(
        args,
        place,
        topology,
        partition=partition,
        chunks=parallel.chunks,
        placement=parallel.placement,
        probe=(batch.batch_size, *config.own.sequence_lengths(batch)) if partition == "profile" else None,
        **kind.beside(config),
    )
    stages._megatron_batch_fn = get_batch_pipe
    return stages


def _class_of(family: str, part: str) -> Any:
    """Return the class of the whole model or of the pipeline's: ``T5Model``, ``T5ModelPipe``; ``PLAIN``'s by name."""
    module, ending = load(family, part), {"model": "Model", "pipeline": "ModelPipe"}[part]
    if module.__name__ == PLAIN[part]:
        return getattr(module, {"model": "DecoderModel", "pipeline": "DecoderPipe"}[part])
    return getattr(module, f"{FAMILIES[family].prefix}{ending}")
