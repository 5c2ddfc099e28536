"""DropoutStreams: dropout masks from keyed generators; mpu.checkpoint: recomputation with the same masks.

A mask is a function of (seed, step, micro-batch, data rank, layer, site) and, for tensors sharded over the
tensor-parallel group, of the tensor rank. Ranks that hold the same activation therefore draw the same mask, other ranks
draw different masks, and a resumed or recomputed step draws the same masks again. On CUDA a kernel takes the key
instead of a generator: no mask is stored in memory, and masks do not depend on the number of multiprocessors. Masks
from ``PhiloxDropout`` (--layout-independent-dropout) do not depend on the layout either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron import triton_launch
from megatron.device import default_generator
from megatron.mpu import fused_dropout
from megatron.mpu.activation_storage import ActivationStorage
from megatron.mpu.fused_dropout import Mask
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.random_key import hash_key


@dataclass(frozen=True)
class DropoutKey:
    """Forward-pass position: the optimizer step and the micro-batch within it, both from 0.

    ``first_micro_batch + micro_batch`` is the micro-batch index over all replicas. Only ``PhiloxDropout`` reads
    ``first_micro_batch``.
    """

    step: int = 0
    micro_batch: int = 0
    first_micro_batch: int = 0


class DropoutStreams:
    """Source of one rank's dropout masks.

    Args:
        seed: the run's seed, the same on every rank.
        data: data-parallel group, whose ranks draw different masks.
        tensor: tensor-parallel group, whose ranks draw different masks for sharded tensors.

    Attributes:
        has_kernels: use Triton kernels on CUDA if Triton is installed, for dropout and in layers
            (``ParallelContext.uses_kernels``).
        needs_probabilities: ``attend`` passes ``drop``, which needs all attention probabilities in memory.
    """

    needs_probabilities = False

    def __init__(self, seed: int = 0, data: Group = SINGLE, tensor: Group = SINGLE) -> None:
        self.seed = seed
        self.data_rank = data.rank
        self.tensor_rank = tensor.rank
        self.has_kernels = True
        self._position_tensor: torch.Tensor | None = None  # step and micro-batch, for compiled layers
        self.position = DropoutKey()

    @property
    def position(self) -> DropoutKey:
        """Position of the current forward pass."""
        return self._position

    @position.setter
    def position(self, position: DropoutKey) -> None:
        self._position = position
        if self._position_tensor is not None:  # a new tensor, because graphs have saved the old one
            self._position_tensor = torch.tensor([position.step, position.micro_batch])

    def enable_graph_dropout(self) -> None:
        """Store the position in a tensor from now on, so that compiled layers apply dropout within their graphs."""
        self._position_tensor = torch.tensor([self.position.step, self.position.micro_batch])

    @contextmanager
    def at(self, position: DropoutKey) -> Iterator[None]:
        """Draw the masks for ``position`` in the ``with`` block, as a recomputed forward requires."""
        previous, self.position = self.position, position
        try:
            yield
        finally:
            self.position = previous

    def key(self, layer: int, site: str, is_sharded: bool) -> int:
        """Return a mask's generator seed; ``layer`` may be a single-element tensor."""
        tensor_rank = self.tensor_rank if is_sharded else -1
        position = self.position
        return hash_key(
            (self.seed, position.step, position.micro_batch, self.data_rank, tensor_rank, int(layer), site), 7
        )

    def uses_kernel(self, x: torch.Tensor) -> bool:
        """Return True if a Triton kernel processes ``x``: on CUDA, except for fp64, which would lose precision."""
        return self.has_kernels and x.dtype != torch.float64 and triton_launch.is_available(x.device)

    @contextmanager
    def generator(self, device: torch.device, layer: int, site: str, is_sharded: bool) -> Iterator[None]:
        """Seed torch's default generator on ``device`` for the ``with`` block and restore its state afterwards."""
        generator = default_generator(device)
        state = generator.get_state()
        generator.manual_seed(self.key(layer, site, is_sharded))
        try:
            yield
        finally:
            generator.set_state(state)

    def dropout(
        self, x: torch.Tensor, probability: float, *, training: bool, layer: int, site: str, is_sharded: bool = False,
        is_sequence_slice: bool = False, residual: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Apply dropout with the mask for ``layer`` and ``site`` to ``x``, and add ``residual`` if given.

        Args:
            is_sharded: ``x`` is this tensor rank's shard rather than a replicated tensor.
            is_sequence_slice: ``x`` is this tensor rank's sequence slice.
        """
        if not training or probability == 0.0:
            return add_residual(residual, x)
        if self._position_tensor is not None and torch.compiler.is_compiling():
            return add_residual(
                residual, self._drop_in_graph(x, probability, layer, site, is_sharded or is_sequence_slice)
            )
        return self.drop(x, probability, layer, site, is_sharded or is_sequence_slice, residual)

    def drop(
        self, x: torch.Tensor, probability: float, layer: int, site: str, is_sharded: bool,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Apply dropout unconditionally, outside of compiled graphs; ``dropout`` decides whether to call this.

        Args:
            is_sharded: tensor ranks draw different masks, because ``x`` is a shard or a sequence slice.
        """
        if self.uses_kernel(x):
            return fused_dropout.drop(x, residual, Mask(self.key(layer, site, is_sharded), probability))
        with self.generator(x.device, layer, site, is_sharded):
            dropped = F.dropout(x, probability, training=True)
        return add_residual(residual, dropped)

    def _drop_in_graph(
        self, x: torch.Tensor, probability: float, layer: Any, site: str, is_sharded: bool
    ) -> torch.Tensor:
        """Apply dropout by the custom operator ``keyed_dropout``; ``layer`` is a tensor."""
        seed_and_ranks = [self.seed, self.data_rank, self.tensor_rank if is_sharded else -1]
        use_kernel = self.uses_kernel(x)
        dropped, _ = fused_dropout.keyed_dropout(
            x, self._position_tensor, layer, seed_and_ranks, site, probability, use_kernel
        )
        return dropped

    def recompute(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` without saving activations for backward; see ``checkpoint``."""
        return checkpoint(self, function, *args)

    def attend(
        self, function: Callable[..., torch.Tensor], probability: float, *, device: torch.device, layer: int,
        site: str, is_sharded: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Call the attention ``function`` from ``megatron.ops`` with dropout of its probabilities.

        Args:
            function: takes either ``dropout``, a rate for a mask from torch's default generator, or ``drop``, a
                function that applies dropout to probabilities.
            is_sharded: the heads are sharded over the tensor-parallel group.
        """
        with self.generator(device, layer, site, is_sharded):
            return function(dropout=probability)


def checkpoint(
    streams: DropoutStreams, function: Callable[..., Any], *args: Any, storage: ActivationStorage | None = None
) -> Any:
    """Run ``function(*args)`` without saving activations; backward runs it again with the same dropout masks.

    Args:
        storage: stores ``args`` until backward; None: autograd saves them unchanged.

    Source: Chen et al. 2016, "Training deep nets with sublinear memory cost".
    """
    position = streams.position  # read now: another micro-batch may be running when backward recomputes
    inputs = None if storage is None else storage.store(args)

    def run(*original_args: Any) -> Any:
        with streams.at(position):
            return function(*(original_args if inputs is None else inputs.restore()))

    saved_args = args if inputs is None else ()
    return torch_checkpoint(run, *saved_args, use_reentrant=False, preserve_rng_state=False)


def add_residual(residual: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return x if residual is None else residual + x
