"""Public names of DeepSpeed's pipeline engine that ours has no use for and programs read or call all the same."""

from __future__ import annotations

from typing import Any

from tds.recompute import recomputes_reentrantly


class StockNames:
    """The part of the engine that is there for programs written for DeepSpeed's."""

    module: Any
    grid: Any
    stage_id: int
    micro_batch_size: int

    @property
    def prev_stage(self) -> int:
        """The stage ahead of this one; -1 on the first."""
        return self.stage_id - 1

    @property
    def next_stage(self) -> int:
        """The stage after this one; the number of stages on the last."""
        return self.stage_id + 1

    @property
    def is_pipe_parallel(self) -> bool:
        """True with more than one stage."""
        return self.grid.pipe_parallel_size > 1

    @property
    def is_data_parallel(self) -> bool:
        """True with more than one replica."""
        return self.grid.data_parallel_size > 1

    @property
    def is_model_parallel(self) -> bool:
        """True if layers are cut over a tensor group."""
        return self.grid.model_parallel_size > 1

    def _reentrant_activation_checkpointing(self) -> bool:
        """True if recompute needs the first stage's float inputs to require a gradient."""
        return recomputes_reentrantly(self.module)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the global batch size by another size of each micro-batch, which the data must have."""
        super().set_train_micro_batch_size(micro_batch_size)  # type: ignore[misc]  # DeepSpeed's engine has it
        self.micro_batch_size = micro_batch_size

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing: boolean tensors cross a stage as they are, wherever they stand."""
