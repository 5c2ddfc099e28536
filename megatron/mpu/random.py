"""Dropout from keyed generators or Philox counters (--layout-independent-dropout); mpu.checkpoint.

A mask is a function of (seed, step, micro-batch, data rank, layer, site) and, where the tensor is cut over the
tensor-parallel group, of the tensor rank. So it is equal on all ranks that hold the same activation, different
everywhere else, and a resumed or recomputed step draws the very same masks. ``PhiloxDropout`` has masks that
do not depend on the layout either. On CUDA a kernel takes the same key in place of a generator: no mask is in memory,
and it depends on no number of multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron.device import default_generator
from megatron.mpu import fused_dropout
from megatron.mpu.activation_storage import ActivationStorage
from megatron.mpu.fused_dropout import Mask
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.random_key import hashed


@dataclass(frozen=True)
class DropoutKey:
    """Which forward pass this is: the optimizer step and the micro-batch within it, both from 0.

    ``first`` is how many micro-batches of the step earlier replicas take; streams that know no samples do not look at
    it.
    """

    step: int = 0
    micro_batch: int = 0
    first: int = 0


class DropoutStreams:
    """The source of all dropout masks of one rank.

    Args:
        seed: the run's seed, the same on every rank.
        data: the data-parallel group: its ranks draw different masks.
        tensor: the tensor-parallel group: its ranks draw different masks for tensors that are cut.

    Attributes:
        has_kernels: on CUDA masks are made by Triton's kernels, where it is installed.
    """

    def __init__(self, seed: int = 0, data: Group = SINGLE, tensor: Group = SINGLE) -> None:
        self.seed = seed
        self.data_rank = data.rank
        self.tensor_rank = tensor.rank
        self.has_kernels = True
        self._counts: torch.Tensor | None = None  # of the position, for compiled layers
        self.position = DropoutKey()

    @property
    def position(self) -> DropoutKey:
        """Which forward pass runs now."""
        return self._position

    @position.setter
    def position(self, position: DropoutKey) -> None:
        self._position = position
        if self._counts is not None:  # a new tensor, for graphs keep the one that they were given
            self._counts = torch.tensor([position.step, position.micro_batch])

    def enter_graphs(self) -> None:
        """Let compiled layers drop elements in the midst of their graphs."""
        self._counts = torch.tensor([self.position.step, self.position.micro_batch])

    @contextmanager
    def at(self, position: DropoutKey) -> Iterator[None]:
        """Draw masks as of ``position`` inside the ``with`` block: what a recomputed forward needs."""
        kept, self.position = self.position, position
        try:
            yield
        finally:
            self.position = kept

    def key(self, layer: int, site: str, is_cut: bool) -> int:
        """Return the generator seed for one mask; ``layer`` may be a tensor of one number."""
        tensor_rank = self.tensor_rank if is_cut else -1
        at = self.position
        return hashed((self.seed, at.step, at.micro_batch, self.data_rank, tensor_rank, int(layer), site), 7)

    def by_kernel(self, x: torch.Tensor) -> bool:
        """Return whether the kernel drops elements of ``x``: of fp64 it would lose bits."""
        is_on_cuda = self.has_kernels and x.device.type == "cuda"
        return is_on_cuda and x.dtype != torch.float64 and fused_dropout.is_there()

    @contextmanager
    def generator(self, device: torch.device, layer: int, site: str, is_cut: bool) -> Iterator[None]:
        """Seed torch's default generator of ``device`` inside the ``with`` block and put its state back after."""
        generator = default_generator(device)
        state = generator.get_state()
        generator.manual_seed(self.key(layer, site, is_cut))
        try:
            yield
        finally:
            generator.set_state(state)

    def dropout(
        self, x: torch.Tensor, probability: float, *, training: bool, layer: int, site: str, is_cut: bool = False,
        is_part: bool = False, residual: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return ``x`` with elements dropped by the mask that belongs to this place, added to ``residual`` if any.

        Args:
            is_cut: ``x`` is this tensor rank's slice rather than a copy that all ranks hold.
            is_part: ``x`` is this tensor rank's part of the sequence.
        """
        if not training or probability == 0.0:
            return add_residual(residual, x)
        if self._counts is not None and torch.compiler.is_compiling():
            return add_residual(residual, self._drop_in_graph(x, probability, layer, site, is_cut or is_part))
        return self.drop(x, probability, layer, site, is_cut or is_part, residual)

    def drop(
        self, x: torch.Tensor, probability: float, layer: int, site: str, is_cut: bool,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return what ``dropout`` does in training."""
        if self.by_kernel(x):
            return fused_dropout.drop(x, residual, Mask(self.key(layer, site, is_cut), probability))
        with self.generator(x.device, layer, site, is_cut):
            dropped = F.dropout(x, probability, training=True)
        return add_residual(residual, dropped)

    def _drop_in_graph(self, x: torch.Tensor, probability: float, layer: Any, site: str, is_cut: bool) -> torch.Tensor:
        """Return what ``drop`` does, by an operator; ``layer`` is a tensor."""
        ranks = [self.seed, self.data_rank, self.tensor_rank if is_cut else -1]
        by_kernel = self.by_kernel(x)
        dropped, _ = fused_dropout.keyed_dropout(x, self._counts, layer, ranks, site, probability, by_kernel)
        return dropped

    def recomputed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(*args)`` without keeping what it needs for its backward; see ``checkpoint``."""
        return checkpoint(self, function, *args)

    def attend(
        self, function: Callable[..., torch.Tensor], probability: float, *, device: torch.device, layer: int,
        site: str, is_cut: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Return what ``function`` of ``megatron.ops`` gives when it drops probabilities by the mask of this place.

        Args:
            function: takes ``dropout``, a rate at which it draws from torch's default generator itself, or ``drop``.
            is_cut: the heads are this tensor rank's.
        """
        with self.generator(device, layer, site, is_cut):
            return function(dropout=probability)


def checkpoint(
    streams: DropoutStreams, function: Callable[..., Any], *args: Any, keeper: ActivationStorage | None = None
) -> Any:
    """Run ``function(*args)`` without keeping its activations; backward runs it again with the same dropout masks.

    Args:
        keeper: puts ``args`` away until then; None: they wait as they are.

    Source: Chen et al. 2016, "Training deep nets with sublinear memory cost".
    """
    position = streams.position  # of now: when backward recomputes, another micro-batch may be running
    inputs = None if keeper is None else keeper.put_away(args)

    def run(*given: Any) -> Any:
        with streams.at(position):
            return function(*(given if inputs is None else inputs.take()))

    held = args if inputs is None else ()
    return torch_checkpoint(run, *held, use_reentrant=False, preserve_rng_state=False)


def add_residual(residual: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return x if residual is None else residual + x
