"""The parts of a model family: types of the objects that ``ModelFamily`` names and ``registry`` imports.

| field of ``ModelFamily`` | type | default for decoders |
|---|---|---|
| ``model`` | ``ModelParts`` | ``megatron.models.common.decoder:MODEL`` |
| ``pipeline`` | ``PipelineClass`` | ``megatron.models.common.pipeline:DecoderPipe`` |
| ``costs`` | ``CostsOf`` | ``megatron.costs.decoder_cost:costs`` |
| ``data`` | ``DataParts`` | none: samples are plain token sequences |
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
    """Function that returns the model arguments of a configuration."""

    def __call__(self, config: Config, *, for_training: bool = False) -> Args_co:
        """Return the model arguments of ``config``.

        Args:
            for_training: apply the run's settings of activation recomputation and FP8.
        """


@dataclass(frozen=True, kw_only=True)
class DecoderLayers:
    """The layer types with which a decoder generates text.

    Args:
        embedding: class of the embedding, constructed with (args, parallel). The word table is its attribute ``word``;
            its ``forward`` takes tokens [b, s] and positions [b, s].
        layer: class of the layers, constructed with (args, parallel, layer index). Its ``forward`` takes hidden states,
            mask, cache, positions and the mask of layers with a window. With a cache, the positions of the current
            tokens are in ``cache.slots.positions``.
        norm: function that builds the final norm from ``args``.
    """

    embedding: type[nn.Module]
    layer: type[nn.Module]
    norm: Callable[[Any], nn.Module]


@dataclass(frozen=True, kw_only=True)
class ModelParts(Generic[Args]):
    """The model of a family for runs without a pipeline, its arguments and its initial weights.

    Args:
        args: returns the model arguments of a configuration.
        model: builds the model from its arguments and a ``ParallelContext``.
        weight_init: returns the rule for the standard deviation of the initial weights.
        example_inputs: returns keyword arguments of the model's ``forward``, without labels, from a configuration and a
            function that draws random tokens [b, length] for a given length.
        generation: layer types for text generation; None for families that do not support it or are not decoders.
    """

    args: ArgsOf[Args]
    model: Callable[[Args, ParallelContext], nn.Module]
    weight_init: Callable[[Config], Rule]
    example_inputs: Callable[[Config, Callable[[int], torch.Tensor]], dict[str, torch.Tensor]]
    generation: DecoderLayers | None = None


class PipelineClass(Protocol):
    """Pipelined model class: a subclass of ``megatron.models.common.pipeline.ModelPipe``."""

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
        """Return this rank's stage of the model for the run of ``config``."""


class CostsOf(Protocol):
    """Function that returns parameters, FLOPs and memory of the model of a configuration, for its sample lengths."""

    def __call__(self, config: Config, is_on_cpu: bool = False) -> Costs:
        """Return the costs of the model of ``config``.

        Args:
            is_on_cpu: the model is trained on a CPU, where different activations are saved for backward.
        """


class Vocabulary(Protocol):
    """A tokenizer, or the special token ids of a tokenizer and a family."""

    @property
    def vocab_size(self) -> int: ...


class Samples(Protocol):
    """A dataset: sample ``index`` as arrays by name."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True, kw_only=True)
class DataParts(Generic[Tokens]):
    """The samples of a family whose samples are not plain token sequences.

    Args:
        special_tokens: returns the special token ids of a tokenizer, including the ids that the family adds.
        random_dataset: returns a dataset of random documents from the configuration, the documents, the special token
            ids and a seed.
    """

    special_tokens: Callable[[Any, Config], Tokens]
    random_dataset: Callable[[Config, RandomDocuments, Tokens, int], Samples]
