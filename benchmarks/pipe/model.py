"""The GPT that every contender of ``pipeline.py`` trains, as a list of pipeline layers that build alike everywhere.

| layers | list | runs under tensor parallelism |
|---|---|---|
| whole | embedding, ``num_layers`` blocks, norm, head | no |
| half | the same with each block as two layers, attention and feed-forward | no |
| tensor | embedding, ``num_layers`` layers of ``megatron.models``, norm, head | yes |
| t5 | the units of ``megatron.models.T5ModelPipe``: a model of its own, in ``t5_model.py`` | no |

The first two are plain ``torch.nn`` on [b, s, h] and compute the same function from the same weights: each layer fills
its own by its place in the list of halves. The head is not tied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import nn

from benchmarks.pipe.case import Case

SEED, STD = 1234, 0.02
Batch = tuple[Any, Any]


class Embedding(nn.Module):
    """Tokens [b, s] to [b, s, h]."""

    def __init__(self, vocab_size: int, seq_length: int, h: int) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(vocab_size, h), nn.Embedding(seq_length, h)
        fill(self, 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.word(tokens) + self.position.weight[: tokens.shape[1]]


class Attention(nn.Module):
    """Causal attention behind a norm, added to the stream [b, s, h]."""

    def __init__(self, number: int, h: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.qkv, self.out = nn.LayerNorm(h), nn.Linear(h, 3 * h), nn.Linear(h, h)
        fill(self, 2 * number + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        heads = self.qkv(self.norm(x)).view(b, s, 3, self.num_heads, h // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # 3 x [b, a, s, d]
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(context.transpose(1, 2).reshape(b, s, h))


class Mlp(nn.Module):
    """Feed-forward behind a norm, added to the stream [b, s, h]."""

    def __init__(self, number: int, h: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        fill(self, 2 * number + 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward as one layer."""

    def __init__(self, number: int, h: int, num_heads: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(number, h, num_heads), Mlp(number, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


class Head(nn.Linear):
    """[b, s, h] to logits [b, s, v]."""

    def __init__(self, h: int, vocab_size: int) -> None:
        super().__init__(h, vocab_size, bias=False)
        fill(self, -1)


def fill(module: nn.Module, number: int) -> None:
    """Fill tables and matrices with normal(0, ``STD``) numbers that depend on ``number`` alone; biases with zeros."""
    generator = torch.Generator().manual_seed(SEED + 1000 + number)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, STD, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()


class Chain(nn.Module):
    """Layers ``first ... first + len(specs)`` of a model, one after the other, under the names of a PipelineModule."""

    def __init__(self, specs: Iterable[LayerSpec], first: int = 0) -> None:
        super().__init__()
        for index, spec in enumerate(specs):
            self.add_module(str(first + index), spec.build())

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        x: Any = inputs[0] if len(inputs) == 1 else inputs
        for layer in self.children():
            x = layer(x)
        return x


@dataclass(frozen=True)
class Model:
    """What a contender needs to train one case.

    Args:
        specs: the layers.
        loss_fn: (logits, labels) to the mean loss.
        finish: fills weights that the layers left unset; called with the built module.
        inputs_of: from tokens [b, s] to what the first layer takes.
    """

    specs: list[LayerSpec]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    finish: Callable[[nn.Module], None]
    inputs_of: Callable[[torch.Tensor], Any]

    def whole(self) -> nn.Module:
        """Return the module that one process trains."""
        return Chain(self.specs)

    def staged(self, options: dict[str, Any]) -> Any:
        """Return the module that our engine trains; ``options`` are those of a ``tds.PipelineModule``."""
        import tds

        return tds.PipelineModule(self.specs, **options)

    def batches(self, case: Case, step: int) -> list[Batch]:
        """Return the micro-batches of a step: random tokens, the same for every contender."""
        text = case.sizes.batch(case.num_micro_batches * case.micro_batch_size, step)["text"]
        parts = text.split(case.micro_batch_size)
        return [(self.inputs_of(each[:, :-1].contiguous()), each[:, 1:].contiguous()) for each in parts]


def make_model(case: Case, layers: str, tensor_group: Any = None) -> Model:
    """Return the model of ``case`` as ``layers`` ("whole", "half", "tensor" or "t5") cut it."""
    if layers == "t5":
        from benchmarks.pipe.t5_model import make_t5_model

        return make_t5_model(case)
    if layers == "tensor":
        from benchmarks.pipe.tensor_model import make_tensor_model

        return make_tensor_model(case, tensor_group)
    return Model(plain_specs(case, layers), mean_cross_entropy, lambda module: None, lambda tokens: tokens)


def plain_specs(case: Case, layers: str) -> list[LayerSpec]:
    """Return the layers of the plain model, ``"whole"`` or ``"half"``."""
    h, a, v = case.sizes.hidden_size, case.sizes.num_attention_heads, case.sizes.vocab_size
    blocks: list[LayerSpec] = []
    for number in range(case.sizes.num_layers):
        if layers == "whole":
            blocks.append(LayerSpec(Block, number, h, a))
        else:
            blocks += [LayerSpec(Attention, number, h, a), LayerSpec(Mlp, number, h)]
    first = LayerSpec(Embedding, v, case.sizes.seq_length, h)
    return [first, *blocks, LayerSpec(nn.LayerNorm, h), LayerSpec(Head, h, v)]


def mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of logits [b, s, v] and labels [b, s]."""
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))
