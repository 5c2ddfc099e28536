"""RunDescription: writes config.json, command.txt, versions.json, starts.jsonl and stages.json to the run folder."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.training import run_record, stages_file, start_table
from megatron.training.callbacks.speed_monitor import max_bytes_by_stage
from megatron.training.trainer import Callback


class RunDescription(Callback):
    """Writes the description of the run at the start.

    Args:
        param_counts: parameter count in the full model, then per rank of each stage.
        bytes_before: bytes allocated on this rank before the model was built.
    """

    def __init__(self, param_counts: Sequence[int], bytes_before: int) -> None:
        self.param_counts, self.bytes_before = param_counts, bytes_before

    def on_train_start(self) -> None:
        trainer, config = self.trainer, self.trainer.config
        max_bytes_before = max_bytes_by_stage(self.bytes_before, trainer.world)
        if trainer.world.rank == 0:
            run_record.write_run_record(trainer.folder, config, trainer.world, trainer.progress.step)
            bounds = start_table.bounds_of(config, trainer.engine.module)
            stages = stages_file.stage_entries(
                config, trainer.world.grid.topology, bounds, self.param_counts, max_bytes_before
            )
            stages_file.write(trainer.folder, stages)
