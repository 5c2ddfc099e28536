"""ParamGather: updated weights come to all replicas while the next forward runs, a bucket of layers after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron.mpu.groups import Group
from megatron.optim.zero.gather import Gather, Piece, buckets_of_pieces
from megatron.optim.zero.layers import layers_of

# ZeRO 1 and 2 on NCCL: after an update each replica has its parts of the new weights, and those of the others as they
# were. All-gathers of all buckets start at the end of the step, in the order in which the next forward needs them, and
# that forward waits for each where it needs it: a device waits, not the host.
#
# | what reads weights | waits for |
# |---|---|
# | a layer that is called (as ZeRO 3 has layers; on a stage of a pipeline what the stage calls in turn) | its own |
# | the model that is called, ahead of its layers | what is in no layer or in several, and compiled layers |
# | ``state_dict`` of any module; whoever asks the optimizer for weights, and the next update | all |
#
# All buckets start at once, when the gradients of the step are gone and the activations of the next are not there yet,
# so that replicas run the collectives of their group in one order whatever they call first.
#
# Source: Megatron-LM's ``overlap_param_gather`` for waiting in a hook ahead of the forward.

GATHERS_LATER: bool | None = None
"""Whether weights are waited for where they are needed; None: on NCCL. The bits are the same."""


def gathers_later(group: Group) -> bool:
    """Return whether updated weights come to the replicas of ``group`` while the next forward runs."""
    return dist.get_backend(group.handle) == "nccl" if GATHERS_LATER is None else GATHERS_LATER


class ParamGather:
    """The all-gathers on their way, and the hooks of ``module`` that wait for them.

    Args:
        weights: those that replicas have parts of.
    """

    def __init__(self, module: nn.Module, weights: Iterable[nn.Parameter], group: Group) -> None:
        cut = dict.fromkeys(weights)
        self._group = group
        self._due: dict[nn.Parameter, Gather] = {}
        found = _called(module, cut)  # a compiled layer would have the hook in its graph
        layers = {layer: own for layer, own in found.items() if getattr(layer, "_compiled_call_impl", None) is None}
        in_layers = {weight for own in layers.values() for weight in own}
        rest = [weight for weight in cut if weight not in in_layers]
        self._order = [*rest, *(weight for own in layers.values() for weight in own)]
        module.register_forward_pre_hook(lambda *_: self.wait(rest), prepend=True)
        for layer, own in layers.items():
            layer.register_forward_pre_hook(lambda *_, own=own: self.wait(own), prepend=True)
        for inner in module.modules():
            inner.register_state_dict_pre_hook(lambda *_: self.wait())

    def start(self, pieces: Mapping[nn.Parameter, Piece], numbers: int | None) -> None:
        """Start the all-gathers of all weights. Collective.

        Args:
            numbers: of a bucket; None: ``BUCKET_BYTES`` count.
        """
        self.wait()
        weight_of = {id(pieces[weight]): weight for weight in self._order}
        for bucket in buckets_of_pieces([pieces[weight] for weight in self._order], numbers):
            gather = Gather.start(bucket, self._group)
            self._due.update({weight_of[id(piece)]: gather for piece in bucket})

    def wait(self, weights: Iterable[nn.Parameter] | None = None) -> None:
        """Have ``weights`` here, None: all, and what came with them."""
        for weight in list(self._due) if weights is None else weights:
            gather = self._due.get(weight)
            if gather is None:
                continue
            gather.finish()
            self._due = {other: later for other, later in self._due.items() if later is not gather}


def _called(module: nn.Module, weights: Mapping[nn.Parameter, Any]) -> dict[nn.Module, list[nn.Parameter]]:
    """Return the layers that forward calls, and those of ``weights`` that one of them alone has."""
    functions = getattr(module, "forward_funcs", None)
    if functions is None:
        return layers_of(module, weights)
    holders: dict[nn.Parameter, list[nn.Module]] = {weight: [] for weight in weights}
    called = [each for each in dict.fromkeys(functions) if isinstance(each, nn.Module)]
    for layer in called:
        for weight in layer.parameters():
            if weight in holders:
                holders[weight].append(layer)
    tied = {weight for inner in getattr(module, "tied_modules", {}).values() for weight in inner.parameters()}
    own = {layer: [w for w in layer.parameters() if holders.get(w) == [layer] and w not in tied] for layer in called}
    return {layer: found for layer, found in own.items() if found}
