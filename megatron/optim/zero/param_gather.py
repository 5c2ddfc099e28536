"""ParamGather: gathers updated weights during the next forward, with ZeRO 1 and 2 on NCCL.

After an update each replica holds its shards of the new weights. The all-gathers of all buckets start at the end of the
step, in the order in which the next forward needs the weights, and the forward waits for each bucket when it needs it.
Only the device waits, not the host.

| reader of weights | waits for |
|---|---|
| a layer's forward (layers as in ZeRO 3; on a pipeline stage, the layers that the stage calls in turn) | its weights |
| the model's forward, before its layers | weights of compiled layers, of no layer or of several layers |
| ``state_dict`` of any module, code that calls ``ParamStore.finish_gathers``, the next update | all weights |

All buckets start together, after the gradients of the step are freed and before the activations of the next step are
allocated. The replicas therefore start the collectives of their group in the same order, whatever they call first.

Source: Megatron-LM's ``overlap_param_gather``, for the hook that waits before a forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch.distributed as dist
from torch import nn

from megatron.mpu.groups import Group
from megatron.optim.zero.gather import Gather, ShardedWeight, buckets_of_weights
from megatron.optim.zero.layers import called_layers

DEFER_GATHER: bool | None = None
"""True if forwards wait for their weights; None: on NCCL only. The results are bitwise equal."""


def defers_gather(group: Group) -> bool:
    """Return True if ``group`` gathers updated weights during the next forward."""
    return dist.get_backend(group.handle) == "nccl" if DEFER_GATHER is None else DEFER_GATHER


class ParamGather:
    """The running all-gathers, and the hooks of ``module`` that wait for them.

    Args:
        weights: the sharded weights of the model.
    """

    def __init__(self, module: nn.Module, weights: Iterable[nn.Parameter], group: Group) -> None:
        sharded = dict.fromkeys(weights)
        self._group = group
        self._pending: dict[nn.Parameter, Gather] = {}
        layers = {  # the graph of a compiled layer would include the hook
            layer: layer_weights
            for layer, layer_weights in _called_layers(module, sharded).items()
            if getattr(layer, "_compiled_call_impl", None) is None
        }
        in_layers = {weight for layer_weights in layers.values() for weight in layer_weights}
        outside_layers = [weight for weight in sharded if weight not in in_layers]
        self._order = [*outside_layers, *(weight for layer_weights in layers.values() for weight in layer_weights)]
        module.register_forward_pre_hook(lambda *_: self.wait(outside_layers), prepend=True)
        for layer, layer_weights in layers.items():
            layer.register_forward_pre_hook(lambda *_, weights=layer_weights: self.wait(weights), prepend=True)
        for inner in module.modules():
            inner.register_state_dict_pre_hook(lambda *_: self.wait())

    def start(self, weights: Mapping[nn.Parameter, ShardedWeight], bucket_numel: int | None) -> None:
        """Start all-gathers for all weights. Collective.

        Args:
            bucket_numel: elements per bucket; None: limited by ``BUCKET_BYTES``.
        """
        self.wait()
        parameter_of = {id(weights[parameter]): parameter for parameter in self._order}
        for bucket in buckets_of_weights([weights[parameter] for parameter in self._order], bucket_numel):
            gather = Gather.start(bucket, self._group)
            self._pending.update({parameter_of[id(weight)]: gather for weight in bucket})

    def wait(self, weights: Iterable[nn.Parameter] | None = None) -> None:
        """Wait for all buckets with any of ``weights``; None: for all weights."""
        for weight in list(self._pending) if weights is None else weights:
            gather = self._pending.get(weight)
            if gather is None:
                continue
            gather.finish()
            self._pending = {
                other: other_gather for other, other_gather in self._pending.items() if other_gather is not gather
            }


def _called_layers(module: nn.Module, weights: Iterable[nn.Parameter]) -> dict[nn.Module, list[nn.Parameter]]:
    """Find the layers that forward calls, without tied weights, which functions read as well."""
    tied = {weight for inner in getattr(module, "tied_modules", {}).values() for weight in inner.parameters()}
    return called_layers(module, [weight for weight in weights if weight not in tied])
