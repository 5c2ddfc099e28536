"""Parts ``reading`` and ``spans`` of ``data.py``: samples/s of reading, and of cutting T5's spans out of a text.

Reading is held against ten times what the training of the default run consumes:

    needed samples/s = 10 x tokens/s of a step of the default run / tokens of a sample

The step is that of ``run_gpt2.sh`` or ``run_t5.sh`` with a larger vocabulary, in one process with all cores: a
run of several processes on the same cores takes no more tokens. The read file is made for the purpose: random ids,
documents of lengths as in a corpus of pages.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sizes import GPTSizes, T5Sizes
from benchmarks.turns import Bar, Work, quartiles, rates_in_turns, ratio_quartiles
from benchmarks.turns import take_turns as steps_in_turns
from megatron.data import DataLoader, GPTDataset, IndexedDataset, IndexedDatasetBuilder
from megatron.data.permutation import random_words
from megatron.models.t5 import data, spans
from megatron.models.t5.data import T5Dataset, T5Tokens, cut_out, draw_spans, num_words
from megatron.models.t5.spans import Denoiser

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
"""Layers and widths of ``run_gpt2.sh`` and ``run_t5.sh``, with a larger vocabulary, and micro-batches."""
TOKENS_PER_SAMPLE = {"gpt2": SEQ_LENGTH, "t5": ENC_SEQ_LENGTH + DEC_SEQ_LENGTH}


def measure_reading(
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
    rates = rates_in_turns(turns, rounds)
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


# Cutting T5's spans out of a text: our arrays against plain Python.
#
# | contender | what it does |
# |---|---|
# | ours | what ``T5Dataset`` does behind the reading: random words, spans, sentinels, frames |
# | the usual loop | the steps of Megatron's T5 data set, as told below |
# | the same in Python | exactly ours, to the last bit, without arrays: what a careful loop can reach |
#
# The usual loop lists spans of each length from each token on, shuffles the lists, takes one of each with a length
# drawn from a geometric distribution unless it overlaps those taken before, and then goes through the text span by
# span.

OURS, USUAL, SAME = "spans, ours", "spans, the usual loop", "spans, the same in Python"
DENOISER = Denoiser("R", 0.15, 3.0)
LONGEST_SPAN = 10
_WORD = (1 << 64) - 1

Sample = dict[str, np.ndarray]
Cut = Callable[[np.ndarray, int], Sample]


def measure_spans(samples: int, rounds: int) -> tuple[dict[str, list[float]], list[Bar]]:
    """Return samples/s of each contender in each round, and the bar; ``samples`` a turn."""
    text = np.random.default_rng(0).integers(0, TOKENS.text_vocab_size, RAW_LENGTH)

    def turn(cut: Cut) -> float:
        started = time.perf_counter()
        for number in range(samples):
            cut(text, number)
        return samples / (time.perf_counter() - started)

    rates = rates_in_turns({name: partial(turn, cut) for name, cut in CONTENDERS.items()}, rounds)
    return rates, [Bar("T5 spans / the usual loop", 10.0, ratio_quartiles(rates[OURS], rates[USUAL]))]


TOKENS = T5Tokens.appended(32_000, 100, 1)
RAW_LENGTH = spans.raw_length(ENC_SEQ_LENGTH, [DENOISER])
TARGET_LENGTH = spans.longest_target(RAW_LENGTH, [DENOISER])
_SENTINELS = np.array(TOKENS.sentinels, np.int64)


def ours(text: np.ndarray, number: int) -> Sample:
    """Return the sample as ``T5Dataset`` makes it of a text that it has read."""
    words = random_words(num_words(len(text)) + 1, "spans", 0, number)
    pair = cut_out(text, draw_spans([len(text)], DENOISER, words), _SENTINELS)
    return data.sample(pair, TOKENS, ENC_SEQ_LENGTH, TARGET_LENGTH)


def same(text: np.ndarray, number: int) -> Sample:
    """Return the very sample of ``ours``, one Python number after the other."""
    words = _words(num_words(len(text)) + 1, "spans", 0, number)[num_words(0) :]
    noise, count = spans.noise_and_spans(len(text), DENOISER)
    kept = _composition(len(text) - noise, count, words[noise : len(text)])
    cut = _composition(noise, count, words[:noise])
    inputs, targets, place = [], [], 0
    for span in range(count):
        for _ in range(kept[span]):
            inputs.append(int(text[place]))
            place += 1
        inputs.append(TOKENS.sentinels[span])
        targets.append(TOKENS.sentinels[span])
        for _ in range(cut[span]):
            targets.append(int(text[place]))
            place += 1
    return _framed(inputs, targets)


def _words(count: int, *key: int | str) -> list[int]:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    start, step = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little") | 1
    words = []
    for place in range(count):
        word = (start + place * step) & _WORD
        word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _WORD
        word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _WORD
        words.append(word ^ word >> 31)
    return words


def _composition(total: int, parts: int, words: list[int]) -> list[int]:
    """Split ``total`` into ``parts``: the places with the smallest keys are where parts start."""
    bits = total.bit_length()
    keys = sorted((words[place] >> 1 >> bits << bits) | place for place in range(1, total))
    starts = [0, *sorted(key & ((1 << bits) - 1) for key in keys[: parts - 1]), total]
    return [after - before for before, after in zip(starts, starts[1:], strict=False)]


def usual(text: np.ndarray, number: int) -> Sample:
    """Return a sample of about as many spans by the usual loop; their number differs from sample to sample."""
    random = np.random.RandomState(number)
    tokens = [int(token) for token in text]
    noise = max(1, round(len(tokens) * DENOISER.noise_density))
    candidates = [
        [[*range(start, start + length)] for length in range(1, LONGEST_SPAN + 1) if start + length <= len(tokens)]
        for start in range(len(tokens))
    ]
    random.shuffle(candidates)
    covered: set[int] = set()
    chosen = []
    for lengths in candidates:
        if len(covered) >= noise:
            break
        length = min(int(random.geometric(1 / DENOISER.mean_span_length)), len(lengths), noise - len(covered))
        span = lengths[length - 1]
        if len(chosen) + 1 < len(TOKENS.sentinels) and not any(place in covered for place in span):
            covered.update(span)
            chosen.append(span)
    chosen.sort(key=lambda span: span[0])
    inputs, targets, place = [], [], 0
    for sentinel, span in zip(TOKENS.sentinels, chosen, strict=False):
        inputs.extend(tokens[place : span[0]])
        inputs.append(sentinel)
        targets.append(sentinel)
        targets.extend(tokens[place] for place in span)
        place = span[-1] + 1
    inputs.extend(tokens[place:])
    return _framed(inputs, targets)


def _framed(inputs: list[int], targets: list[int]) -> Sample:
    sample = {}
    for name, side, row, length in (
        ("inputs", "enc", inputs, ENC_SEQ_LENGTH),
        ("targets", "dec", targets, TARGET_LENGTH),
    ):
        row = [*row[: length - 1], TOKENS.eos_id]
        padding = length - len(row)
        sample[name] = np.array(row + [TOKENS.pad_id] * padding, np.int64)
        sample[f"{side}_segments"] = np.array([0] * len(row) + [data.PADDING] * padding, np.int32)
    return sample


CONTENDERS: dict[str, Cut] = {OURS: ours, USUAL: usual, SAME: same}
