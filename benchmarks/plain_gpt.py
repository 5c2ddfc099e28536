"""A plain GPT-2 of ``torch.nn`` layers: what a small single-process script would train, as the mark for our speed.

No groups: pre-norm layers on [b, s, h], causal SDPA, a tied head, mean cross-entropy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.sizes import GPTSizes


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream.

    Shapes:
        input, output [b, s, h]
    """

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        h = sizes.hidden_size
        self.num_heads = sizes.num_attention_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.attention_out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (y.view(b, s, self.num_heads, -1).transpose(1, 2) for y in self.qkv(x).split(h, dim=2))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [b, a, s, d]
        return self.attention_out(context.transpose(1, 2).reshape(b, s, h))


class PlainGPT(nn.Module):
    """Tokens and labels [b, s] to the mean cross-entropy."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.word = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.position = nn.Embedding(sizes.seq_length, sizes.hidden_size)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.num_layers))
        self.final_norm = nn.LayerNorm(sizes.hidden_size)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.word(tokens) + self.position(positions)  # [b, s, h]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.final_norm(x), self.word.weight)  # [b, s, v]
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
