"""ParamInfo: parameter metadata that values and shape do not show.

Layers set the metadata at construction; the engine, the optimizer, checkpoints and comparisons read it. It is one
frozen dataclass, stored as one tensor attribute:

    set_info(weight, replace(info_of(weight), shard=shard))
    info_of(weight).shard

The attribute survives assignments of ``parameter.data``, so ``module.to(dtype)``, moves to a device and the shards of
ZeRO 3 preserve it. Pickle saves it too. ``copy.deepcopy`` of a ``torch.nn.Parameter`` drops all Python attributes;
``copy_infos`` copies the metadata to the copied module. Compiled layers do not read it.

DeepSpeed, Megatron's layers and users' models use other attributes for some of the metadata. Only this file's
second half reads and writes them:

| attribute | set by | read by |
|---|---|---|
| ``model_parallel``, ``tensor_model_parallel`` | ``set_shard``, users' models | tds, DeepSpeed: norms |
| ``ds_pipe_replicated`` | DeepSpeed's tied layers, ``mark_tied_copy`` | tds, DeepSpeed: norms |
| ``sequence_parallel`` | ``set_partial``, Megatron's and Transformer Engine's layers | tds |
| ``ds_optim_param`` | ``excluded_from_broadcast`` | DeepSpeed: weight broadcast in ``initialize`` |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import nn

from tds.renamed import Renamed

Tensor = TypeVar("Tensor", bound=torch.Tensor)

AddProduct = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds ``rows^T inputs``, for rows [n, output_size] and inputs [n, input_size], to a weight gradient."""
InitialValues = Callable[[torch.Tensor], torch.Tensor]
"""Function from independent standard normal values in fp32 to the initial values of a parameter, element by element."""


@dataclass(frozen=True)
class Shard:
    """The shard of a logical tensor on this rank.

    ``global_shape`` is the logical shape, without padding. Along ``partition_dim``, this rank has the logical indices
    ``start ... start + length``. Rows of the local tensor after ``length`` are padding and are zero. If
    ``partition_dim`` is None, every rank of the tensor-parallel group has the full tensor.
    """

    global_shape: tuple[int, ...]
    partition_dim: int | None = None
    start: int = 0
    length: int = 0

    cut = Renamed("narrow")

    @property
    def is_partitioned(self) -> bool:
        return self.partition_dim is not None

    def narrow(self, full: torch.Tensor) -> torch.Tensor:
        """Slice this rank's shard, without padding, from the logical tensor ``full``."""
        if self.partition_dim is None:
            return full
        return full.narrow(self.partition_dim, self.start, self.length)

    def unpadded(self, local: torch.Tensor) -> torch.Tensor:
        """View ``local`` without its padding rows."""
        if self.partition_dim is None or local.shape[self.partition_dim] == self.length:
            return local
        return local.narrow(self.partition_dim, 0, self.length)


@dataclass(frozen=True)
class Matrices:
    """The matrices packed in a weight [m, n] of a layer, for optimizers of full matrices such as Muon.

    Their rows alternate in periods, so that a shard of full periods contains the same fraction of each matrix:

    | weight | rows of a period | periods |
    |---|---|---|
    | query, key, value of self-attention | (a/g) d of queries, d of keys, d_v of values | g, the query groups |
    | key, value of attention to the encoder | d of keys, d of values | a, the heads |
    | gate and up of a gated feed-forward | 1 of the gate, 1 of up | f |
    | queries of multi-latent attention | d_n not rotated, d_r rotated | a, the heads |
    | keys and values from a latent | d_n of keys, d_v of values | a, the heads |
    | latent and rotated key | r_kv of the latent, d_r of the key | 1 |
    | every other weight of a layer | all | 1 |

    Args:
        widths: rows of each matrix in a period; empty: the weight is one matrix.
        head: rows per attention head; 0: the rows are not divided into heads.
        is_apart: each period has its own matrices; otherwise a matrix has rows in every period.
    """

    widths: tuple[int, ...] = ()
    head: int = 0
    is_apart: bool = False

    def split(self, *, qkv: bool = True, heads: bool = False) -> Matrices:
        """Return a finer or coarser division of the same weight. Weights without heads are not changed.

        Args:
            qkv: query, key and value are separate matrices; False: they are one matrix.
            heads: every attention head is a separate matrix; ``qkv`` is then ignored.
        """
        if not self.head:
            return self
        if heads:
            if sum(self.widths) == self.head:  # the parts of a head are separate matrices
                return Matrices(self.widths, self.head, is_apart=True)
            *other_widths, value = self.widths or (self.head,)
            if value != self.head:  # value heads have another size
                heads_of_group = (self.head,) * (sum(other_widths) // self.head)
                return Matrices((*heads_of_group, value), self.head, is_apart=True)
            return Matrices((self.head,), self.head, is_apart=True)
        return self if qkv else Matrices()

    def views(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """View each matrix in ``weight`` [m, n] as [periods, rows of a period, n].

        Raises:
            ValueError: m is not a multiple of the period.
        """
        period = sum(self.widths) or len(weight)
        if len(weight) % period:
            raise ValueError(f"the number of rows of a packed weight must be a multiple of {period}, got {len(weight)}")
        by_period = weight.unflatten(0, (-1, period))
        if self.is_apart:
            return [part for rows in by_period.split(1) for part in rows.split(list(self.widths), 1)]
        return list(by_period.split(list(self.widths), 1)) if self.widths else [by_period]

    def shapes(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """List (rows, columns) for each matrix in a weight with this ``shape``."""
        views = self.views(torch.empty(tuple(shape), device="meta"))
        return [(math.prod(view.shape[:2]), view.shape[2]) for view in views]


class WeightProducts(Protocol):
    """Products of a weight [output_size, input_size] in another number format than that of the tensors.

    Weight gradients are computed in the number format of the tensors. ``weights`` [E, output_size, input_size] are the
    stacked weights of experts, and ``ends`` int32 [E] the index after each expert's last row.

    Shapes:
        x    [..., input_size], of ``grouped_forward`` [m, input_size]
        grad [m, output_size]
    """

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute ``x W^T``, [..., output_size]. Collective if the weight is sharded by columns."""

    def input_grad(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute ``grad W``, [m, input_size]. Collective if the weight is sharded by rows."""

    def grouped_forward(self, x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Compute ``x W_e^T`` for the rows of each expert, [m, output_size]."""

    def grouped_input_grad(self, grad: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Compute ``grad W_e`` for the rows of each expert, [m, input_size]."""


@dataclass(frozen=True)
class ParamInfo:
    """Parameter metadata.

    Args:
        shard: this rank's shard of the logical tensor; None: no layer has set it.
        matrices: the matrices in a layer weight; None for embeddings, heads, norms and biases.
        has_partial_grad: every tensor-parallel rank has the full parameter and computes a partial gradient, from
            its part of the sequence or from its heads. The optimizer all-reduces the gradient over that group.
        is_expert: an expert weight, which only some ranks of the data-parallel group have. Its gradient is
            excluded from the all-reduce over the replicas; the optimizer reduces it over the ranks with the expert.
        is_uninitialized: the values are not set yet; ``megatron.models.common.parameters`` draws them by name.
        initial_values: distribution of the values to draw; None: normal, scaled by the rule of the model.
        add_product: accumulates the gradient in place (``tds.linear_function``); None: autograd accumulates it.
        products: computes products with the weight, such as those in FP8; None: torch computes them.
    """

    shard: Shard | None = None
    matrices: Matrices | None = None
    has_partial_grad: bool = False
    is_expert: bool = False
    is_uninitialized: bool = False
    initial_values: InitialValues | None = None
    add_product: AddProduct | None = None
    products: WeightProducts | None = None


_ATTRIBUTE = "_param_info"
_DEFAULT_INFO = ParamInfo()


def info_of(parameter: torch.Tensor) -> ParamInfo:
    """Return the metadata of ``parameter``; the defaults of ``ParamInfo`` if it has none."""
    info: ParamInfo = getattr(parameter, _ATTRIBUTE, _DEFAULT_INFO)
    return info


def set_info(parameter: Tensor, info: ParamInfo) -> Tensor:
    """Set the metadata of ``parameter`` and return ``parameter``."""
    setattr(parameter, _ATTRIBUTE, info)
    return parameter


def set_shard(parameter: Tensor, shard: Shard) -> Tensor:
    """Set the shard of ``parameter``, and the attributes that DeepSpeed and ported scripts read."""
    parameter.model_parallel = shard.is_partitioned  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = shard.is_partitioned  # type: ignore[attr-defined]
    return set_info(parameter, replace(info_of(parameter), shard=shard))


def copy_infos(source: nn.Module, target: nn.Module) -> None:
    """Copy all parameter metadata from ``source`` to ``target``, its deep copy.

    ``add_product`` is not copied, because it accumulates the original parameter's gradient.
    """
    for original, copied in zip(source.parameters(), target.parameters(), strict=True):
        set_info(copied, replace(info_of(original), add_product=None))
        copy_attributes(original, copied)


# Attributes that DeepSpeed, Megatron's layers and users' models set or read.

_NORM_ATTRIBUTES = ("ds_pipe_replicated", "model_parallel", "tensor_model_parallel")


def is_tensor_parallel(parameter: torch.Tensor) -> bool:
    """Return True if the tensor-parallel ranks have different shards of ``parameter``."""
    return bool(getattr(parameter, "model_parallel", False) or getattr(parameter, "tensor_model_parallel", False))


def is_tied_copy(parameter: torch.Tensor) -> bool:
    """Return True if another pipeline stage owns this tied weight, so that norms do not count it on this stage."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def mark_tied_copy(parameter: torch.Tensor, is_copy: bool) -> None:
    """Mark this tied weight as a copy, which another pipeline stage owns, or as owned by this stage."""
    parameter.ds_pipe_replicated = is_copy  # type: ignore[attr-defined]


def set_partial(parameter: Tensor) -> Tensor:
    """Mark that each tensor-parallel rank computes a partial gradient of ``parameter``."""
    parameter.sequence_parallel = True  # type: ignore[attr-defined]
    return set_info(parameter, replace(info_of(parameter), has_partial_grad=True))


def is_partial(parameter: torch.Tensor) -> bool:
    """Return True if each tensor-parallel rank computes a partial gradient of ``parameter``."""
    return info_of(parameter).has_partial_grad or bool(getattr(parameter, "sequence_parallel", False))


def copy_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the attributes that norms read; DeepSpeed's ``FP16_UnfusedOptimizer`` reads them from gradients."""
    for name in _NORM_ATTRIBUTES:
        setattr(target, name, getattr(source, name, False))


@contextmanager
def excluded_from_broadcast(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Mark ``parameters`` with ``ds_optim_param`` in the block, so that ``deepspeed.initialize`` skips them."""
    marked = list(parameters)
    for parameter in marked:
        parameter.ds_optim_param = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter in marked:
            del parameter.ds_optim_param  # type: ignore[attr-defined]
