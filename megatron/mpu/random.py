"""Dropout from keyed generators: nothing to save, nothing to restore, the same in the recomputed forward.

A mask is a function of (seed, step, micro-batch, data rank, layer, site) and, where the tensor is cut over the
tensor-parallel group, of the tensor rank. So it is equal on all ranks that hold the same activation, different
everywhere else, and a resumed or recomputed step draws the very same masks. ``megatron.mpu.counted`` has masks that
do not depend on the layout either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron.device import default_generator
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.kept import Keeper


@dataclass(frozen=True)
class Position:
    """Which forward pass this is: the optimizer step and the micro-batch within it, both from 0.

    ``num_micro_batches`` is how many the step has on each replica; streams that know no samples do not look at it.
    """

    step: int = 0
    micro_batch: int = 0
    num_micro_batches: int = 1


class DropoutStreams:
    """The source of all dropout masks of one rank.

    Args:
        seed: the run's seed, the same on every rank.
        data: the data-parallel group: its ranks draw different masks.
        tensor: the tensor-parallel group: its ranks draw different masks for tensors that are cut.
    """

    def __init__(self, seed: int = 0, data: Group = SINGLE, tensor: Group = SINGLE) -> None:
        self.seed = seed
        self.data_rank = data.rank
        self.tensor_rank = tensor.rank
        self.position = Position()

    @contextmanager
    def at(self, position: Position) -> Iterator[None]:
        """Draw masks as of ``position`` inside the ``with`` block: what a recomputed forward needs."""
        kept, self.position = self.position, position
        try:
            yield
        finally:
            self.position = kept

    def key(self, layer: int, site: str, is_cut: bool) -> int:
        """Return the generator seed for one mask; ``layer`` may be a tensor of one number."""
        tensor_rank = self.tensor_rank if is_cut else -1
        place = (
            self.seed,
            self.position.step,
            self.position.micro_batch,
            self.data_rank,
            tensor_rank,
            int(layer),
            site,
        )
        return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=7).digest(), "little")

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
        self,
        x: torch.Tensor,
        probability: float,
        *,
        training: bool,
        layer: int,
        site: str,
        is_cut: bool = False,
        is_part: bool = False,
    ) -> torch.Tensor:
        """Return ``x`` with elements dropped by the mask that belongs to this place.

        Args:
            is_cut: ``x`` is this tensor rank's slice rather than a copy that all ranks hold.
            is_part: ``x`` is this tensor rank's part of the sequence.
        """
        if not training or probability == 0.0:
            return x
        return self.drop(x, probability, layer, site, is_cut or is_part)

    def drop(self, x: torch.Tensor, probability: float, layer: int, site: str, is_cut: bool) -> torch.Tensor:
        """Return what ``dropout`` does in training, by a generator."""
        with self.generator(x.device, layer, site, is_cut):
            return F.dropout(x, probability, training=True)

    def recomputed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(*args)`` without keeping what it needs for its backward; see ``checkpoint``."""
        return checkpoint(self, function, *args)

    def attend(
        self,
        function: Callable[..., torch.Tensor],
        probability: float,
        *,
        device: torch.device,
        layer: int,
        site: str,
        is_cut: bool,
    ) -> torch.Tensor:
        """Return what ``function`` of ``megatron.ops`` gives when it drops probabilities by the mask of this place.

        Args:
            function: takes ``dropout``, a rate at which it draws from torch's default generator itself, or ``drop``.
            is_cut: the heads are this tensor rank's.
        """
        with self.generator(device, layer, site, is_cut):
            return function(dropout=probability)


def checkpoint(streams: DropoutStreams, function: Callable[..., Any], *args: Any, keeper: Keeper | None = None) -> Any:
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
