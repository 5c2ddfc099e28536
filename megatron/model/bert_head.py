"""From BERT's hidden states to its two answers: which words are masked, and whether the segments belong together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.head import Logits, head_output
from megatron.model.norm import LayerNorm
from megatron.model.sizes import BertSizes, Place
from megatron.mpu.layers import vocab_range
from megatron.mpu.mappings import reduce_from_tensor_region
from megatron.mpu.shard import Shard, empty_weight, set_shard
from megatron.ops.activations import activation


class WholeLinear(nn.Module):
    """``Y = X A^T + b``. Every rank of the tensor group holds all of it and does the same.

    Shapes:
        input  [..., input_size]
        output [..., output_size]
    """

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        shape = (output_size, input_size)
        self.weight = empty_weight(shape, Shard(shape))
        self.bias = nn.Parameter(torch.zeros(output_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Transform(nn.Module):
    """What lies between the last layer and the vocabulary: a product, activation, norm.

    Shapes:
        input, output [s, b, h], or this rank's part of it, by ``place``
    """

    def __init__(self, sizes: BertSizes, place: Place) -> None:
        super().__init__()
        self.dense = place.on_part(WholeLinear(sizes.hidden_size, sizes.hidden_size))
        self.activation = activation(sizes.activation)
        self.norm = place.on_part(LayerNorm(sizes.hidden_size, sizes.layernorm_epsilon))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.activation(self.dense(x)))


class NextSentence(nn.Module):
    """Whether the second segment goes on where the first stops, from the first token of a sample.

    Where the sequence is cut the first tensor rank has that token and hands it to the others, which do the same.

    Shapes:
        input  [s, b, h], or this rank's part of it, by ``place``
        output [b, 2], scores of: it does, it is from elsewhere
    """

    gives_whole = True  # for the debugger: what it returns is the same on every rank

    def __init__(self, sizes: BertSizes, place: Place) -> None:
        super().__init__()
        self.place = place
        self.pooler = WholeLinear(sizes.hidden_size, sizes.hidden_size)
        self.classifier = WholeLinear(sizes.hidden_size, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.tanh(self.pooler(self._first_token(x))))

    def _first_token(self, x: torch.Tensor) -> torch.Tensor:
        if not self.place.sequence_parallel:
            return x[0]
        own = x[0] if self.place.group.rank == 0 else torch.zeros_like(x[0])
        return reduce_from_tensor_region(own, self.place.group)


class WordHead(nn.Module):
    """Logits by the word table, with a bias for each word, which is cut as the table is.

    Shapes:
        x      [s, b, h], the same on every rank, or this rank's part of it, by ``place``
        table  [v/t, h], padded rows last
        output [s, b, v/t], or what they are made of
    """

    def __init__(self, sizes: BertSizes, place: Place) -> None:
        super().__init__()
        self.sizes, self.place = sizes, place
        rows, start, num_real = vocab_range(sizes.vocab_size, place.group, sizes.make_vocab_size_divisible_by)
        self.bias = set_shard(nn.Parameter(torch.zeros(rows)), Shard((sizes.vocab_size,), 0, start, num_real))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> Logits:
        return head_output(x, table, self.sizes, self.place, self.bias)
