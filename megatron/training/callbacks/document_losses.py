"""DocumentLosses: records the loss of each document in each step (--log-document-losses)."""

from __future__ import annotations

import numpy as np
import torch

from megatron.config import Config
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.sample_order import Ordered, as_ordered
from megatron.errors import ConfigError
from megatron.models.common.token_losses import TokenLosses
from megatron.mpu.context_parallel import local_positions
from megatron.training.document_losses import MIB, DocumentLossWriter, DocumentSums, merge, sum_by_document
from megatron.training.step_result import StepResult
from megatron.training.trainer import Callback

_MAX_PENDING_STEPS = 100


class DocumentLosses(Callback):
    """Records the mean loss and the number of tokens of each document in each step.

    The ranks that compute the loss sum the losses of their tokens by document, on the host. At logged steps, before a
    save and at the end, rank 0 gathers the sums, adds those of the same document, and writes them. Hence the steps of a
    committed checkpoint are in the file. ``RunDescription`` drops the lines of steps that a start repeats.
    """

    def __init__(self, config: Config) -> None:
        self._max_bytes = config.logging.log_document_losses * MIB
        self._dtype = np.dtype(np.float64 if config.precision.dtype == "fp64" else np.float32)
        self._token_losses = TokenLosses()
        self._pending: dict[int, DocumentSums] = {}
        self._num_pending_steps = 0
        self._ordered: Ordered | None = None
        self._writer: DocumentLossWriter | None = None

    def on_train_start(self) -> None:
        """Attach to the model.

        Raises:
            ConfigError: the model does not report token losses, or the data has no documents; raised on all ranks.
        """
        trainer = self.trainer
        module = trainer.engine.module
        self._ordered = as_ordered(trainer.data.datasets.get("train"))
        has_documents = self._ordered is not None and all(
            isinstance(dataset, GPTDataset) for dataset in self._ordered.parts.values()
        )
        lacks_documents = trainer.world.reads_data and trainer.data.has_training and not has_documents
        if not hasattr(module, "token_losses") or trainer.world.any_rank([lacks_documents])[0]:
            raise ConfigError(
                "--log-document-losses needs a decoder of this repository, and its token files or conversations, got "
                f"a {type(module).__name__} and --data-path {trainer.config.data.data_path}. Remove the flag"
            )
        module.token_losses = self._token_losses  # type: ignore[assignment]

    def on_step_start(self) -> None:
        self._token_losses.start_step()

    def on_after_update(self, result: StepResult) -> None:
        self._token_losses.end_forwards()
        self._num_pending_steps += 1
        micro_batches = self._token_losses.by_micro_batch
        if not micro_batches or self.trainer.world.grid.tensor.rank != 0:
            return
        assert self._ordered is not None  # the first tensor rank of the stage with the loss reads data
        step_samples, world = self.trainer.samples, self.trainer.world
        share, size = step_samples.share(world.grid.data.rank), step_samples.micro_batch_size
        samples = [
            step_samples.first + share.index_in_step(idx) * size + sample
            for idx in sorted(micro_batches)
            for sample in range(size)
        ]
        by_token = torch.cat([micro_batches[idx] for idx in sorted(micro_batches)], dim=1).cpu().numpy()
        num_chunks, length = self.trainer.num_sequences_per_sample, self.trainer.seq_length
        in_chunk = local_positions(by_token.shape[2], world.grid.context).numpy()
        positions = (length * np.arange(num_chunks)[:, None] + in_chunk).reshape(-1)
        losses, weights = by_token.reshape(2, len(samples), -1)
        self._pending[step_samples.step] = sum_by_document(self._ordered, samples, losses, weights, positions)

    def on_step_end(self, result: StepResult) -> None:
        if self.trainer.is_log_step or self._num_pending_steps >= _MAX_PENDING_STEPS:
            self._flush()

    def on_load_end(self, step: int) -> None:
        self._pending, self._num_pending_steps = {}, 0

    def on_save(self) -> None:
        self._flush()

    def on_train_end(self) -> None:
        self._flush()

    def _flush(self) -> None:
        """Write the pending steps on rank 0. Collective."""
        if not self._num_pending_steps:
            return
        pending, self._pending, self._num_pending_steps = self._pending, {}, 0
        by_rank = self.trainer.world.grid.host.gather_objects_on_first(pending)
        if by_rank is None:
            return
        if self._writer is None:
            assert self._ordered is not None  # rank 0 reads data
            names = list(self._ordered.parts)
            self._writer = DocumentLossWriter(self.trainer.folder, names, self._max_bytes, self._dtype)
        steps: set[int] = set().union(*by_rank)
        self._writer.write({step: merge(sums[step] for sums in by_rank if step in sums) for step in steps})
