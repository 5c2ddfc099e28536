"""ModelEngine: the engine for a run without a pipeline and without DeepSpeed features."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron.mpu.groups import Group
from megatron.optim import MixedPrecisionOptimizer
from tds.gradients import is_reduced_by_optimizer

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""Attributes of an engine that count steps and samples, named as in DeepSpeed."""


class ModelEngine(torch.nn.Module):
    """A model and its optimizer with the DeepSpeed engine interface that training and forward steps call.

    ``MixedPrecisionOptimizer`` reduces and clips the gradients and scales the loss, so ``backward`` and ``step`` only
    run the backward pass and the update. As with DeepSpeed, model attributes are engine attributes.

    Args:
        model: the model, on the training device.
        micro_batch_size: samples per micro-batch of one replica.
        gas: micro-batches per step and replica.
        num_replicas: data-parallel times context-parallel ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: MixedPrecisionOptimizer,
        device: torch.device,
        *,
        micro_batch_size: int,
        gas: int,
        num_replicas: int,
    ) -> None:
        super().__init__()
        self.module, self.optimizer, self.device = model, optimizer, device
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._micro_batch_size, self._gas, self._num_replicas = micro_batch_size, gas, num_replicas
        self._is_boundary = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise AttributeError(
                f"the engine of a run without a pipeline has no attribute {name!r}. DeepSpeed's engine may have it: "
                "add --verbose-deepspeed or --checkpoint-format deepspeed to train on it"
            ) from None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run the backward pass from ``loss``, divided by the micro-batches per step if ``scale_wrt_gas``.

        Returns:
            The loss whose gradient was computed.
        """
        scaled = loss / self._gas if scale_wrt_gas else loss
        scaled.backward(retain_graph=retain_graph)
        return scaled

    def step(self) -> None:
        """Update the weights, and free the gradients."""
        self.optimizer.step()
        self.zero_grad()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self.micro_steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the parameter gradients."""
        self.module.zero_grad(set_to_none)

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batch count per step and replica."""
        return self._gas

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the sample count per micro-batch of one replica."""
        return self._micro_batch_size

    def train_batch_size(self) -> int:
        """Return the sample count per step over all replicas."""
        return self._micro_batch_size * self._gas * self._num_replicas

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the sample count per step by changing the micro-batch count.

        Raises:
            ValueError: ``train_batch_size`` is not a multiple of the samples in one micro-batch on all replicas.
        """
        gas, remainder = divmod(train_batch_size, self._micro_batch_size * self._num_replicas)
        if remainder:
            raise ValueError(
                f"train_batch_size must be a multiple of {self._micro_batch_size * self._num_replicas} (samples of a "
                f"micro-batch on all replicas), got {train_batch_size}"
            )
        self._gas = gas

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set the value that ``is_gradient_accumulation_boundary`` returns."""
        self._is_boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True during the update of a step."""
        return self._is_boundary

    def get_lr(self) -> list[float]:
        """Return learning rates by parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]


@torch.no_grad()
def broadcast_from_first_replica(module: torch.nn.Module, replicas: Group, *, are_sharded: bool) -> None:
    """Broadcast parameters from the first replica, as the DeepSpeed engine does. Collective.

    A user's model may draw initial weights from a generator that differs between ranks. Expert weights are not
    broadcast, because replicas do not share them.

    Args:
        are_sharded: each replica holds only shards of the trained weights (ZeRO 3), which are not broadcast either.
    """
    if replicas.size == 1:
        return
    for parameter in module.parameters():
        if is_reduced_by_optimizer(parameter) or (are_sharded and parameter.requires_grad):
            continue
        values = parameter.data.view(-1).view(torch.uint8)  # as bytes, since not every backend supports every dtype
        dist.broadcast(values, replicas.ranks[0], group=replicas.handle)
