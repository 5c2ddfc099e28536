"""The parts of a model family: the types of the objects that ``ModelFamily`` names and ``registry`` imports.

| field of ``ModelFamily`` | object | a decoder's default |
|---|---|---|
| ``model`` | ``ModelParts`` | ``megatron.models.common.decoder:MODEL`` |
| ``pipeline`` | ``PipelineClass`` | ``megatron.models.common.pipeline:DecoderPipe`` |
| ``costs`` | ``CostsOf`` | ``megatron.costs.decoder_cost:costs`` |
| ``data`` | ``DataParts`` | none: samples are runs of tokens |
| ``huggingface`` | ``tuple[HFFormat, ...]`` | none: no Hugging Face folders |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    from megatron.config import Config
    from megatron.costs.cost import Costs
    from megatron.data.mock_dataset import RandomDocuments
    from megatron.models.common.model_args import ModelArgs
    from megatron.models.common.parallel_context import ParallelContext
    from megatron.models.common.parameters import Rule
    from megatron.mpu.topology import Topology
    from tds.user_functions import BatchFn

Args = TypeVar("Args", bound="ModelArgs")
Args_co = TypeVar("Args_co", bound="ModelArgs", covariant=True)
Tokens = TypeVar("Tokens", bound="Vocabulary")


class ArgsOf(Protocol[Args_co]):
    """Returns the sizes and switches of the model of a configuration."""

    def __call__(self, config: Config, *, recomputes: bool = False) -> Args_co:
        """``recomputes``: with the activation recomputation of the run; otherwise without any."""


@dataclass(frozen=True, kw_only=True)
class DecoderLayers:
    """The layers with which a decoder generates text.

    Args:
        embedding: built from (sizes, place); its table is ``word``, its ``forward`` takes tokens and positions [b, s].
        layer: built from (sizes, place, number); its ``forward`` takes hidden states, mask, cache, positions and the
            mask of a window, and finds the positions of the pass in ``cache.slots.positions``.
        norm: builds the final norm from the sizes.
    """

    embedding: type[nn.Module]
    layer: type[nn.Module]
    norm: Callable[[Any], nn.Module]


@dataclass(frozen=True, kw_only=True)
class ModelParts(Generic[Args]):
    """The model of a family without a pipeline, its sizes and its initial weights.

    Args:
        args: sizes and switches of a configuration.
        model: the class of the model, of ``args`` and a ``ParallelContext``.
        weight_init: the standard deviation of each initial weight.
        example_inputs: inputs of ``model`` without labels; ``words(length)`` draws tokens [b, length].
        generation: the layers that generate text; None for a family that does not or is no decoder.
    """

    args: ArgsOf[Args]
    model: Callable[[Args, ParallelContext], nn.Module]
    weight_init: Callable[[Config], Rule]
    example_inputs: Callable[[Config, Callable[[int], torch.Tensor]], dict[str, torch.Tensor]]
    generation: DecoderLayers | None = None


class PipelineClass(Protocol):
    """The class of a model over pipeline stages: a subclass of ``megatron.models.common.pipeline.ModelPipe``."""

    def for_run(
        self,
        config: Config,
        args: Any,
        context: ParallelContext,
        topology: Topology,
        *,
        partition: str | list[int],
        batch_fn: BatchFn | None,
    ) -> nn.Module:
        """Return this rank's stage of the model that the run of ``config`` trains."""


class CostsOf(Protocol):
    """Returns the parameters, FLOPs and memory of the model of a configuration, at the lengths of its samples."""

    def __call__(self, config: Config, is_on_cpu: bool = False) -> Costs:
        """``is_on_cpu``: the model is trained on a CPU, which saves other activations for backward."""


class Vocabulary(Protocol):
    """A tokenizer, or its ids and those that a family adds."""

    @property
    def vocab_size(self) -> int: ...


class Samples(Protocol):
    """A data set: sample ``index`` as arrays by name."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True, kw_only=True)
class DataParts(Generic[Tokens]):
    """The samples of a family that are no plain runs of tokens.

    Args:
        special_tokens: the ids of a tokenizer and those that the samples of the family add.
        random_dataset: samples of random documents, given their ids and a seed.
    """

    special_tokens: Callable[[Any, Config], Tokens]
    random_dataset: Callable[[Config, RandomDocuments, Tokens, int], Samples]
