"""Initial weights from a counter keyed by (seed, parameter name): the same numbers in every layout.

Each parameter draws its whole global tensor from a generator seeded by its name and keeps its own part. A large table
is drawn in blocks of rows, so that a rank never holds more than its part and one block.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable

import torch

from megatron.model.sizes import T5Sizes
from megatron.mpu.shard import Shard, shard_of
from megatron.mpu.unset import give_memory, is_unset

Rule = Callable[[str, tuple[int, ...]], float | torch.Tensor]
"""From logical name and global shape to the standard deviation: one number, or one for each row as [rows, 1]."""

ROWS_PER_BLOCK = 1024
RESIDUAL_OUTPUTS = ("attention.dense.weight", "mlp.down.weight")


@torch.no_grad()
def initialize(named_parameters: Iterable[tuple[str, torch.Tensor]], *, seed: int, rule: Rule) -> None:
    """Fill the weights that layers left unset, in place, by their logical names: normal(0, ``rule(name, shape)``).

    Padded vocabulary rows are zero. What a module has set itself (biases, norms, a user's own layers) stays.
    """
    for name, parameter in named_parameters:
        if not is_unset(parameter):
            continue
        give_memory(parameter)
        shard = shard_of(parameter)
        _fill_normal(parameter, shard, name, seed, rule(name, shard.global_shape))
        parameter.is_unset = False  # type: ignore[attr-defined]


def gpt2_rule(std: float, num_layers: int) -> Rule:
    """Return ``std`` for all but the weights that end in the residual stream, which have ``std / sqrt(2 L)``.

    Source: Radford et al. 2019, section 2.3; Shoeybi et al. 2019, section 4.
    """

    def rule(name: str, shape: tuple[int, ...]) -> float:
        return std / math.sqrt(2.0 * num_layers) if name.endswith(RESIDUAL_OUTPUTS) else std

    return rule


def bert_rule(std: float) -> Rule:
    """Return ``std`` for all weights: what joins the residual stream is normed at once.

    Source: Devlin et al.'s code.
    """
    return lambda name, shape: std


def t5_rule(sizes: T5Sizes, std: float) -> Rule:
    """Return how T5 starts; ``std`` acts on the variant with learned positions only, which starts as GPT-2 does.

    With relative positions tables have 1 and a product of n inputs ``n ** -0.5``; a query has ``(h d) ** -0.5``, which
    stands for the scale that the scores do not have. These are the factors of Hugging Face's ``_init_weights``.

    Source: Raffel et al. 2020, code; Shazeer and Stern 2018, "Adafactor".
    """
    if not sizes.is_relative:
        sides = {"encoder": gpt2_rule(std, sizes.enc_layers), "decoder": gpt2_rule(std, sizes.dec_layers)}
        return lambda name, shape: sides.get(name.partition(".")[0], sides["encoder"])(name, shape)
    into = sizes.hidden_size**-0.5
    query = (sizes.hidden_size * sizes.kv_hidden_size) ** -0.5

    def rule(name: str, shape: tuple[int, ...]) -> float | torch.Tensor:
        if name in ("embedding.word.weight", "head.weight"):
            return 1.0
        if name.endswith(".query_key_value.weight"):  # rows of a head: query, key, value
            head = torch.tensor([query, into, into]).repeat_interleave(sizes.kv_hidden_size)
            return head.repeat(sizes.num_attention_heads).unsqueeze(1)
        if name.endswith(".query.weight"):
            return query
        return shape[1] ** -0.5 if name.endswith(RESIDUAL_OUTPUTS) else into

    return rule


def _fill_normal(parameter: torch.Tensor, shard: Shard, name: str, seed: int, std: float | torch.Tensor) -> None:
    parameter.zero_()
    rows = shard.global_shape[0]
    for first in range(0, rows, ROWS_PER_BLOCK):
        last = min(first + ROWS_PER_BLOCK, rows)
        if shard.partition_dim == 0 and (last <= shard.start or first >= shard.start + shard.length):
            continue
        scale = std[first:last] if isinstance(std, torch.Tensor) else std
        block = _block(name, seed, first, last - first, shard.global_shape[1:]) * scale
        _copy_overlap(parameter, shard, block, first)


def _block(name: str, seed: int, first: int, rows: int, rest: tuple[int, ...]) -> torch.Tensor:
    """Return rows ``first ... first + rows`` of the parameter's standard normal numbers, in fp32.

    One generator per block, seeded by a hash, on the CPU: the device and the layout play no part.
    """
    digest = hashlib.blake2b(f"{seed}/{name}/{first}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn((rows, *rest), generator=generator, dtype=torch.float32)


def _copy_overlap(parameter: torch.Tensor, shard: Shard, block: torch.Tensor, first: int) -> None:
    if shard.partition_dim == 0:
        start = max(first, shard.start)
        stop = min(first + block.shape[0], shard.start + shard.length)
        parameter[start - shard.start : stop - shard.start].copy_(block[start - first : stop - first])
    elif shard.partition_dim is None:
        parameter[first : first + block.shape[0]].copy_(block)
    else:
        part = block.narrow(shard.partition_dim, shard.start, shard.length)
        parameter[first : first + block.shape[0]].copy_(part)
