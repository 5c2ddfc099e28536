"""Small T5 models with known weights, and a reference implementation in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatron.models.t5.layers import T5ModelArgs

VOCAB, S_E, S_D, BATCH = 101, 11, 7, 3  # 101 is a prime, so that every tensor size needs padding
SMALL = {
    "num_layers": 2, "enc_layers": 2, "dec_layers": 3, "hidden_size": 16, "num_attention_heads": 4,
    "kv_hidden_size": 6, "ff_hidden_size": 20, "vocab_size": VOCAB, "max_position_embeddings": 0,
    "hidden_bias": False, "layernorm_epsilon": 1e-6, "activation": "relu",
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6,
}  # fmt: skip
LEARNED = {
    "position_embedding_type": "learned", "hidden_bias": True, "activation": "gelu", "layernorm_epsilon": 1e-5,
    "max_position_embeddings": S_E,
}  # fmt: skip
MODEL_VARIANTS = {
    "T5": {},
    "T5 v1.1": {"activation": "gated-gelu", "untie_embeddings": True},
    "biases and silu": {"activation": "gated-silu", "hidden_bias": True},
    "as CPM": LEARNED,
}


def t5_model_args(**overrides: Any) -> T5ModelArgs:
    """Return the args of the small model, with ``overrides``."""
    return T5ModelArgs(**{**SMALL, **overrides})


@dataclass
class T5Batch:
    """Arguments of ``T5Model.forward``."""

    enc_tokens: torch.Tensor
    dec_tokens: torch.Tensor
    enc_segments: torch.Tensor | None
    dec_segments: torch.Tensor | None
    labels: torch.Tensor
    loss_mask: torch.Tensor


def make_t5_batch(*, with_documents: bool = False, seed: int = 0) -> T5Batch:
    """Return random tokens.

    With documents, one row has several documents and padding, one a single document, and one padding in the decoder
    only.
    """
    generator = torch.Generator().manual_seed(seed)
    enc, dec, labels = (torch.randint(0, VOCAB, (BATCH, s), generator=generator) for s in (S_E, S_D, S_D))
    batch = T5Batch(enc, dec, None, None, labels, torch.ones(BATCH, S_D))
    if with_documents:
        batch.enc_segments = torch.tensor(
            [[0] * 5 + [1] * 4 + [-1] * 2, [0] * 11, [0] * 8 + [1] * 3], dtype=torch.int32
        )
        batch.dec_segments = torch.tensor(
            [[0] * 3 + [1] * 3 + [-1], [0] * 7, [0] + [1] * 3 + [-1] * 3], dtype=torch.int32
        )
        batch.loss_mask = (batch.dec_segments >= 0).float()
    return batch


def reference_t5_logits(weights: dict[str, torch.Tensor], args: T5ModelArgs, batch: T5Batch) -> torch.Tensor:
    """Return the logits [b, s_d, v] of the reference implementation, computed one sample at a time."""
    rows = []
    for i in range(BATCH):
        enc = torch.zeros(S_E) if batch.enc_segments is None else batch.enc_segments[i]
        dec = torch.zeros(S_D) if batch.dec_segments is None else batch.dec_segments[i]
        rows.append(_ReferenceT5(weights, args, enc, dec).logits(batch.enc_tokens[i], batch.dec_tokens[i]))
    return torch.stack(rows)


class _ReferenceT5:
    def __init__(self, weights, args, enc, dec):
        self.w, self.args, self.enc, self.dec = weights, args, enc, dec
        self.is_relative = args.position_embedding_type == "relative"

    def logits(self, enc_tokens, dec_tokens):
        memory = self.embed(enc_tokens, self.enc)
        for i in range(self.args.enc_layers):
            prefix = f"encoder.layers.{i}."
            memory = memory + self.self_attention(prefix, memory, self.enc, "encoder")
            memory = memory + self.mlp(prefix, self.norm(prefix + "post_attention_norm", memory))
        memory = self.norm("encoder.final_norm", memory)
        y = self.embed(dec_tokens, self.dec)
        for i in range(self.args.dec_layers):
            prefix = f"decoder.layers.{i}."
            y = y + self.self_attention(prefix, y, self.dec, "decoder")
            y = y + self.cross_attention(prefix, y, memory)
            y = y + self.mlp(prefix, self.norm(prefix + "post_attention_norm", y))
        y = self.norm("decoder.final_norm", y)
        if "head.weight" in self.w:
            return y @ self.w["head.weight"].t()
        return (y / math.sqrt(y.shape[-1]) if self.is_relative else y) @ self.w["embedding.word.weight"].t()

    def embed(self, tokens, segments):
        x = self.w["embedding.word.weight"][tokens]
        if self.is_relative:
            return x
        positions = [sum(1 for k in range(j) if segments[k] == segments[j]) for j in range(len(tokens))]
        return x + self.w["embedding.position.weight"][positions]

    def norm(self, name, x):
        if self.is_relative:
            return (
                x / (x.square().mean(-1, keepdim=True) + self.args.layernorm_epsilon).sqrt() * self.w[name + ".weight"]
            )
        return F.layer_norm(
            x, x.shape[-1:], self.w[name + ".weight"], self.w[name + ".bias"], self.args.layernorm_epsilon
        )

    def linear(self, name, x):
        return F.linear(x, self.w[name + ".weight"], self.w.get(name + ".bias"))

    def mlp(self, prefix, x):
        up = self.linear(prefix + "mlp.up", x)
        gate, value = up[:, 0::2], up[:, 1::2]
        hidden = {
            "relu": lambda: up.clamp(min=0),
            "gelu": lambda: F.gelu(up),
            "gated-gelu": lambda: F.gelu(gate, approximate="tanh") * value,
            "gated-silu": lambda: gate * torch.sigmoid(gate) * value,
        }[self.args.activation]()
        return self.linear(prefix + "mlp.down", hidden)

    def self_attention(self, prefix, x, segments, side):
        heads, d, s = self.args.num_attention_heads, self.args.kv_hidden_size, len(x)
        packed = self.linear(prefix + "attention.query_key_value", self.norm(prefix + "input_norm", x)).view(
            s, heads, 3, d
        )
        mask = torch.tensor([[bool(i == j) for j in segments] for i in segments])
        if side == "decoder":
            mask = mask & torch.ones(s, s, dtype=torch.bool).tril()
        bias = self.bias(side, s) if self.is_relative else torch.zeros(heads, s, s)
        context = self.attend(packed[:, :, 0], packed[:, :, 1], packed[:, :, 2], bias, mask)
        return self.linear(prefix + "attention.dense", context)

    def cross_attention(self, at, y, memory):
        heads, d = self.args.num_attention_heads, self.args.kv_hidden_size
        query = self.linear(at + "cross_attention.query", self.norm(at + "cross_norm", y)).view(-1, heads, d)
        key_value = self.linear(at + "cross_attention.key_value", memory).view(-1, heads, 2, d)
        mask = torch.tensor([[bool(i == j) for j in self.enc] for i in self.dec])
        context = self.attend(query, key_value[:, :, 0], key_value[:, :, 1], None, mask)
        return self.linear(at + "cross_attention.dense", context)

    def attend(self, query, key, value, bias, mask):
        scores = torch.einsum("iad,jad->aij", query, key)
        scores = scores if self.is_relative else scores / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if bias is not None:
            scores = scores + bias
        return torch.einsum("aij,jad->iad", scores.softmax(-1), value).flatten(1)

    def bias(self, side, s):
        rows = [[self.bucket(j - i, side) for j in range(s)] for i in range(s)]
        return self.w[f"{side}.bias.weight"][torch.tensor(rows)].permute(2, 0, 1)  # [a, s, s]

    def bucket(self, distance, side):
        num_buckets = self.args.relative_attention_num_buckets // (2 if side == "encoder" else 1)
        offset = num_buckets if side == "encoder" and distance > 0 else 0
        magnitude = abs(distance) if side == "encoder" else max(-distance, 0)
        max_exact = num_buckets // 2
        if magnitude < max_exact:
            return offset + magnitude
        log_ratio = math.log(magnitude / max_exact) / math.log(self.args.relative_attention_max_distance / max_exact)
        return offset + min(max_exact + int(log_ratio * (num_buckets - max_exact)), num_buckets - 1)
