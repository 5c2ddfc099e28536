"""RunDescription: writes config.json, command.txt, versions.json, stages.json and the lists of starts to the folder."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.data.sample_order import as_ordered
from megatron.training import document_losses, run_record, sample_history, stages_file, start_table
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
        self._has_rolled_back = False

    def on_load_end(self, step: int) -> None:
        self._has_rolled_back = True

    def on_step_start(self) -> None:
        if self._has_rolled_back:  # the samples of the next step are known only now
            self._has_rolled_back = False
            self._write_sample_position()

    def _write_sample_position(self) -> None:
        trainer = self.trainer
        if trainer.world.rank == 0:
            step, samples_consumed = trainer.progress.step, trainer.progress.samples_consumed
            topology, exclusion = trainer.world.grid.topology, trainer.data.exclusion
            ordered = as_ordered(trainer.data.datasets.get("train"))
            if exclusion is not None and ordered is not None:
                excluded = {name: getattr(dataset, "excluded", None) for name, dataset in ordered.parts.items()}
                listed = {name: documents for name, documents in excluded.items() if documents is not None}
                sample_history.write_excluded(trainer.folder, exclusion, listed)
            sample_history.append(trainer.folder, trainer.config, topology, step, samples_consumed, exclusion)
            document_losses.drop_later_steps(trainer.folder, step)

    def on_train_start(self) -> None:
        trainer, config = self.trainer, self.trainer.config
        max_bytes_before = max_bytes_by_stage(self.bytes_before, trainer.world)
        if trainer.world.rank == 0:
            self._write_sample_position()
            run_record.write_run_record(trainer.folder, config, trainer.world, trainer.progress.step)
            bounds = start_table.bounds_of(config, trainer.engine.module)
            stages = stages_file.stage_entries(
                config, trainer.world.grid.topology, bounds, self.param_counts, max_bytes_before
            )
            stages_file.write(trainer.folder, stages)
