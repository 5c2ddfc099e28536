"""PipelineGrid: a pipeline's process groups and this rank's position in them."""

from __future__ import annotations

from typing import Any, Protocol


class PipelineGrid(Protocol):
    """Ranks arranged by stage, replica and tensor rank. DeepSpeed's ``PipelineParallelGrid`` implements this protocol.

    Attributes:
        pipe_parallel_size, data_parallel_size, model_parallel_size: number of stages, replicas and tensor ranks.
        pipe_groups: the global ranks of each pipeline.
    """

    pipe_parallel_size: int
    data_parallel_size: int
    model_parallel_size: int
    pipe_groups: list[list[int]]

    def get_stage_id(self) -> int:
        """Return this rank's stage."""

    def get_global_rank(self) -> int:
        """Return this process's global rank."""

    def get_data_parallel_rank(self) -> int:
        """Return this rank's replica index."""

    def get_slice_parallel_rank(self) -> int:
        """Return this rank's index in its tensor group."""

    def stage_to_global(self, stage_id: int) -> int:
        """Return the global rank of ``stage_id`` in this rank's pipeline."""

    def get_pipe_parallel_group(self) -> Any:
        """Return this rank's pipeline group."""

    def get_data_parallel_group(self) -> Any:
        """Return the process group of the ranks that hold the same stage and shards in each replica."""

    def get_slice_parallel_group(self) -> Any:
        """Return the process group of this stage's tensor ranks."""

    def get_model_parallel_group(self) -> Any:
        """Return the process group of this replica's stages and tensor ranks."""
