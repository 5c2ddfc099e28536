"""BERT as a list of layers for the pipeline engine.

Stages send the hidden states [s, b, h] and, if samples are padded, segments [b, s]. Masks are never sent. Before the
head, the transform's output is sent and, with two heads, the next-sentence scores [b, 2].
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.config import Config
from megatron.models.bert.model import (
    BertLayer,
    BertModelArgs,
    NextSentence,
    Outputs,
    SharedWordEmbedding,
    Transform,
    WordHead,
    bert_loss,
    materialize_outputs,
    padding_mask,
)
from megatron.models.common.masks import SharedMask
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.pipeline import ModelPipe, StageTensors, make_embedding_pipe, make_layer_pipe
from megatron.mpu.layers import VocabParallelEmbedding
from tds.loss import Weighted
from tds.p2p.boundary import Boundary
from tds.pipe import LayerSpec, Shared, SharingLayerSpec

BertLayerPipe = make_layer_pipe(BertLayer)


class TransformPipe(nn.Module):
    """Transform and next-sentence head: hidden states[, segments] -> transformed states[, scores]."""

    def __init__(self, args: BertModelArgs, parallel: ParallelContext) -> None:
        super().__init__()
        self.transform = Transform(args, parallel)
        self.next_sentence = NextSentence(args, parallel) if args.binary_head else None

    def forward(self, inputs: StageTensors) -> StageTensors:
        x = inputs if isinstance(inputs, torch.Tensor) else inputs[0]
        transformed: torch.Tensor = self.transform(x)
        return transformed if self.next_sentence is None else (transformed, self.next_sentence(x))


class WordHeadPipe(WordHead):
    """Head tied to the word table shared with the embedding; next-sentence scores are passed through."""

    word: VocabParallelEmbedding

    def forward(self, inputs: StageTensors) -> Outputs:  # type: ignore[override]
        if isinstance(inputs, torch.Tensor):
            return super().forward(inputs, self.word.weight)
        return super().forward(inputs[0], self.word.weight), inputs[1]


def layer_specs(args: BertModelArgs, parallel: ParallelContext) -> list[LayerSpec]:
    """List specs for embedding, ``num_layers`` layers, transform and head."""
    word = Shared(
        "word", VocabParallelEmbedding, args.vocab_size, args.hidden_size,
        divisible_by=args.make_vocab_size_divisible_by, **parallel.layer_kwargs,
    )  # fmt: skip
    mask = SharedMask(partial(padding_mask, args=args, parallel=parallel))
    return [
        SharingLayerSpec(make_embedding_pipe(SharedWordEmbedding, 2), args, parallel, shares={"word": word}),
        *[LayerSpec(BertLayerPipe, args, parallel, i, mask) for i in range(args.num_layers)],
        LayerSpec(TransformPipe, args, parallel),
        SharingLayerSpec(WordHeadPipe, args, parallel, shares={"word": word}),
    ]


def boundary_before(unit_idx: int, args: BertModelArgs, has_segments: bool) -> list[Boundary]:
    """List the tensors sent to a stage that starts with ``unit_idx``, an index into ``layer_specs``."""
    if unit_idx == args.num_layers + 2:
        return [Boundary("transformed states"), *([Boundary("next-sentence scores")] if args.binary_head else [])]
    return [Boundary("hidden states"), *([Boundary("segments", "int")] if has_segments else [])]


def random_batch(args: BertModelArgs, shape: tuple[int, ...], has_segments: bool) -> tuple[Any, Any]:
    """Make (inputs, labels) for a micro-batch with random tokens, the same on every rank.

    Shapes:
        all tensors [b, s], with (b, s) given by ``shape``, except is_random [b] and step_predictions [2]
    """
    tokens = torch.randint(args.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    types = torch.zeros_like(tokens)
    segments = (torch.zeros(shape, dtype=torch.int32),) if has_segments else ()
    second_head_labels = (types[:, 0], torch.tensor([shape[1], 1])) if args.binary_head else ()
    return (tokens, types, *segments), (tokens, torch.ones(shape), *second_head_labels)


class BertModelPipe(ModelPipe):
    """BERT split over the pipeline stages in ``topology``, with embedding, layers, transform and head as layers."""

    layer_classes = (BertLayerPipe,)

    @classmethod
    def boundary_kwargs(cls, config: Config) -> dict[str, bool]:
        return {"has_segments": config.family_config.pads_samples}

    def _declare_boundaries(self) -> None:
        bounds = enumerate(self.parts[1:-1])
        self.boundary = {
            chunk_idx: boundary_before(bound, self.model_args, self.has_segments) for chunk_idx, bound in bounds
        }

    def specs(self) -> list[LayerSpec]:
        return layer_specs(self.model_args, self.parallel)

    def random_batch(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        return random_batch(self.model_args, shape, self.has_segments)

    def made_output(self, output: Outputs) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Convert the logits to a tensor, for evaluations that return outputs."""
        return materialize_outputs(output)

    def _loss(self, logits: Outputs, labels: tuple[torch.Tensor, ...]) -> Weighted | dict[str, Weighted]:
        losses = bert_loss(logits, *labels, args=self.model_args, parallel=self.parallel)
        if isinstance(losses, dict):
            return {name: Weighted(*pair) for name, pair in losses.items()}
        return Weighted(*losses)

    def logical_name(self, local_name: str) -> str:
        """Return this parameter's name in the single-stage model."""
        prefix, _, suffix = local_name.partition(".")
        head_idx = self.model_args.num_layers + 2
        if prefix in ("tied_modules", "0"):
            return f"embedding.{suffix}"  # "word.weight" for the tied table
        unit_idx = int(prefix)
        if unit_idx == head_idx:
            return f"head.{suffix}"
        return suffix if unit_idx == head_idx - 1 else f"layers.{unit_idx - 1}.{suffix}"
