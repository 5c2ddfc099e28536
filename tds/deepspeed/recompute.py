"""Activation recomputation of a stage's layers, as DeepSpeed is configured.

DeepSpeed's checkpoint functions only support tensors and tuples. This module also supports layers that take and return
lists and dicts.

With ``partition_activations`` or ``cpu_checkpointing``, DeepSpeed's functions empty the input tensors of a run of
layers, even if other objects use them. The previous layer's output is then lost, and gradients are lost or raise
errors. With these settings, this module's checkpoint function replaces DeepSpeed's. It saves a copy of each input,
sharded over the tensor ranks and on the host as configured, and does not keep the input itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from tds.deepspeed.api import checkpointing
from tds.deepspeed.module import preserve_forward_counts
from tds.device import host_copy, rng_states, use_rng_states
from tds.log import log_rank_0
from tds.p2p.communicator import PackedLayout, TensorGroup
from tds.p2p.input_leaves import with_leaves
from tds.p2p.structure import Structure, flatten
from tds.p2p.tensor_meta import TensorMeta
from tds.torch_api import version_of


class Recompute:
    """Implementation of ``tds.engine.recompute.Recompute`` for one stage, as DeepSpeed is configured."""

    def __init__(self) -> None:
        self._saved_inputs = WeakIdKeyDictionary()  # tensor -> (version counter, saved copy); several runs may share it
        self._has_logged = False

    @contextmanager
    def running(self, module: Any) -> Iterator[None]:
        """Recompute the layers of ``module`` in the block as configured; restore the module's attributes afterwards."""
        if not getattr(module, "activation_checkpoint_interval", 0):
            yield
            return
        user_checkpoint_fn = module.activation_checkpoint_func
        if replaces_checkpoint_fn(user_checkpoint_fn):
            self._log_once()
        checkpoint_fn = self.checkpoint if replaces_checkpoint_fn(user_checkpoint_fn) else user_checkpoint_fn
        module.activation_checkpoint_func = preserve_structure(checkpoint_fn)
        try:
            yield
        finally:
            module.activation_checkpoint_func = user_checkpoint_fn

    def is_reentrant(self, module: Any) -> bool:
        return recomputes_reentrantly(module)

    def discard(self) -> None:
        checkpointing.reset()  # its buffers collect the inputs of each forward, and only a backward removes them

    @contextmanager
    def preserving_state(self, module: Any) -> Iterator[None]:
        """Restore DeepSpeed's random number states and the counts of forwards, which seed layers, after the block."""
        tracker = checkpointing.get_cuda_rng_tracker()
        states = tracker.get_states()
        try:
            with preserve_forward_counts(module):
                yield
        finally:
            tracker.set_states(states)
            checkpointing.reset()

    def checkpoint(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Run ``function``, and recompute it in the backward from inputs saved as DeepSpeed is configured.

        The backward gathers sharded inputs, so it is collective over DeepSpeed's tensor group.
        """
        if not torch.is_grad_enabled():
            return function(*inputs)
        saved_inputs = [self._save_input(x) if _is_sharded_or_offloaded(x) else x for x in inputs]
        first_inputs = [inputs]
        states = rng_states(), checkpointing.get_cuda_rng_tracker().get_states()

        def run() -> Any:
            if first_inputs:
                return function(*first_inputs.pop())
            with use_rng_states(states[0]), _use_tracker_states(states[1]):
                return function(
                    *(saved.restore() if isinstance(saved, _SavedInput) else saved for saved in saved_inputs)
                )

        return torch_checkpoint(run, use_reentrant=False, preserve_rng_state=False)

    def _save_input(self, x: torch.Tensor) -> _SavedInput:
        version, saved_input = self._saved_inputs.get(x, (None, None))
        if saved_input is None or version != version_of(x):
            saved_input = _SavedInput(x)
            self._saved_inputs[x] = version_of(x), saved_input
        return saved_input

    def _log_once(self) -> None:
        if self._has_logged or dist.get_rank() != 0:
            return
        self._has_logged = True
        share = f"1/{checkpointing.mp_size} on each tensor rank" if checkpointing.PARTITION_ACTIVATIONS else "unsharded"
        location = "on the host" if checkpointing.CPU_CHECKPOINT else "on the device"
        buffers = ", without a contiguous buffer" if checkpointing.CONTIGUOUS_CHECKPOINTING else ""
        log_rank_0(
            "tds replaces DeepSpeed's recompute with partition_activations or cpu_checkpointing, which empties tensors "
            f"that are still in use and loses gradients. Each input is stored {share}, {location}{buffers}"
        )


class _SavedInput:
    """The saved copy of one tensor. ``buffer`` contains this rank's shard of the copy as bytes."""

    def __init__(self, x: torch.Tensor) -> None:
        tensor_group = TensorGroup()
        if checkpointing.PARTITION_ACTIVATIONS:
            tensor_group = TensorGroup(checkpointing.mp_rank, checkpointing.mp_size, checkpointing.mp_group)
        self._layout = PackedLayout(
            [TensorMeta(x.dtype, tuple(x.shape), x.requires_grad, partitioned=True)], tensor_group
        )
        self._device, self._strides = x.device, x.stride()
        local_bytes = self._layout.pack([x])
        self.buffer = host_copy(local_bytes) if checkpointing.CPU_CHECKPOINT else local_bytes.clone()

    def restore(self) -> torch.Tensor:
        """Restore the saved tensor. Collective over the tensor group if it is sharded."""
        (spec,) = self._layout.specs
        (full,) = self._layout.unpack(self.buffer.to(self._device, non_blocking=True, copy=True))
        if full.stride() != self._strides:  # kernels, and the tensors they save, depend on the strides
            strided = full.new_empty_strided(full.shape, self._strides)
            unexpanded = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in self._strides)
            strided[unexpanded].copy_(full[unexpanded])
            full = strided
        return with_leaves([full])[0][0] if spec.needs_grad else full


def _is_sharded_or_offloaded(x: Any) -> bool:
    """Return True for tensors that DeepSpeed would shard or offload: floats without ``no_checkpointing``."""
    return isinstance(x, torch.Tensor) and x.is_floating_point() and not getattr(x, "no_checkpointing", False)


@contextmanager
def _use_tracker_states(states: dict[str, Any]) -> Iterator[None]:
    """Set the states of DeepSpeed's random number tracker in the block, and restore them afterwards."""
    tracker = checkpointing.get_cuda_rng_tracker()
    previous = tracker.get_states()
    tracker.set_states(dict(states))
    try:
        yield
    finally:
        tracker.set_states(previous)


def recomputes_reentrantly(module: Any) -> bool:
    """Return True if recompute is reentrant, so that float inputs of the first stage must require gradients.

    Functions other than DeepSpeed's are assumed not to be reentrant.
    """
    function = module.activation_checkpoint_func
    if module.activation_checkpoint_interval <= 0 or replaces_checkpoint_fn(function):
        return False
    return is_deepspeed_reentrant(function)


def replaces_checkpoint_fn(function: Any) -> bool:
    """Return True if ``Recompute.checkpoint`` replaces ``function`` under DeepSpeed's current configuration."""
    if not (checkpointing.PARTITION_ACTIVATIONS or checkpointing.CPU_CHECKPOINT):
        return False
    return is_deepspeed_reentrant(function) or _innermost(function) is checkpointing.non_reentrant_checkpoint


def is_deepspeed_reentrant(function: Any) -> bool:
    """Return True for ``deepspeed.checkpointing.checkpoint``, wrapped or not."""
    return _innermost(function) is _innermost(checkpointing.checkpoint)


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    return function


def preserve_structure(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``checkpoint`` so that it supports any structure of tensors; ``__wrapped__`` is the original function."""

    @functools.wraps(checkpoint)
    def run(function: Callable[..., Any], *inputs: Any) -> Any:
        flattened = flatten(inputs[0]) if len(inputs) == 1 and type(inputs[0]) in (list, dict) else None
        output_structures: list[Structure] = []

        def on_tensors(*tensors: Any) -> Any:
            output = function(*tensors) if flattened is None else function(flattened[1].rebuild(tensors))
            if type(output) not in (list, dict):
                return output
            tensors_out, structure = flatten(output)
            output_structures.append(structure)  # the recomputation appends an equal one
            return tensors_out

        result = checkpoint(on_tensors, *(inputs if flattened is None else flattened[0]))
        if not output_structures:
            return result
        return output_structures[0].rebuild(result if isinstance(result, tuple) else (result,))

    return run
