"""Recompute of a stage's layers: which function runs it, on what the layers take and return.

Checkpoint functions know tensors and tuples alone; here layers may take and return lists and dicts, too. With
``partition_activations`` or ``cpu_checkpointing`` DeepSpeed's functions empty the very tensors that a run of layers was
given, whoever else holds them: what a layer passes on is gone, and gradients are lost or refused. There our own runs in
their place. It keeps a copy of each input, a part of it on each tensor rank and on the host as was asked for, and lets
go of the input itself.
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
from tds.deepspeed.module import forwards_uncounted
from tds.device import drawing_from, host_copy, random_states
from tds.log import log_rank_0
from tds.p2p.communicator import PackedLayout, Slice
from tds.p2p.input_leaves import with_leaves
from tds.p2p.structure import Structure, flatten
from tds.p2p.tensor_meta import TensorMeta
from tds.torch_api import changes_of


class Recompute:
    """The recompute of one stage's layers (``tds.engine.recompute.Recompute``), as DeepSpeed is configured."""

    def __init__(self) -> None:
        self._kept = WeakIdKeyDictionary()  # tensor -> (its count of changes, what is kept): several runs may share it
        self._has_logged = False

    @contextmanager
    def running(self, module: Any) -> Iterator[None]:
        """Let the layers of ``module`` within be recomputed as is set now; its attributes are as before afterwards."""
        if not getattr(module, "activation_checkpoint_interval", 0):
            yield
            return
        function = module.activation_checkpoint_func
        if takes_the_place_of(function):
            self._log_once()
        chosen = self.checkpoint if takes_the_place_of(function) else function
        module.activation_checkpoint_func = keeping_structure(chosen)
        try:
            yield
        finally:
            module.activation_checkpoint_func = function

    def is_reentrant(self, module: Any) -> bool:
        return recomputes_reentrantly(module)

    def discard(self) -> None:
        checkpointing.reset()  # its buffers count the inputs of each forward, which only a backward takes out

    @contextmanager
    def preserving_state(self, module: Any) -> Iterator[None]:
        """Restore DeepSpeed's random number states and the module's counts of forwards, which seed layers."""
        tracker = checkpointing.get_cuda_rng_tracker()
        states = tracker.get_states()
        try:
            with forwards_uncounted(module):
                yield
        finally:
            tracker.set_states(states)
            checkpointing.reset()

    def checkpoint(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Run ``function``, and again in the backward, from inputs that wait as DeepSpeed was configured.

        Collective over its tensor group in the backward, where parts are gathered.
        """
        if not torch.is_grad_enabled():
            return function(*inputs)
        places = [self._keep(x) if _waits_elsewhere(x) else x for x in inputs]
        given = [inputs]
        states = random_states(), checkpointing.get_cuda_rng_tracker().get_states()

        def run() -> Any:
            if given:
                return function(*given.pop())
            with drawing_from(states[0]), _tracking(states[1]):
                return function(*(place.restored() if isinstance(place, _Kept) else place for place in places))

        return torch_checkpoint(run, use_reentrant=False, preserve_rng_state=False)

    def _keep(self, x: torch.Tensor) -> _Kept:
        version, kept = self._kept.get(x, (None, None))
        if kept is None or version != changes_of(x):
            kept = _Kept(x)
            self._kept[x] = changes_of(x), kept
        return kept

    def _log_once(self) -> None:
        if self._has_logged or dist.get_rank() != 0:
            return
        self._has_logged = True
        part = f"1/{checkpointing.mp_size} on each tensor rank" if checkpointing.PARTITION_ACTIVATIONS else "whole"
        place = "on the host" if checkpointing.CPU_CHECKPOINT else "on the device"
        buffers = ", in no buffer of its own" if checkpointing.CONTIGUOUS_CHECKPOINTING else ""
        log_rank_0(
            "recompute with partition_activations or cpu_checkpointing is tds's own: DeepSpeed's empties tensors that "
            f"others hold, which loses gradients. An input waits {part}, {place}{buffers}"
        )


class _Kept:
    """A copy of one tensor while it waits. ``held``: the bytes of it that this rank keeps."""

    def __init__(self, x: torch.Tensor) -> None:
        cut = Slice()
        if checkpointing.PARTITION_ACTIVATIONS:
            cut = Slice(checkpointing.mp_rank, checkpointing.mp_size, checkpointing.mp_group)
        self._layout = PackedLayout([TensorMeta(x.dtype, tuple(x.shape), x.requires_grad, partitioned=True)], cut)
        self._device, self._strides = x.device, x.stride()
        part = self._layout.pack([x])
        self.held = host_copy(part) if checkpointing.CPU_CHECKPOINT else part.clone()

    def restored(self) -> torch.Tensor:
        """Return a tensor like the one that was kept. Collective over the tensor group where it is cut."""
        (spec,) = self._layout.specs
        (whole,) = self._layout.unpack(self.held.to(self._device, non_blocking=True, copy=True))
        if whole.stride() != self._strides:  # by which torch chooses its kernels, and so what they save
            laid_out = whole.new_empty_strided(whole.shape, self._strides)
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in self._strides)
            laid_out[once].copy_(whole[once])
            whole = laid_out
        return with_leaves([whole])[0][0] if spec.needs_grad else whole


def _waits_elsewhere(x: Any) -> bool:
    """True for what DeepSpeed would keep elsewhere: floats that are not marked to stay."""
    return isinstance(x, torch.Tensor) and x.is_floating_point() and not getattr(x, "no_checkpointing", False)


@contextmanager
def _tracking(states: dict[str, Any]) -> Iterator[None]:
    """Let DeepSpeed's tracker give ``states`` within, and what it gives now afterwards."""
    tracker = checkpointing.get_cuda_rng_tracker()
    now = tracker.get_states()
    tracker.set_states(dict(states))
    try:
        yield
    finally:
        tracker.set_states(now)


def recomputes_reentrantly(module: Any) -> bool:
    """True if recompute needs the first stage's float inputs to require a gradient.

    Of functions that are not DeepSpeed's, none is taken for reentrant.
    """
    function = module.activation_checkpoint_func
    if module.activation_checkpoint_interval <= 0 or takes_the_place_of(function):
        return False
    return is_deepspeeds_reentrant(function)


def takes_the_place_of(function: Any) -> bool:
    """True if our own recompute runs where ``function`` is set, as DeepSpeed is configured now."""
    if not (checkpointing.PARTITION_ACTIVATIONS or checkpointing.CPU_CHECKPOINT):
        return False
    return is_deepspeeds_reentrant(function) or _innermost(function) is checkpointing.non_reentrant_checkpoint


def is_deepspeeds_reentrant(function: Any) -> bool:
    """True for ``deepspeed.checkpointing.checkpoint``, wrapped or not."""
    return _innermost(function) is _innermost(checkpointing.checkpoint)


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    return function


def keeping_structure(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``checkpoint`` for any structure of tensors; its ``__wrapped__`` is the function itself."""

    @functools.wraps(checkpoint)
    def run(function: Callable[..., Any], *inputs: Any) -> Any:
        came = flatten(inputs[0]) if len(inputs) == 1 and type(inputs[0]) in (list, dict) else None
        returned: list[Structure] = []

        def on_tensors(*tensors: Any) -> Any:
            output = function(*tensors) if came is None else function(came[1].rebuild(tensors))
            if type(output) not in (list, dict):
                return output
            flat, structure = flatten(output)
            returned.append(structure)  # again when it is recomputed, which is the same one
            return flat

        result = checkpoint(on_tensors, *(inputs if came is None else came[0]))
        if not returned:
            return result
        return returned[0].rebuild(result if isinstance(result, tuple) else (result,))

    return run
