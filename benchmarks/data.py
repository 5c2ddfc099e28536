"""Measure the path of the data: preprocessing, reading, T5's spans; each against a reference in the same run.

    python benchmarks/data.py --json data.json
    python benchmarks/data.py --parts preprocessing --tokenizers cpm --rounds 3

Contenders take turns, the order rotates, medians over rounds are reported and ratios within rounds. Bars:

| part | what | at least |
|---|---|---|
| preprocessing | MB/s of CPM-1, one worker, over jieba + SentencePiece in the structure of Megatron's tool | 3 |
| preprocessing | MB/s of BPE by `tokenizers` over that structure with the same library | 1.3 |
| preprocessing | MB/s of BPE by gigatoken over the same | 8 |
| reading | samples/s over ten times what a step of the default run consumes | 1 |
| spans | T5 samples/s over the usual Python loop | 10 |
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
import numpy as np

from benchmarks import data_preprocessing
from benchmarks.contenders import GPTSizes, T5Sizes
from benchmarks.step_time import Work
from benchmarks.step_time import take_turns as steps_in_turns
from benchmarks.turns import Bar, quartiles, rates_in_turns, ratio_quartiles, surroundings
from megatron import device
from megatron.data import DataLoader, GPTDataset, IndexedDataset, IndexedDatasetBuilder
from megatron.data.permutation import random_words
from megatron.models.t5 import data, spans
from megatron.models.t5.data import T5Dataset, T5Tokens, cut_out, draw_spans, num_words
from megatron.models.t5.spans import Denoiser

# Parts ``reading`` and ``spans``: samples/s of reading, and of cutting T5's spans out of a text.
#
# Reading is held against ten times what the training of the default run consumes:
#
#     needed samples/s = 10 x tokens/s of a step of the default run / tokens of a sample
#
# The step is that of ``run_gpt2.sh`` or ``run_t5.sh`` with a larger vocabulary, in one process with all cores: a
# run of several processes on the same cores takes no more tokens. The read file is made for the purpose: random ids,
# documents of lengths as in a corpus of pages.

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


PARTS = ("preprocessing", "reading", "spans")
PARTS_OF_CORPUS = {data_preprocessing.CPM: 0.25, data_preprocessing.GIGATOKEN: 12.0}
"""How much of --megabytes, where not all: jieba takes ten times as long, and what gigatoken does at the start is small
only beside a job of seconds."""
TRAINED_ON_BYTES = 2 << 20
SMOKE = "--rounds 1 --megabytes 0.05 --vocab-size 2000 --read-tokens 40000 --samples 16 --workers 1"
SMOKE_VOCABULARY_BYTES = 60_000


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the benchmark's options."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument(
        "--tokenizers", nargs="+", choices=data_preprocessing.KINDS, default=list(data_preprocessing.KINDS)
    )
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="processes that encode (default: 1 2)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: 5)")
    parser.add_argument(
        "--megabytes", type=float, default=8.0, help="of text; gigatoken 12 times, CPM a quarter of it (default: 8)"
    )
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--read-tokens", type=int, default=50_000_000, help="of the file that is read")
    parser.add_argument("--samples", type=int, default=4096, help="read in a turn (default: 4096)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the step that consumes")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of that step (all cores)")
    parser.add_argument("--seed", type=int, default=1234, help="of the corpus")
    parser.add_argument("--smoke", action="store_true", help=f"a run of seconds that says nothing: {SMOKE}")
    parser.add_argument("--json", type=Path, help="write the result here too")
    words = list(sys.argv[1:] if argv is None else argv)
    return parser.parse_args([*SMOKE.split(), *words] if "--smoke" in words else words)


def run(args: argparse.Namespace, folder: Path, start_method: str) -> dict[str, Any]:
    """Return the numbers of the parts that are asked for."""
    rates: dict[str, dict[str, list[float]]] = {}
    bars: list[Bar] = []
    facts: dict[str, Any] = {}
    if "preprocessing" in args.parts:
        kinds = data_preprocessing.kinds(folder, args.tokenizers, texts(args), args.vocab_size)
        corpora = {
            name: write_corpus(folder, args.megabytes * PARTS_OF_CORPUS.get(name, 1.0), args.seed) for name in kinds
        }
        rates["preprocessing, MB/s"], found = data_preprocessing.measure(
            kinds, corpora, args.workers, args.rounds, folder
        )
        bars += found
        facts["corpus_bytes"] = {name: path.stat().st_size for name, path in corpora.items()}
    if "reading" in args.parts:
        kind = device.choose(args.device)
        rates["reading, samples/s"], found, consumed = measure_reading(
            folder, args.read_tokens, args.samples, args.rounds, args.threads, kind, start_method
        )
        bars += found
        facts |= consumed
    if "spans" in args.parts:
        rates["T5 spans, samples/s"], found = measure_spans(args.samples // 8, args.rounds)
        bars += found
    return {"rates": rates, "bars": bars, "facts": facts}


def texts(args: argparse.Namespace) -> list[str]:
    """Return what vocabularies are trained on: texts of another seed than those that are encoded."""
    num_bytes = SMOKE_VOCABULARY_BYTES if args.smoke else TRAINED_ON_BYTES
    return list(data_preprocessing.documents(num_bytes, args.seed + 1))


def write_corpus(folder: Path, megabytes: float, seed: int) -> Path:
    """Return a corpus of that size, written where it is not there yet."""
    path = folder / f"corpus-{megabytes:g}.jsonl"
    if not path.exists():
        data_preprocessing.write(path, int(megabytes * 1e6), seed)
    return path


def table(result: dict[str, Any]) -> str:
    """Return the result as lines of text: medians of all contenders, what a step takes, then the bars."""
    lines = []
    for title, rates in result["rates"].items():
        lines.append(title)
        for name, values in rates.items():
            shown = f"{statistics.median(values):,.2f}" if "MB" in title else f"{statistics.median(values):,.0f}"
            lines.append(f"  {name:46}{shown:>12}")
    for family, needed in result["facts"].get("needed_samples_per_s", {}).items():
        taken, tokens = result["facts"]["tokens_per_s_of_a_step"][family], TOKENS_PER_SAMPLE[family]
        lines.append(f"{family}: 10 x {taken:,.0f} tokens/s of a step / {tokens} tokens of a sample = {needed:,.0f}")
    return "\n".join([*lines, *(bar.text for bar in result["bars"])])


def as_json(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result with the bars as plain values."""
    bars = [
        {
            "name": bar.name,
            "at_least": bar.at_least,
            "quartiles": bar.quartiles,
            "by_cpu": bar.by_cpu,
            "met": bar.is_met,
        }
        for bar in result["bars"]
    ]
    return {**result, "bars": bars}


def main(argv: Sequence[str] | None = None, start_method: str = "spawn") -> dict[str, Any]:
    """Run the parts, print the table, write the JSON."""
    args = parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="megatron-benchmark-") as folder:
        result = run(args, Path(folder), start_method)
    print(table(result))
    told = surroundings() | {"options": {name: str(value) for name, value in vars(args).items()}} | as_json(result)
    if args.json:
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return told


if __name__ == "__main__":
    main()
