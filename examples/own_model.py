"""A custom model: a bidirectional language model that predicts masked bytes, in every 3D-parallel layout.

    python -m megatron.launch --nproc-per-node 4 --preload torch,deepspeed examples/own_model.py \\
        --pipe-parallel-size 2 --model-parallel-size 2 --num-layers 4 --hidden-size 128 --seq-length 128 --gas 4
    python examples/own_model.py --num-layers 4 --hidden-size 128 --seq-length 128 --gas 4

The model is trained on the bytes of the texts in examples/corpus, so it needs no tokenizer and no --data-path.
docs/own_model.md explains this file. The model reads the flags --num-layers, --hidden-size, --num-attention-heads,
--hidden-dropout and --seq-length, and its own flag --loss-as-layer. The flags of the run, including those of the
pipeline, have the same effect as for GPT-2.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from megatron import mpu  # noqa: E402
from megatron.models import pipe_topology  # noqa: E402
from megatron.training import get_args, get_streams, pretrain  # noqa: E402
from tds.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # noqa: E402

PAD, MASK, VOCAB = 256, 257, 258  # after the 256 bytes
MASKED_SHARE = 0.15
KEYS = ("tokens", "labels", "is_masked", "is_text")


class MaskedBytes(torch.utils.data.Dataset):
    """Paragraphs of examples/corpus as bytes, padded to ``seq_length``, with some bytes masked.

    Args:
        remainders: paragraphs to use; paragraph i is used if i % 20 is in ``remainders``.
    """

    def __init__(self, seq_length: int, remainders: range) -> None:
        texts = sorted((Path(__file__).parent / "corpus").glob("*/*.txt"))
        lines = [line for text in texts for line in text.read_bytes().splitlines() if line]
        order = np.random.default_rng(0).permutation(len(lines))  # mix languages and subjects
        self.lines = [lines[idx] for position, idx in enumerate(order) if position % 20 in remainders]
        self.seq_length = seq_length

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(index)
        line = np.frombuffer(self.lines[index], np.uint8).astype(np.int64)
        start = generator.integers(max(len(line) - self.seq_length, 0) + 1)
        line = line[start : start + self.seq_length]
        labels = np.full(self.seq_length, PAD, np.int64)
        labels[: len(line)] = line
        is_text = np.arange(self.seq_length) < len(line)
        is_masked = is_text & (generator.random(self.seq_length) < MASKED_SHARE)
        is_masked[generator.integers(len(line))] = True  # without a masked byte there would be no loss
        tokens = np.where(is_masked, MASK, labels)
        return dict(zip(KEYS, (tokens, labels, is_masked.astype(np.int64), is_text.astype(np.int64)), strict=True))


def train_valid_test_datasets_provider(train_val_test_num_samples: list[int]) -> tuple[Any, Any, Any]:
    """Return the three datasets. They restart at their ends, so the requested numbers of samples do not matter."""
    length = get_args().seq_length
    return tuple(MaskedBytes(length, remainders) for remainders in (range(18), range(18, 19), range(19, 20)))


def get_batch(data_iterator: Any) -> list[torch.Tensor]:
    """Return tokens, labels, is_masked [b, s] and is_text [b, 1, 1, s] on every rank of the tensor group."""
    data = None if data_iterator is None else next(data_iterator)
    return broadcast_fields(data)


def broadcast_fields(data: dict[str, torch.Tensor] | None) -> list[torch.Tensor]:
    """Broadcast a micro-batch from the first rank of the tensor group, and return its tensors as in ``get_batch``."""
    fields = mpu.broadcast_data(KEYS, data, torch.int64)
    return [fields["tokens"], fields["labels"], fields["is_masked"], fields["is_text"].bool()[:, None, None, :]]


def get_batch_pipe(data: dict[str, torch.Tensor] | None) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
    """Return (inputs of the first layer, inputs of the loss function in addition to the output)."""
    tokens, labels, is_masked, is_text = broadcast_fields(data)
    if get_args().loss_as_layer:
        return (tokens, is_text, labels, is_masked), None
    return (tokens, is_text), (labels, is_masked)


Tensors = tuple[torch.Tensor, ...]


class Embedding(nn.Module):
    """The embedding of bytes plus sinusoidal positions.

    Shapes:
        input (tokens [b, s], other tensors); output (hidden states [s, b, h], the same other tensors)
    """

    def __init__(self, hidden_size: int, group: mpu.Group) -> None:
        super().__init__()
        self.bytes = mpu.VocabParallelEmbedding(VOCAB, hidden_size, group=group)

    def forward(self, inputs: Tensors) -> Tensors:
        tokens, *others = inputs
        x = self.bytes(tokens.transpose(0, 1))  # [s, b, h]
        return x + positions(*x.shape[::2]).to(x).unsqueeze(1), *others


def positions(length: int, hidden_size: int) -> torch.Tensor:
    """Return sines and cosines of the positions, scaled to the magnitude of initial weights.

    Shapes:
        output [s, h]

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.5.
    """
    half = hidden_size // 2
    rates = torch.exp(torch.arange(half) * (-math.log(10_000.0) / half))
    angles = torch.arange(length).unsqueeze(1) * rates
    return 0.02 * torch.cat([angles.sin(), angles.cos()], dim=1)


class GatedAttention(nn.Module):
    """``x + dropout(down(attention(q, k, v) * silu(gate)))``, with q, k, v and gate computed from the normalized x.

    The rows of ``up`` are ordered by head, so that each shard of rows contains q, k, v and gate of complete heads.
    """

    def __init__(self, layer_idx: int, hidden_size: int, num_heads: int, dropout: float, group: mpu.Group) -> None:
        super().__init__()
        self.layer_idx, self.dropout, self.streams = layer_idx, dropout, get_streams()
        self.num_heads = mpu.divide("--num-attention-heads", num_heads, group)
        self.norm = nn.LayerNorm(hidden_size)
        self.up = mpu.ColumnParallelLinear(hidden_size, 4 * hidden_size, group=group)
        self.down = mpu.RowParallelLinear(hidden_size, hidden_size, group=group)

    def forward(self, inputs: Tensors) -> Tensors:
        x, is_text, *others = inputs
        up = self.up(self.norm(x))  # [s, b, 4h/t]
        s, b, _ = up.shape
        q, k, v, gate = up.view(s, b, self.num_heads, 4, -1).permute(3, 1, 2, 0, 4)  # 4 x [b, a/t, s, d]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=is_text) * F.silu(gate)
        y = self.down(mixed.permute(2, 0, 1, 3).reshape(s, b, -1))  # [s, b, h]
        y = self.streams.dropout(y, self.dropout, training=self.training, layer=self.layer_idx, site="gated attention")
        return x + y, is_text, *others


class FinalNorm(nn.LayerNorm):
    """The final layer norm. It returns all tensors, because a stage may end after it."""

    def forward(self, inputs: Tensors) -> Tensors:  # type: ignore[override]
        x, *others = inputs
        return super().forward(x), *others


def compute_logits(embedding: Embedding, inputs: Tensors) -> torch.Tensor:
    """Return the logits [s, b, v/t], computed with the embedding's weight."""
    group = embedding.bytes.group
    return F.linear(mpu.copy_to_tensor_region(inputs[0], group), embedding.bytes.weight)


def masked_loss(logits: torch.Tensor, targets: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a micro-batch as (sum, count): the summed losses and the number of masked bytes.

    The trainer divides by the count of the global batch, so that all masked bytes have the same weight. A mean per
    micro-batch or context rank would give more weight to the bytes of those with few masked bytes.
    """
    labels, is_masked = (target.transpose(0, 1) for target in targets)  # 2 x [s, b]
    losses = mpu.vocab_parallel_cross_entropy(logits, labels, vocab_size=VOCAB, group=mpu.get_grid().tensor)
    return (losses * is_masked).sum(), is_masked.sum()


def loss_layer(embedding: Embedding, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, as the last layer of the pipeline; labels and is_masked were passed through all stages."""
    x, is_text, *targets = inputs
    return masked_loss(compute_logits(embedding, (x, is_text)), tuple(targets))


def constructor_args() -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
    """Return the constructor arguments of the embedding and of each layer."""
    args, group = get_args(), mpu.get_grid().tensor
    common = (args.hidden_size, args.num_attention_heads, args.hidden_dropout, group)
    return (args.hidden_size, group), [(idx, *common) for idx in range(args.num_layers)]


class MyModel(nn.Module):
    """The model without a pipeline, on one rank or one tensor group."""

    def __init__(self) -> None:
        super().__init__()
        embedding_args, layer_args = constructor_args()
        self.embedding = Embedding(*embedding_args)
        self.layers = nn.Sequential(*(GatedAttention(*arguments) for arguments in layer_args))
        self.norm = FinalNorm(get_args().hidden_size)

    def forward(self, tokens: torch.Tensor, is_text: torch.Tensor) -> torch.Tensor:
        return compute_logits(self.embedding, self.norm(self.layers(self.embedding((tokens, is_text)))))


def forward_step(data_iterator: Any, model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """Return the loss of one micro-batch as a pair, and the same by name; not used in a pipeline."""
    tokens, labels, is_masked, is_text = get_batch(data_iterator)
    loss = masked_loss(model(tokens, is_text), (labels, is_masked))
    return loss, {"lm loss": loss}


class MyModelPipe(PipelineModule):
    """The same layers as a list that is split into stages; the first and the last layer share the embedding weight."""

    def __init__(self) -> None:
        embedding_args, layer_args = constructor_args()
        loss_as_layer = get_args().loss_as_layer
        tied = {"tied_weight_attr": "bytes.weight"}
        last_layer = loss_layer if loss_as_layer else compute_logits
        layers = [
            TiedLayerSpec("embedding", Embedding, *embedding_args, **tied),
            *[LayerSpec(GatedAttention, *args) for args in layer_args],
            LayerSpec(FinalNorm, get_args().hidden_size),
            TiedLayerSpec("embedding", Embedding, *embedding_args, forward_fn=last_layer, **tied),
        ]
        super().__init__(
            layers,
            topology=pipe_topology(mpu.get_grid().topology),
            loss_fn=None if loss_as_layer else masked_loss,
            chunks=get_args().pipeline_chunks,
        )
        self.num_layers = len(layer_args)

    def logical_name(self, local_name: str) -> str:
        """Return the parameter's name in ``MyModel``, which determines its initial value and its checkpoint entry."""
        first, _, suffix = local_name.partition(".")
        if first == "tied_modules":
            return suffix  # "embedding.bytes.weight"
        layer_idx = int(first) - 1
        return f"layers.{layer_idx}.{suffix}" if layer_idx < self.num_layers else f"norm.{suffix}"


def model_provider() -> nn.Module:
    """Return the complete model, or this rank's pipeline stage."""
    args = get_args()
    if args.pipe_parallel_size == 0:
        if args.loss_as_layer:
            raise ValueError("--loss-as-layer requires a pipeline. Use --pipe-parallel-size 2, or remove the flag")
        return MyModel()
    model = MyModelPipe()
    labels = 2 if args.loss_as_layer else 0  # labels and is_masked are sent too, unsplit and without a gradient
    model._megatron_batch_fn = get_batch_pipe
    model._input_grad = [True, False, *[False] * labels]  # hidden states have a gradient, the mask does not
    model._input_type = ["float", "bool", *["int"] * labels]
    model._input_pipe_partitioned = [True, False, *[False] * labels]  # split hidden states over the tensor group
    return model


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flag of this script."""
    parser.add_argument("--loss-as-layer", action="store_true", help="compute the loss in the last pipeline layer")
    return parser


if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, forward_step, extra_args_provider=add_flags)
