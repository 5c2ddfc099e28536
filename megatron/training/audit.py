"""Audit: find the steps and ranks of a run that read a document, and the documents of a step."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from megatron import config as configuration
from megatron.checkpoint.metadata import MANIFEST_NAME, manifest_from_bytes
from megatron.config import Config
from megatron.data import resumed_order
from megatron.data.blend_schedule import BlendSchedule
from megatron.data.blended_dataset import BlendedDataset
from megatron.data.gpt_dataset import GPTDataset
from megatron.errors import CheckpointError, DataError
from megatron.training import global_vars
from megatron.training.callbacks.metrics_writer import METRICS, read_metrics
from megatron.training.checkpoint_source import saved_checkpoints
from megatron.training.data import num_samples_of_splits
from megatron.training.document_losses import DocumentLoss, read_document, read_step
from megatron.training.programs import decoder
from megatron.training.sample_history import Reader, Stretch, read_excluded, read_stretches, reader_of
from megatron.training.vocabulary import with_tokenizer

SECTIONS = ("family", "model", "parallel", "batch", "data")
"""Sections of config.json that determine the samples, in addition to the family's section and the seed."""


READ, SKIPPED, EXCLUDED = "read", "skipped", "excluded"
"""Effects of a step on the tokens of a document: trained on; skipped by --iterations-to-skip; masked by --exclude."""


class Reading(NamedTuple):
    """Tokens of a document in one sample.

    Args:
        step: the step that consumes the sample, counted from 1.
        sample: index of the sample in the run.
        corpus: name of the corpus.
        document: index of the document in its corpus, from 0.
        offset: the slice's first token within the document.
        length: tokens of the slice in the sample.
        position: the slice's first token within the sample.
        reader: replica, micro-batch and ranks that process the sample; in a skipped step, that would have processed it.
        effect: READ, SKIPPED or EXCLUDED.
    """

    step: int
    sample: int
    corpus: str
    document: int
    offset: int
    length: int
    position: int
    reader: Reader
    effect: str = READ


class Audit:
    """The training samples of a run folder, read without starting ranks.

    Attributes:
        step_losses: step -> loss of its global batch, for the steps in metrics.jsonl.

    Raises:
        DataError: the folder lacks a file, or the run's data cannot be audited.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.stretches = folder, read_stretches(folder)
        if not self.stretches:
            raise DataError(f"{folder} has an empty history of samples: the run has not started")
        self.config = _read_config(folder, self.stretches[-1].topology.world_size)
        if self.config.family_config.KIND != "decoder":
            raise DataError(f"audits are supported for decoders only, got a run of the family {self.config.family}")
        if self.config.data.is_script_data or self.config.data.is_mock:
            raise DataError(f"audits need token files or conversations, got --data-path {self.config.data.data_path}")
        self.tokenizer, self.config = with_tokenizer(self.config)
        global_vars.set_current(self.config, self.tokenizer, None)
        world: Any = SimpleNamespace(grid=SimpleNamespace(data=SimpleNamespace(size=self.stretches[-1].topology.data)))
        num_samples = [num_samples_of_splits(self.config, world)[0], 0, 0]
        dataset = decoder.train_valid_test_datasets_provider(num_samples)[0]
        assert isinstance(dataset, BlendedDataset)
        self.order = _continue_order(dataset, folder)
        records = read_metrics(folder / METRICS)
        self._recorded_steps = [record["step"] for record in records]
        self.step_losses = {record["step"]: record.get("loss") for record in records if record["kind"] == "train"}
        self.parts: list[tuple[str, GPTDataset]] = [*dataset.parts.items()]  # type: ignore[list-item]
        self._excluded: dict[str, list[np.ndarray]] = {}

    # Corpora and documents.

    @property
    def all_corpora(self) -> list[int]:
        return list(range(len(self.parts)))

    def corpus_idx(self, name: str | None) -> int:
        """Return the index of a corpus, given its path or short name; None: the only corpus.

        Raises:
            DataError: the run has no such corpus, or several.
        """
        names = {text: idx for idx, (short, data) in enumerate(self.parts) for text in (short, data.prefix)}
        if name is None and len(self.parts) == 1:
            return 0
        if name not in names:
            listed = ", ".join(short for short, _ in self.parts)
            raise DataError(f"--corpus must be one of the run's corpora {listed}, got {name or 'none'}")
        return names[name]

    def corpus_name(self, corpus_idx: int) -> str:
        """Return the short name of a corpus."""
        return self.parts[corpus_idx][0]

    def num_tokens(self, corpus_idx: int, document: int) -> int:
        """Return the number of tokens of a document.

        Raises:
            DataError: the corpus has no such document.
        """
        lengths = self.parts[corpus_idx][1].token_file.document_lengths
        if not 0 <= document < len(lengths):
            raise DataError(
                f"--document must be from 0 to {len(lengths) - 1} in {self.corpus_name(corpus_idx)}, got {document}"
            )
        return int(lengths[document])

    def documents_with(self, text: str, corpus_idx: int) -> list[int]:
        """Find the documents that contain ``text``, by decoding every document.

        ``text`` is also searched as the tokenizer returns it, because some tokenizers change characters.

        Raises:
            DataError: the run has no tokenizer.
        """
        if self.tokenizer is None:
            raise DataError("--text needs a run with a tokenizer, got none. Name a document with --document")
        source = self.parts[corpus_idx][1].token_file
        texts = {text, self.tokenizer.decode(self.tokenizer.encode(text)).strip()} - {""}
        documents = []
        for document in range(len(source.document_lengths)):
            tokens = source.read(document).astype(np.int64)
            tokens = np.where(tokens < 0, ~tokens, tokens)  # tokens with a loss in conversations are stored as ~id
            decoded = self.tokenizer.decode(tokens.tolist())
            if any(text in decoded for text in texts):
                documents.append(document)
        return documents

    # Losses of documents.

    def losses_of_document(self, corpus_idx: int, document: int) -> dict[int, DocumentLoss]:
        """Return the losses of a document by step, for the steps that --log-document-losses recorded."""
        return read_document(self.folder, self.corpus_name(corpus_idx), document)

    def losses_of_step(self, step: int) -> dict[tuple[str, int], DocumentLoss]:
        """Return the losses of a step by (corpus, document); empty if they are not recorded."""
        return read_step(self.folder, step)

    # Steps and samples.

    def last_step(self, until: int | None = None) -> int:
        """Return ``until``, or the last step in metrics.jsonl."""
        if until is not None:
            return until
        return max([*self._recorded_steps, self.stretches[-1].step])

    def readings_of(self, corpus_idx: int, document: int, until: int | None = None) -> Iterator[Reading]:
        """Yield the samples up to step ``until`` that contain tokens of a document, in ascending steps.

        The samples of skipped steps and excluded documents are included; see ``Reading.effect``.
        """
        self.num_tokens(corpus_idx, document)
        name, dataset = self.parts[corpus_idx]
        for stretch in self.stretches:
            self._check_stretch(stretch)
            stop_step = min(self.last_step(until), stretch.stop_step or self.last_step(until))
            if stop_step <= stretch.step:
                continue
            stop = stretch.batch_sizes.consumed_after(stop_step - stretch.step, stretch.samples)
            first_of_corpus, stop_of_corpus = self._cursor(name, stretch.samples), self._cursor(name, stop)
            for sample_idx in dataset.samples_of(document, first_of_corpus, stop_of_corpus):
                sample = self.order.index_of(corpus_idx, sample_idx)
                if sample is None or not stretch.samples <= sample < stop:
                    continue
                step = stretch.step_of(sample)
                for reading in self._readings(stretch, step, sample):
                    if reading.document == document:
                        yield reading

    def samples_of_step(self, step: int) -> Iterator[tuple[int, list[Reading]]]:
        """Yield (sample, its document slices) for each sample that ``step``, counted from 1, consumes.

        Raises:
            DataError: the run has no such step.
        """
        stretch = self._stretch_of(step)
        self._check_stretch(stretch)
        for sample in stretch.samples_of(step):
            yield sample, list(self._readings(stretch, step, sample))

    def is_skipped(self, step: int) -> bool:
        """Return True if --iterations-to-skip skipped ``step``, counted from 1."""
        return step in self._stretch_of(step).skipped_steps

    def _stretch_of(self, step: int) -> Stretch:
        stretch = next((s for s in reversed(self.stretches) if s.step < step), None)
        if stretch is None:
            raise DataError(f"--step must be at least {self.stretches[0].step + 1} in this run folder, got {step}")
        return stretch

    def _readings(self, stretch: Stretch, step: int, sample: int) -> Iterator[Reading]:
        corpus_idx, sample_idx = self.order.locate(sample)
        name, dataset = self.parts[corpus_idx]
        reader, position = reader_of(stretch, step, sample), 0
        num_tokens = stretch.tokens_read(step) + 1  # the last label as well
        for document, offset, slice_length in dataset.slices(sample_idx):
            length = min(slice_length, num_tokens - position) if stretch.curriculum else slice_length
            if length <= 0:  # truncated
                return
            effect = READ
            if step in stretch.skipped_steps:
                effect = SKIPPED
            elif self._is_excluded(stretch, corpus_idx, document):
                effect = EXCLUDED
            yield Reading(step, sample, name, document, offset, length, position, reader, effect)
            position += length

    def _is_excluded(self, stretch: Stretch, corpus_idx: int, document: int) -> bool:
        if stretch.exclusion is None:
            return False
        if stretch.exclusion not in self._excluded:
            names = [name for name, _ in self.parts]
            self._excluded[stretch.exclusion] = read_excluded(self.folder, stretch.exclusion, names)
        ranges = self._excluded[stretch.exclusion][corpus_idx]
        idx = int(np.searchsorted(ranges[:, 0], document, side="right")) - 1
        return idx >= 0 and document <= int(ranges[idx, 1])

    def _cursor(self, corpus: str, samples_consumed: int) -> int:
        return self.order.cursors(samples_consumed)[corpus]

    def _check_stretch(self, stretch: Stretch) -> None:
        """Raise DataError if the run's current settings do not determine the samples of ``stretch``."""
        if stretch.tokens_per_sample != self.config.tokens_per_sample:
            raise DataError(
                f"the steps after step {stretch.step} had samples of {stretch.tokens_per_sample} tokens, but "
                f"config.json has {self.config.tokens_per_sample}: the run was resumed with another --seq-length. "
                "Audit a copy of the folder with the config.json of these steps"
            )
        first_known = self.order.phases[0].start if isinstance(self.order, BlendSchedule) else 0
        if stretch.samples < first_known:
            raise DataError(
                f"the order of the samples before sample {first_known} is unknown, because the run was resumed with "
                "other data (--allow-data-change). Audit an older checkpoint's folder"
            )


def _read_config(folder: Path, world_size: int) -> Config:
    """Read the settings that determine the samples from config.json."""
    try:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}/config.json cannot be read: {error}. Name a run folder") from error
    family = saved["family"]
    settings = {name: values for name, values in saved.items() if name in (*SECTIONS, family)}
    settings["run"] = {"seed": saved["run"]["seed"]}
    settings["data"]["exclude"] = None  # the list may have been moved; the history has the documents of each start
    settings["checkpoint"] = {"save": str(folder)}  # token files of text are next to the run folder
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "config.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        return configuration.parse(["--config", str(path), "--device", "cpu"], world_size=world_size, family=family)


def _continue_order(dataset: BlendedDataset, folder: Path) -> Any:
    """Return the order of the samples with the phases stored in the newest checkpoint."""
    order = dataset.order
    if not isinstance(order, BlendSchedule):
        return order
    for path in sorted(saved_checkpoints(folder), key=lambda path: path.name, reverse=True):
        try:
            manifest = manifest_from_bytes((path / MANIFEST_NAME).read_bytes(), path / MANIFEST_NAME)
        except (OSError, CheckpointError):
            continue
        state, consumed = manifest.metadata.get("data_order"), manifest.metadata["progress"]["samples_consumed"]
        if state:
            return resumed_order(order, state, consumed, allow_change=True)[0]
    return order
