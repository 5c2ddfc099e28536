"""Initial weights, and names of parameters and modules, that do not depend on the layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from megatron.mpu.shard import Shard, is_uninitialized, materialize, set_uninitialized, shard_of
from tds.param_info import InitialValues, info_of

# Initial weights.
#
# The logical tensor of each parameter is drawn from generators seeded by (seed, name), and each rank keeps its shard,
# so that initial weights are the same in every layout. Tensors are drawn in blocks of rows, so that a rank never holds
# more than its shard and one block.

Rule = Callable[[str, tuple[int, ...]], float | torch.Tensor]
"""Function from logical name and global shape to the standard deviation: a number, or one per row as [rows, 1]."""

ROWS_PER_BLOCK = 1024
RESIDUAL_OUTPUTS = ("attention.dense.weight", "recurrent.dense.weight", ".down.weight")


@torch.no_grad()
def initialize(named_parameters: Iterable[tuple[str, torch.Tensor]], *, seed: int, rule: Rule) -> None:
    """Fill uninitialised weights in place with normal(0, ``rule(name, shape)``), where ``name`` is the logical name.

    A weight with ``initial_values`` (``ParamInfo``) has these instead.

    Padded vocabulary rows are zero. Parameters that a module has initialised (biases, norms, a user's own layers) are
    not changed.
    """
    for name, parameter in named_parameters:
        if not is_uninitialized(parameter):
            continue
        materialize(parameter)
        shard, initial_values = shard_of(parameter), info_of(parameter).initial_values
        std = 1.0 if initial_values else rule(name, shard.global_shape)
        _fill_normal(parameter, shard, name, seed, std, initial_values)
        set_uninitialized(parameter, False)


def gpt2_rule(std: float, num_layers: float, width_multiplier: float = 1.0) -> Rule:
    """Return GPT-2's rule: ``std / sqrt(2 num_layers)`` for projections into the residual stream, otherwise ``std``.

    Args:
        num_layers: half the number of additions to the residual stream; a layer with one half counts 0.5.
        width_multiplier: muP's m: the standard deviation of the layers' matrices is multiplied by ``1 / sqrt(m)``;
            embeddings and head are not changed.

    Source: Radford et al. 2019, section 2.3; Shoeybi et al. 2019, section 4; Yang et al. 2022, "Tensor Programs V",
    table 8.
    """

    def rule(name: str, shape: tuple[int, ...]) -> float:
        base_std = std / math.sqrt(2.0 * num_layers) if name.endswith(RESIDUAL_OUTPUTS) else std
        is_in_layer = name.startswith(("layers.", "mtp."))
        return base_std / math.sqrt(width_multiplier) if is_in_layer and len(shape) == 2 else base_std

    return rule


def _fill_normal(
    parameter: torch.Tensor,
    shard: Shard,
    name: str,
    seed: int,
    std: float | torch.Tensor,
    initial_values: InitialValues | None,
) -> None:
    parameter.zero_()
    num_rows = shard.global_shape[0]
    for block_start in range(0, num_rows, ROWS_PER_BLOCK):
        block_stop = min(block_start + ROWS_PER_BLOCK, num_rows)
        if shard.partition_dim == 0 and (block_stop <= shard.start or block_start >= shard.start + shard.length):
            continue
        scale = std[block_start:block_stop] if isinstance(std, torch.Tensor) else std
        block = _random_block(name, seed, block_start, block_stop - block_start, shard.global_shape[1:]) * scale
        _copy_overlap(parameter, shard, block if initial_values is None else initial_values(block), block_start)


def _random_block(name: str, seed: int, block_start: int, num_rows: int, row_shape: tuple[int, ...]) -> torch.Tensor:
    """Return ``num_rows`` rows, from ``block_start`` on, of the parameter's standard normal values, in fp32.

    Each block has a CPU generator seeded by a hash, so that values do not depend on the device or the layout.
    """
    digest = hashlib.blake2b(f"{seed}/{name}/{block_start}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn((num_rows, *row_shape), generator=generator, dtype=torch.float32)


def _copy_overlap(parameter: torch.Tensor, shard: Shard, block: torch.Tensor, block_start: int) -> None:
    if shard.partition_dim == 0:
        start = max(block_start, shard.start)
        stop = min(block_start + block.shape[0], shard.start + shard.length)
        parameter[start - shard.start : stop - shard.start].copy_(block[start - block_start : stop - block_start])
    elif shard.partition_dim is None:
        parameter[block_start : block_start + block.shape[0]].copy_(block)
    else:
        overlap = block.narrow(shard.partition_dim, shard.start, shard.length)
        parameter[block_start : block_start + block.shape[0]].copy_(overlap)


# Logical names of modules.


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (logical name, module) for each submodule of ``model`` on this rank.

    A model whose local names depend on its stage has a method ``logical_name(local_name)``, which is called with the
    name and a trailing dot. Several modules may share a name (T5's embeddings of both sides). If one of them contains
    another, such as a pipeline wrapper around a norm, only the inner module is returned.
    """
    logical_name = getattr(model, "logical_name", None)
    modules = {name: module for name, module in model.named_modules() if name}
    names = {
        local_name: local_name if logical_name is None else _logical_module_name(logical_name, local_name)
        for local_name in modules
    }
    return [
        (name, modules[local_name])
        for local_name, name in names.items()
        if name
        and not any(
            other_name == name and other_local_name.startswith(f"{local_name}.")
            for other_local_name, other_name in names.items()
        )
    ]


def _logical_module_name(logical_name: Callable[[str], str], local_name: str) -> str:
    """Return the logical name of a module, or "" for containers without a logical name (``tied_modules``)."""
    try:
        return logical_name(f"{local_name}.").rstrip(".")
    except (ValueError, KeyError, IndexError):
        return ""


# Logical names of parameters.


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (logical name, parameter) for each parameter of this rank; a shared parameter is yielded once.

    A model whose local names depend on its stage has a method ``logical_name(local_name) -> str``; otherwise the local
    name is the logical name. Copies of a tied weight on several stages have the same logical name.

    Raises:
        ValueError: two different parameters of this rank have the same logical name.
    """
    logical_name = getattr(model, "logical_name", None)
    local_names: dict[str, str] = {}
    for local_name, parameter in model.named_parameters():
        name = logical_name(local_name) if logical_name is not None else local_name
        if name in local_names:
            raise ValueError(
                f"a logical name must belong to one parameter, got {name} for {local_names[name]} and {local_name}"
            )
        local_names[name] = local_name
        yield name, parameter
