"""What the models over a pipeline's stages share, whatever their layers are and whatever crosses between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from megatron.model.sizes import Place
from megatron.mpu.topology import Topology
from megatron.pipe.recompute import stage_recompute
from megatron.pipe.topology import pipe_topology
from tds.pipe import LayerSpec, PipelineModule


class ModelPipe(PipelineModule):
    """A model over the pipeline stages of ``topology``.

    A family gives ``specs``, ``random_batch``, ``_loss``, and what crosses into each stage.

    Args:
        partition: bounds of the pieces in layers as ``specs`` has them, or the name of a partition method; "profile"
            times the layers on ``probe``.
        chunks: pieces on each stage; piece ``chunk * p + stage`` lies on ``stage``.
        has_segments: segments (ids of documents, or what is padding) travel too.
        probe: (micro-batch size, sequence length, one for each side).

    Attributes:
        layer_classes: of transformer layers, which are what is recomputed.
    """

    loss_weighting = "tokens"  # for the start table
    layer_classes: tuple[type[nn.Module], ...]

    def __init__(
        self,
        sizes: Any,
        place: Place,
        topology: Topology,
        *,
        partition: str | list[int] = "parameters",
        chunks: int = 1,
        has_segments: bool = False,
        probe: tuple[int, ...] | None = None,
    ) -> None:
        self.sizes, self.place, self.has_segments = sizes, place, has_segments
        profile = {} if probe is None else {"profile_batch": self.random_batch(probe)}
        recompute = stage_recompute(self, sizes, place)
        super().__init__(
            self.specs(),
            topology=pipe_topology(topology),
            loss_fn=self._loss,
            partition_method=partition,
            chunks=chunks,
            activation_checkpoint_interval=recompute.every,
            activation_checkpoint_func=recompute,
            **profile,
        )
        self._say_what_crosses()

    def specs(self) -> list[LayerSpec]:
        """Return the layers."""
        raise NotImplementedError

    def random_batch(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Return (inputs, labels) of a micro-batch of random tokens, the same on every rank."""
        raise NotImplementedError

    def _say_what_crosses(self) -> None:
        """Tell the engine which tensors cross into each stage; the layers are there."""
        raise NotImplementedError

    def _loss(self, logits: Any, labels: Any) -> Any:
        raise NotImplementedError

    def _is_checkpointable(self, funcs: Sequence[Any]) -> bool:
        """Recompute each run of layers that holds a transformer layer; DeepSpeed's rule goes by other class names."""
        return any(isinstance(func, self.layer_classes) for func in funcs)
