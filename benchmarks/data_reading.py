"""Samples/s of reading, against ten times what the training of the default run consumes.

    needed samples/s = 10 x tokens/s of a step of the default run / tokens of a sample

The step is that of ``run_gpt2.sh`` or ``run_t5.sh``, model and micro-batch as there, in one process with all cores: a
run of several processes on the same cores takes no more tokens. The read file is made for the purpose: random ids,
documents of lengths as in a corpus of pages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data_parts.rounds import Bar, quartiles, take_turns
from benchmarks.sizes import GPTSizes, T5Sizes
from benchmarks.turns import Work
from benchmarks.turns import take_turns as steps_in_turns
from megatron.data import DataLoader, GPTDataset, IndexedDataset, IndexedDatasetBuilder
from megatron.models.t5 import spans
from megatron.models.t5.data import T5Dataset, T5Tokens

TIMES = 10.0
SEQ_LENGTH = 1024
ENC_SEQ_LENGTH, DEC_SEQ_LENGTH = 512, 114
VOCAB_SIZE = 8192
MICRO_BATCH = 8
READERS = ("mmap", "pread")
NUM_WORKERS = (0, 2)
DEFAULT_RUNS = {
    "gpt2": (GPTSizes(num_layers=4, hidden_size=128, num_attention_heads=4, vocab_size=VOCAB_SIZE, seq_length=128), 8),
    "t5": (
        T5Sizes(num_layers=2, hidden_size=128, num_attention_heads=4, vocab_size=VOCAB_SIZE, enc_seq_length=128),
        16,
    ),
}
"""Sizes and micro-batch of ``run_gpt2.sh`` and ``run_t5.sh``; the vocabulary is that of the sample data."""
TOKENS_PER_SAMPLE = {"gpt2": SEQ_LENGTH, "t5": ENC_SEQ_LENGTH + DEC_SEQ_LENGTH}


def measure(
    folder: Path, num_tokens: int, samples: int, rounds: int, threads: int, kind: str, start_method: str
) -> tuple[dict[str, list[float]], list[Bar], dict[str, Any]]:
    """Return samples/s of each contender in each round, the bars, and what a step consumes.

    Args:
        num_tokens: of the file that is read.
        samples: read in a turn.
        kind: device of the step, cpu or cuda.
        start_method: of the process that trains.
    """
    consumed = {family: tokens_per_s(family, rounds, threads, kind, start_method) for family in DEFAULT_RUNS}
    needed = {family: TIMES * rate / TOKENS_PER_SAMPLE[family] for family, rate in consumed.items()}
    write_tokens(folder / "read", num_tokens)
    turns = {
        f"{family}, {reader}, {count} workers": partial(read, folder / "read", family, reader, count, samples)
        for family in DEFAULT_RUNS
        for reader in READERS
        for count in NUM_WORKERS
    }
    rates = take_turns(turns, rounds)
    bars = [
        Bar(f"reading {name} / (10 x a step)", 1.0, quartiles([rate / needed[name.split(",")[0]] for rate in found]))
        for name, found in rates.items()
    ]
    return rates, bars, {"tokens_per_s_of_a_step": consumed, "needed_samples_per_s": needed}


def tokens_per_s(family: str, rounds: int, threads: int, kind: str, start_method: str) -> float:
    """Return how many tokens a second a step of the default run takes: the median over rounds."""
    sizes, batch_size = DEFAULT_RUNS[family]
    dtype = "bf16" if kind == "cuda" else "fp32"
    work = Work(sizes=sizes, batch_size=batch_size, steps=4, kind=kind, dtype=dtype, threads=threads)
    seconds = statistics.median(steps_in_turns(["ours"], work, rounds, start_method)["ours"].turns_s) / work.steps
    return batch_size * sizes.tokens_per_sample / seconds


def write_tokens(prefix: Path, num_tokens: int) -> None:
    """Write about ``num_tokens`` random ids in documents of log-normal lengths, 600 in the middle."""
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(prefix, vocab_size=VOCAB_SIZE) as writer:
        while writer.num_tokens < num_tokens:
            sizes = np.maximum(rng.lognormal(np.log(600), 1.0, 1000).astype(np.int64), 1)
            writer.add(rng.integers(0, VOCAB_SIZE, int(sizes.sum())), sizes)


def read(prefix: Path, family: str, reader: str, num_workers: int, samples: int) -> float:
    """Return samples/s that ``DataLoader`` gives from a file that is opened before; the first micro-batch, for
    which workers start, is not counted."""
    batches = DataLoader(
        data_set(IndexedDataset(prefix, reader=reader), family),
        micro_batch_size=MICRO_BATCH,
        num_micro_batches=1,
        data_rank=0,
        data_size=1,
        num_workers=num_workers,
    )
    iterator = iter(batches)
    next(iterator)
    started = time.perf_counter()
    count = sum(len(next(iter(batch.values()))) for batch in islice(iterator, max(samples // MICRO_BATCH, 1)))
    return count / (time.perf_counter() - started)


def data_set(token_file: IndexedDataset, family: str) -> GPTDataset | T5Dataset:
    """Return the samples of all documents, as a run of ``family`` reads them."""
    documents = (0, token_file.num_documents)
    if family == "gpt2":
        return GPTDataset(token_file, documents=documents, seq_length=SEQ_LENGTH, seed=0)
    kinds: Sequence[spans.Denoiser] = spans.parse_denoisers("R", 0.15, 3.0)
    tokens = T5Tokens.appended(VOCAB_SIZE, 100, 0)
    return T5Dataset(
        token_file, documents=documents, enc_seq_length=ENC_SEQ_LENGTH, denoisers=kinds, tokens=tokens, seed=0
    )
