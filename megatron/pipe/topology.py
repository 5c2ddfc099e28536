"""Our grid in the form that DeepSpeed's PipelineModule takes."""

from __future__ import annotations

from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from megatron.mpu.topology import Topology


def pipe_topology(topology: Topology) -> PipeModelDataParallelTopology:
    """Return DeepSpeed's topology with the same sizes and the same order of ranks as ours."""
    return PipeModelDataParallelTopology(num_pp=topology.pipe, num_mp=topology.tensor, num_dp=topology.data)
