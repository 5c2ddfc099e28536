"""A plain GPT-2 of ``torch.nn`` layers: what a small single-process script would train, as the mark for our speed.

No groups, no engine, no masters: pre-norm layers on [b, s, h], causal SDPA, a tied head, mean cross-entropy, fused
AdamW, clipping by torch's own function.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class GPTSizes:
    """The sizes that all contenders of a benchmark share; names as in the flags."""

    num_layers: int = 8
    hidden_size: int = 512
    num_attention_heads: int = 8
    vocab_size: int = 16384
    seq_length: int = 512


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


class PlainLoop:
    """Any model that returns a mean loss, trained as small scripts do.

    Args:
        model: called with tokens and labels [b, s].
        dtype: bf16 runs the forward pass under autocast; the weights stay fp32.
    """

    def __init__(
        self, model: nn.Module, *, device: torch.device, dtype: torch.dtype, lr: float, clip_grad: float
    ) -> None:
        self.model = model.to(device).train()
        self.device, self.dtype, self.clip_grad = device, dtype, clip_grad
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, fused=True)

    def step(self, text: torch.Tensor) -> torch.Tensor:
        """Train on ``text`` [b, s+1] and return the loss; it is not read, so a GPU need not wait."""
        text = text.to(self.device)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
            loss = self.model(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()
