"""ModelPipe and DecoderPipe: models as lists of layers for the pipeline engine of ``tds``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from megatron.config import Config
from megatron.config.decoder import ROPE
from megatron.models.common.language_model import (
    Embedding,
    Head,
    Logits,
    SumAndCount,
    head_output,
    materialize_logits,
    model_loss,
)
from megatron.models.common.masks import Masks, SharedMask
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.mtp import MTPInput, MTPLayer, with_mtp_losses
from megatron.models.common.norms import norm_class, norm_kwargs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.token_losses import TokenLosses
from megatron.models.common.transformer import Recompute, TransformerLayer
from megatron.mpu.layers import VocabParallelEmbedding
from megatron.mpu.topology import Topology
from tds.loss import Weighted
from tds.partition import PartitionError
from tds.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from tds.schedule import LOOP
from tds.user_functions import BatchFn

# Activation recomputation on a pipeline stage.


def stage_recompute(module: PipelineModule, args: ModelArgs, parallel: ParallelContext) -> Recompute:
    """Return the ``activation_checkpoint_func`` of ``module``; the layers of ``module`` may not have been built yet."""
    return Recompute(args, parallel, partial(_count_slots, module, args))


def _count_slots(module: PipelineModule, args: ModelArgs) -> tuple[int, int]:
    """Return (maximum number of saved inputs, maximum number of forwards in flight) of this stage.

    Each forward in flight saves one input per checkpointed group of layers. The chunk with the most groups determines
    the number of groups. A group that spans the boundary between T5's encoder and decoder has one input.
    """
    chunks = [list(chunk_modules.is_checkpointable_results) for chunk_modules in module._runs or [module]]
    if module.stage_id == 0:
        chunks[0][0] = False  # starts with the embedding, whose input tokens are not stored in a slot
    num_groups = max(map(sum, chunks)) + sum(isinstance(layer, MTPLayerPipe) for layer in module.forward_funcs)
    num_forwards = args.forwards_in_flight[min(module.stage_id, len(args.forwards_in_flight) - 1)]
    return num_groups * num_forwards, num_forwards


# Conversion of the rank grid.


def pipe_topology(topology: Topology) -> PipeModelDataParallelTopology:
    """Return DeepSpeed's topology with the same order of ranks; its data axis combines our data and context axes."""
    return PipeModelDataParallelTopology(num_pp=topology.pipe, num_mp=topology.tensor, num_dp=topology.data_context)


# The base class of pipelined models.


class ModelPipe(PipelineModule):
    """A model split over the pipeline stages of ``topology``.

    A family implements ``specs``, ``random_batch``, ``_loss`` and ``_declare_boundaries``.

    Args:
        partition: bounds of the chunks, as indices into ``specs()``, or the name of a partition method; "profile" times
            the layers on a batch of shape ``profile_shape``.
        chunks: chunks per stage; ``placement`` determines which ones.
        has_segments: segment ids (documents or padding) are sent between stages as well.
        profile_shape: (micro-batch size, sequence lengths), with one length per side of the model.

    Attributes:
        layer_classes: classes of transformer layers; groups of layers that contain one of them are recomputed.
    """

    loss_weighting = "tokens"  # the loss function returns (sum, count)
    layer_classes: tuple[type[nn.Module], ...]

    def __init__(
        self,
        args: Any,
        parallel: ParallelContext,
        topology: Topology,
        *,
        partition: str | list[int] = "parameters",
        chunks: int = 1,
        placement: str = LOOP,
        has_segments: bool = False,
        profile_shape: tuple[int, ...] | None = None,
    ) -> None:
        self.model_args, self.parallel, self.has_segments = args, parallel, has_segments
        profile_kwargs: dict[str, Any] = (
            {} if profile_shape is None else {"profile_batch": self.random_batch(profile_shape)}
        )
        recompute = self._stage_recompute = stage_recompute(self, args, parallel)
        super().__init__(
            self.specs(),
            topology=pipe_topology(topology),
            loss_fn=self._loss,
            partition_method=partition,
            chunks=chunks,
            placement=placement,
            activation_checkpoint_interval=recompute.interval,
            activation_checkpoint_func=recompute,
            **profile_kwargs,
        )
        self._declare_boundaries()

    @classmethod
    def for_run(
        cls,
        config: Config,
        args: Any,
        context: ParallelContext,
        topology: Topology,
        *,
        partition: str | list[int],
        batch_fn: BatchFn | None,
    ) -> ModelPipe:
        """Return this rank's stage of the model for the run of ``config``.

        Args:
            partition: as in the constructor.
            batch_fn: converts a micro-batch to the inputs of the first stage and the arguments of the loss.
        """
        parallel, batch = config.parallel, config.batch
        profile_shape = (
            (batch.batch_size, *config.family_config.sequence_lengths(batch)) if partition == "profile" else None
        )
        stage = cls(
            args,
            context,
            topology,
            partition=partition,
            chunks=parallel.chunks,
            placement=parallel.placement,
            profile_shape=profile_shape,
            **cls.boundary_kwargs(config),
        )
        stage._megatron_batch_fn = batch_fn
        return stage

    @classmethod
    def boundary_kwargs(cls, config: Config) -> dict[str, bool]:
        """Return constructor arguments that select the tensors sent with the hidden states in a run of ``config``."""
        return {"has_segments": config.data.separates_documents}

    def specs(self) -> list[LayerSpec]:
        """Return the layer specifications."""
        raise NotImplementedError

    def random_batch(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Return (inputs, labels) of a micro-batch of random tokens, the same on every rank."""
        raise NotImplementedError

    def _declare_boundaries(self) -> None:
        """Declare to the engine the tensors that cross into each stage. Called after the layers have been built."""
        raise NotImplementedError

    def _loss(self, logits: Any, labels: Any) -> Any:
        raise NotImplementedError

    def _is_checkpointable(self, funcs: Sequence[Any]) -> bool:
        """Return True if ``funcs`` contain a layer of ``layer_classes``. Replaces DeepSpeed's check by class name."""
        return any(isinstance(func, self.layer_classes) for func in funcs)


# A decoder as a list of layers for the pipeline engine.
#
# Stages send the hidden states [s, b, h], segment ids [b, s] if documents are separated, and rotary positions [b, s] if
# these restart in each document. Masks and rotary angles are never sent.

StageTensors = torch.Tensor | tuple[torch.Tensor, ...]  # hidden states, optionally with segment ids and positions


@cache
def make_embedding_pipe(embedding: type[nn.Module], num_inputs: int) -> type[nn.Module]:
    """Return ``embedding`` as a pipeline layer with ``num_inputs`` inputs; further tensors are passed through."""

    class EmbeddingPipe(embedding):  # type: ignore[valid-type, misc]
        def forward(self, inputs: StageTensors) -> StageTensors:
            tensors = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
            x: torch.Tensor = super().forward(*tensors[:num_inputs])
            passed_through = tensors[num_inputs:]
            return (x, *passed_through) if passed_through else x

    EmbeddingPipe.__name__ = f"{embedding.__name__}Pipe"
    return EmbeddingPipe


@cache
def make_layer_pipe(layer: type[nn.Module]) -> type[nn.Module]:
    """Return ``layer`` as a pipeline layer that passes segment ids through and uses the stage's shared mask."""

    class LayerPipe(layer):  # type: ignore[valid-type, misc]
        def __init__(self, args: ModelArgs, parallel: ParallelContext, layer_idx: int, mask: SharedMask) -> None:
            super().__init__(args, parallel, layer_idx)
            self.mask = mask

        def forward(self, inputs: StageTensors) -> StageTensors:
            x, *passed_through = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
            x = super().forward(x, self.mask.get(passed_through[0], x) if passed_through else None)
            return (x, *passed_through) if passed_through else x

    LayerPipe.__name__ = f"{layer.__name__}Pipe"
    return LayerPipe


class TiedTable(nn.Module):
    """The tied word embedding on the last stage, used by the head and by multi-token prediction.

    Positions are embedded only on the first stage.
    """

    def __init__(self, args: ModelArgs, parallel: ParallelContext) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(
            args.vocab_size, args.hidden_size, divisible_by=args.make_vocab_size_divisible_by, **parallel.layer_kwargs
        )


@cache
def make_norm_pipe(norm: type[nn.Module]) -> type[nn.Module]:
    """Return ``norm`` as the pipeline layer before the head; it drops the tensors sent with the hidden states.

    If ``has_positions`` is passed to its constructor, multi-token prediction follows, and the layer returns these
    tensors in an ``MTPInput``.
    """

    class FinalNormPipe(norm):  # type: ignore[valid-type, misc]
        def __init__(
            self, parallel: ParallelContext, *args: Any, has_positions: bool | None = None, **kwargs: Any
        ) -> None:
            super().__init__(*args, **kwargs)
            parallel.mark_sequence_parallel(self)
            self.has_positions = has_positions

        def forward(self, inputs: StageTensors) -> torch.Tensor | MTPInput:
            x: torch.Tensor = super().forward(inputs if isinstance(inputs, torch.Tensor) else inputs[0])
            if self.has_positions is None:
                return x
            passed_through = () if isinstance(inputs, torch.Tensor) else inputs[1:]
            return MTPInput(x, *split_passed_through(passed_through, self.has_positions))

    return FinalNormPipe


def decoder_specs(
    embedding: type[nn.Module], layers: Iterable[LayerSpec], norm: LayerSpec, args: ModelArgs, parallel: ParallelContext
) -> list[LayerSpec]:
    """Return the specs of the embedding (of class ``embedding``), ``layers``, ``norm`` and the head, tied or not.

    With multi-token prediction, the embedding of future tokens and the MTP layers precede the head.
    """
    has_mtp = args.mtp_num_layers > 0
    if args.untie_embeddings and not has_mtp:
        return [LayerSpec(embedding, args, parallel), *layers, norm, LayerSpec(Head, args, parallel)]
    first_spec = TiedLayerSpec("embedding", embedding, args, parallel, tied_weight_attr="word.weight")
    table = partial(TiedLayerSpec, "embedding", TiedTable, args, parallel, tied_weight_attr="word.weight")
    mtp_specs = [LayerSpec(MTPLayerPipe, args, parallel, depth) for depth in range(args.mtp_num_layers)]
    mtp_specs = [table(forward_fn=_add_word), *mtp_specs] if has_mtp else []
    if args.untie_embeddings:
        return [first_spec, *layers, norm, *mtp_specs, LayerSpec(MTPHeadPipe, args, parallel)]
    return [first_spec, *layers, norm, *mtp_specs, table(forward_fn=partial(_apply_tied_head, args, parallel))]


def _add_word(module: nn.Module, inputs: tuple[Any, ...]) -> MTPInput:
    """Add the word embedding, which the embedding of future tokens uses, to the inputs of multi-token prediction."""
    return MTPInput(*inputs)._replace(word=module.word)  # type: ignore[arg-type]


class MTPLayerPipe(nn.Module):
    """Pipeline layer that adds its MTP layer to the ``MTPInput`` without running it: the loss function runs it."""

    def __init__(self, args: ModelArgs, parallel: ParallelContext, depth: int) -> None:
        super().__init__()
        self.mtp_layer = MTPLayer(args, parallel, depth)

    @property
    def weight_reader(self) -> nn.Module:
        """The module for whose call ZeRO 3 gathers the weights."""
        return self.mtp_layer

    def forward(self, inputs: tuple[Any, ...]) -> MTPInput:
        mtp_input = MTPInput(*inputs)
        return mtp_input._replace(layers=(*mtp_input.layers, self.mtp_layer))


class MTPHeadPipe(Head):
    """Untied head of a decoder with multi-token prediction."""

    def forward(self, inputs: Any) -> Any:
        if isinstance(inputs, torch.Tensor):  # called by the loss function
            return super().forward(inputs)
        mtp_input = MTPInput(*inputs)
        return mtp_input._replace(logits=super().forward(mtp_input.x), head=self)


def _apply_tied_head(args: ModelArgs, parallel: ParallelContext, module: nn.Module, inputs: Any) -> Logits | MTPInput:
    def head(x: torch.Tensor) -> Logits:
        return head_output(x, module.word.weight, args, parallel)  # type: ignore[union-attr, arg-type]

    if isinstance(inputs, torch.Tensor):
        return head(inputs)
    mtp_input = MTPInput(*inputs)
    return mtp_input._replace(logits=head(mtp_input.x), head=head)


def random_batch(vocab_size: int, shape: tuple[int, ...], extra_inputs: Sequence[str] = ()) -> tuple[Any, Any]:
    """Return (inputs, labels) of a micro-batch of random tokens, the same on every rank.

    Shapes:
        all tensors [b, s], with (b, s) given by ``shape``

    Args:
        extra_inputs: further inputs of the first stage after the tokens: "position_ids", "segment_ids".
    """
    tokens = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))
    inputs_by_name = {
        "position_ids": torch.arange(shape[1]).expand(shape).contiguous(),
        "segment_ids": torch.zeros(shape, dtype=torch.int32),
    }
    return (tokens, *[inputs_by_name[name] for name in extra_inputs]), (tokens.roll(-1, dims=1), torch.ones(shape))


def split_passed_through(
    tensors: Sequence[torch.Tensor], has_positions: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the segment ids and the rotary positions among the tensors sent with the hidden states.

    Args:
        has_positions: the last tensor is the positions.
    """
    positions = tensors[-1] if has_positions else None
    return tensors[0] if len(tensors) > has_positions else None, positions


class TransformerLayerPipe(TransformerLayer):
    """Transformer layer that passes segment ids and positions through and uses the masks shared by its stage.

    Args:
        has_positions: the last of the passed tensors is the rotary positions. If there are segment ids, they are the
            first.
    """

    def __init__(
        self, args: ModelArgs, parallel: ParallelContext, layer: int, masks: Masks, has_positions: bool = False
    ) -> None:
        super().__init__(args, parallel, layer)
        self.masks, self.has_positions = masks.of_layer(layer), has_positions

    def forward(self, inputs: StageTensors) -> StageTensors:  # type: ignore[override]
        x, *passed_through = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        segment_ids, positions = split_passed_through(passed_through, self.has_positions)
        mask = None
        if self.has_attention and (segment_ids is not None or self.masks.is_always_needed):
            mask = self.masks.get_mask(x, segment_ids, self.has_window)
        starts = None if self.recurrent is None else self.masks.get_starts(segment_ids)
        x = super().forward(x, mask, None, positions, mask, starts)
        return (x, *passed_through) if passed_through else x


def layer_specs(
    args: ModelArgs, parallel: ParallelContext, has_positions: bool = False, masks: Masks | None = None
) -> list[LayerSpec]:
    """Return the specs of embedding, ``num_layers`` transformer layers, final norm, MTP layers if any, and head.

    Args:
        masks: the masks of the stage; None: new ones.
    """
    masks = masks or Masks(args, parallel)
    layers = [LayerSpec(TransformerLayerPipe, args, parallel, i, masks, has_positions) for i in range(args.num_layers)]
    norm_type: Any = norm_class(args)
    mtp_kwargs = {"has_positions": has_positions} if args.mtp_num_layers else {}
    norm = LayerSpec(make_norm_pipe(norm_type), parallel, args.hidden_size, **norm_kwargs(args), **mtp_kwargs)
    return decoder_specs(make_embedding_pipe(Embedding, 1 + args.has_learned_positions), layers, norm, args, parallel)


def to_weighted(losses: dict[str, SumAndCount]) -> dict[str, Weighted]:
    """Convert (sum, count) pairs by name to the ``Weighted`` losses of the pipeline engine."""
    return {name: Weighted(*pair) for name, pair in losses.items()}


class DecoderPipe(ModelPipe):
    """Decoder split over the pipeline stages of ``topology``: embedding, transformer layers, norm and head.

    Args:
        has_positions: stages send rotary positions along with the hidden states; otherwise positions are
            0 ... s-1 on every stage.
        kwargs: further arguments of ``ModelPipe``.
    """

    layer_classes = (TransformerLayerPipe,)
    token_losses: TokenLosses | None = None
    """Records the token losses of training steps, on the stage with the loss; None: they are not recorded."""

    def __init__(
        self,
        args: ModelArgs,
        parallel: ParallelContext,
        topology: Topology,
        *,
        has_positions: bool = False,
        **kwargs: Any,
    ) -> None:
        self.has_positions = has_positions
        self.masks = Masks(args, parallel)
        super().__init__(args, parallel, topology, **kwargs)
        if self.parts[-2] > args.num_layers + 1 and args.mtp_num_layers:
            raise PartitionError(
                "multi-token prediction needs the final norm, all of its layers and the head on the last virtual "
                f"stage, got the bounds {self.parts} with the norm at {args.num_layers + 1} (--partition-method "
                f"{kwargs.get('partition', 'parameters')}). Use --partition-method balanced"
            )

    @classmethod
    def boundary_kwargs(cls, config: Config) -> dict[str, bool]:
        has_positions = config.data.reset_position_ids and config.model.position_embedding_type == ROPE
        return {**super().boundary_kwargs(config), "has_positions": has_positions}

    def specs(self) -> list[LayerSpec]:
        return layer_specs(self.model_args, self.parallel, self.has_positions, self.masks)

    def _declare_boundaries(self) -> None:
        num_extra_inputs = self.has_segments + self.has_positions
        self._input_grad = [True, *[False] * num_extra_inputs]
        self._input_type = ["float", *["int"] * num_extra_inputs]
        self._input_pipe_partitioned = [False] * len(self._input_grad)

    def random_batch(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        return random_batch(self.model_args.vocab_size, shape, self.extra_input_names)

    @property
    def extra_input_names(self) -> list[str]:
        """Names of the first stage's inputs after the tokens."""
        is_input = {
            "segment_ids": self.has_segments,
            "position_ids": self.model_args.has_learned_positions or self.has_positions,
        }
        return [name for name in self.model_args.extra_input_names if is_input[name]]

    def _loss(self, output: Logits | MTPInput, labels: tuple[torch.Tensor, torch.Tensor]) -> Any:
        loss = model_loss(self._logits(output), labels[0], labels[1], self.model_args, self.parallel, self.token_losses)
        if isinstance(output, MTPInput) and torch.is_grad_enabled():
            loss = with_mtp_losses(
                loss,
                output,
                labels[0],
                labels[1],
                masks=self.masks,
                recompute=self._stage_recompute,
                args=self.model_args,
                parallel=self.parallel,
            )
        return to_weighted(loss) if isinstance(loss, dict) else Weighted(*loss)

    def _logits(self, output: Logits | MTPInput) -> Logits:
        """Return the logits in the output of the last layer."""
        logits = output.logits if isinstance(output, MTPInput) else output
        assert logits is not None  # set by the head
        return logits

    def made_output(self, output: Logits | MTPInput) -> torch.Tensor:
        """Return the logits as a tensor, for evaluations that return outputs."""
        return materialize_logits(self._logits(output))

    def logical_name(self, local_name: str) -> str:
        """Return the name of this parameter in the single-stage model."""
        prefix, _, suffix = local_name.partition(".")
        if prefix == "tied_modules":
            return suffix  # "embedding.word.weight"
        layer_idx = int(prefix)
        if layer_idx == 0:
            return f"embedding.{suffix}"
        if layer_idx <= self.model_args.num_layers:
            return f"layers.{layer_idx - 1}.{suffix}"
        first_mtp_idx = self.model_args.num_layers + 3  # after the final norm and the embedding of future tokens
        if first_mtp_idx <= layer_idx < first_mtp_idx + self.model_args.mtp_num_layers:
            return f"mtp.{layer_idx - first_mtp_idx}.{suffix.removeprefix('mtp_layer.')}"
        return f"{'final_norm' if layer_idx == self.model_args.num_layers + 1 else 'head'}.{suffix}"
