"""How the model is laid over processes and devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.option import option

TIMEOUT_S = {"cpu": 60, "cuda": 600}
"""A rank that does not answer for so long ends the job; GPUs get longer for first kernels and big gathers."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the tensor and pipe axes, and the device that carries them."""

    model_parallel_size: int = option(1, "tensor-parallel size t", minimum=1, aliases=("--tensor-model-parallel-size",))
    pipe_parallel_size: int = option(
        0, "pipeline stages p; 0 or 1: no pipeline engine", minimum=0, aliases=("--pipeline-model-parallel-size",)
    )
    checkpoint_activations: bool = option(
        False, "keep only the inputs of layers in the forward pass and compute the rest again in the backward pass"
    )
    checkpoint_num_layers: int = option(
        1, "layers between two kept inputs", minimum=1, aliases=("--recompute-num-layers",)
    )
    partition_method: str = option(
        "balanced", "layers per stage: balanced (by cost), uniform, parameters, or type:REGEX of layer names"
    )
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    distributed_backend: str | None = option(
        None, "backend of torch.distributed", choices=("nccl", "gloo"), shown_default="nccl on GPUs, gloo on CPU"
    )
    distributed_timeout_s: int = option(
        0, "seconds without an answer after which a rank gives up", minimum=1, shown_default="60 on CPU, 600 on GPUs"
    )

    @property
    def num_stages(self) -> int:
        """p, where 0 and 1 both mean one stage."""
        return max(self.pipe_parallel_size, 1)

    @property
    def has_pipeline(self) -> bool:
        return self.pipe_parallel_size > 1

    def data_parallel_size(self, world_size: int) -> int:
        """Return d: what the tensor and pipe axes leave of ``world_size`` ranks."""
        return world_size // (self.model_parallel_size * self.num_stages)

    def timeout_s(self, kind: str) -> int:
        """Return the time-out of process groups on this kind of device, cpu or cuda."""
        return self.distributed_timeout_s or TIMEOUT_S[kind]

    def problems(self) -> Iterator[str]:
        """Yield what cannot be, looking at the layout alone."""
        method = self.partition_method
        if method.startswith("type:"):
            try:
                re.compile(method[5:])
            except re.error as error:
                yield f"--partition-method type:REGEX needs a regular expression, got {method!r}: {error}"
        elif method not in ("balanced", "uniform", "parameters"):
            yield f"--partition-method must be balanced, uniform, parameters or type:REGEX, got {method!r}"
