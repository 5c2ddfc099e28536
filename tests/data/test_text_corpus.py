"""Text in --data-path: encoded once, shared, resumed after a kill; and training while it is encoded."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import BlendPaths, build_train_valid_test, preprocess
from megatron.data import text_corpus as text_corpus_module
from megatron.data.cache import IndexCache
from megatron.data.growing_tokens import GrowingTokens
from megatron.data.text_corpus import TextCorpus, TextSettings
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer, build, train

TEXTS = [f"document {idx} " + "more words of it " * (idx % 7) for idx in range(240)]
SEQ_LENGTH, WINDOW = 16, 8


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "t.json"
    path.write_bytes(train.train_bpe(TEXTS, 300))
    return build(tokenizer_path=path)


@pytest.fixture
def settings(tokenizer: Tokenizer, tmp_path: Path) -> TextSettings:
    arguments = {"tokenizer_path": str(tokenizer.paths[0]), "eod_token": tokenizer.eod_name}
    return TextSettings(cache_folder=tmp_path / "cache", tokenizer=arguments, identity=tokenizer.identity)


@pytest.fixture
def corpus_path(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def encoded_here(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Iterator[list[str]]:
    """Encode in this process instead of another one; return the list of encoded corpora."""
    encoded: list[str] = []

    def start(self: TextCorpus, lock_descriptor: int) -> None:
        encoded.append(self.path)
        run_job(self, tokenizer)

    monkeypatch.setattr(TextCorpus, "_start", start)
    yield encoded


def run_job(corpus: TextCorpus, tokenizer: Tokenizer, **overrides: Any) -> preprocess.Summary:
    return preprocess.run(
        preprocess.Job(
            inputs=[corpus.path],
            output_prefix=corpus.prefix,
            make_tokenizer=lambda: build(tokenizer_path=tokenizer.paths[0]),
            resume=True,
            source=corpus.source,
            **overrides,
        )
    )


def read_all(paths: BlendPaths, tokenizer: Tokenizer, count: int, split_idx: int = 0) -> tuple[np.ndarray, Any]:
    needed = [split_idx == idx for idx in range(3)]
    dataset = build_train_valid_test(
        paths, seq_length=SEQ_LENGTH, seed=5, vocab_size=tokenizer.vocab_size, needed=needed
    )[split_idx]
    assert dataset is not None
    return np.stack([dataset[idx] for idx in range(count)]), dataset


def test_the_encoder_process_writes_the_token_files_of_the_tool(
    settings: TextSettings, corpus_path: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The only test of this file that starts the process; its files equal the files of tools/preprocess_data.py."""
    paths = BlendPaths(data_path=str(corpus_path), text=settings, split="100,0,0")
    from_text, _ = read_all(paths, tokenizer, 40)
    job = preprocess.Job(
        inputs=[corpus_path],
        output_prefix=str(tmp_path / "tool"),
        make_tokenizer=lambda: build(tokenizer_path=tokenizer.paths[0]),
    )
    preprocess.run(job)
    from_tool, _ = read_all(BlendPaths(data_path=job.output_prefix, split="100,0,0"), tokenizer, 40)
    assert np.array_equal(from_text, from_tool)
    corpus = TextCorpus(str(corpus_path), settings)
    assert corpus.is_finished() and not corpus.shard_folder.exists()
    assert Path(corpus.prefix + ".bin").read_bytes() == (tmp_path / "tool.bin").read_bytes()


def test_a_corpus_is_encoded_once_until_it_changes(
    settings: TextSettings, corpus_path: Path, encoded_here: list[str]
) -> None:
    for _ in range(2):
        TextCorpus(str(corpus_path), settings).open("mmap", IndexCache())
    assert len(encoded_here) == 1
    with corpus_path.open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    assert TextCorpus(str(corpus_path), settings).open("mmap", IndexCache()).num_documents == len(TEXTS) + 1
    assert len(encoded_here) == 2


def test_another_process_that_holds_the_lock_encodes(
    settings: TextSettings, corpus_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the lock is held, no second encoder starts; when its holder is killed, this process starts one."""
    corpus = TextCorpus(str(corpus_path), settings)
    corpus.folder.mkdir(parents=True)
    ready, child_ready = os.pipe()
    pid = os.fork()
    if not pid:
        import fcntl

        descriptor = os.open(corpus.folder / "encoder.lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(child_ready, b".")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    started: list[float] = []
    monkeypatch.setattr(TextCorpus, "_start", lambda self, _: started.append(run_job(self, tokenizer).seconds))
    corpus._start_if_unlocked()
    assert not started
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    corpus.wait_until(corpus.is_finished)
    assert len(started) == 1


def test_finished_units_of_a_killed_encoder_are_reused(
    settings: TextSettings, corpus_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = TextCorpus(str(corpus_path), settings)
    corpus.folder.mkdir(parents=True)
    _stop_before_joining(monkeypatch, corpus, tokenizer, unit_bytes=4096)
    num_units = len(list(corpus.shard_folder.glob("unit-*.json")))
    assert num_units > 2
    summary = run_job(corpus, tokenizer)
    assert summary.num_resumed == num_units


def _stop_before_joining(
    monkeypatch: pytest.MonkeyPatch, corpus: TextCorpus, tokenizer: Tokenizer, **overrides: Any
) -> None:
    """Create the state that an encoder leaves if it is killed after all units are finished."""
    with monkeypatch.context() as patch:

        def kill(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr("megatron.data.preprocess.job._finish_job", kill)
        with pytest.raises(BaseException, match="stopped"):
            run_job(corpus, tokenizer, **overrides)


def test_all_bad_lines_are_reported_with_the_flag(
    settings: TextSettings, corpus_path: Path, tokenizer: Tokenizer
) -> None:
    lines = corpus_path.read_text().splitlines()
    lines[3], lines[100], lines[200] = "not json", '{"other": 1}', '{"text": 7}'
    corpus_path.write_text("\n".join(lines) + "\n")
    corpus = TextCorpus(str(corpus_path), settings)
    with pytest.raises(DataError, match="--max-bad-lines") as caught:
        run_job(corpus, tokenizer, reports_all_bad=True, unit_bytes=4096)
    assert all(f"corpus.jsonl:{line}" in str(caught.value) for line in (4, 101, 201))
    summary = run_job(corpus, tokenizer, max_bad_lines=3)
    assert summary.num_bad == 3 and summary.num_resumed > 2


def test_every_waiting_rank_raises_the_failure_of_the_encoder(settings: TextSettings, corpus_path: Path) -> None:
    waiting = TextCorpus(str(corpus_path), settings)
    waiting.folder.mkdir(parents=True)
    (waiting.folder / "error.json").write_text(json.dumps({"id": "1", "message": "the disk is full"}))
    with pytest.raises(DataError, match="the disk is full"):
        waiting.wait_until(waiting.is_finished)
    restarted = TextCorpus(str(corpus_path), settings)  # a restarted run ignores the failure of the run before
    restarted._check_failure()


def test_cache_folder_of_a_long_name_can_be_created(settings: TextSettings, tmp_path: Path) -> None:
    """A file name may have 255 bytes, to which the cache folder adds a digest."""
    path = tmp_path / ("语" * 80 + ".jsonl")
    path.write_text('{"text": "a"}')
    TextCorpus(str(path), settings).folder.mkdir(parents=True)


def test_text_without_a_tokenizer_names_both_spellings(settings: TextSettings, corpus_path: Path) -> None:
    bare = TextSettings(cache_folder=settings.cache_folder, tokenizer=None)
    with pytest.raises(DataError, match=r"--tokenizer-path \(TOKENIZER"):
        TextCorpus(str(corpus_path), bare)


@pytest.mark.parametrize(("split", "split_by", "split_idx"), [("100,0,0", "range", 0), ("80,20,0", "hash", 1)])
def test_text_that_grows_has_the_samples_of_finished_files(
    settings: TextSettings,
    corpus_path: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    split: str,
    split_by: str,
    split_idx: int,
) -> None:
    """Units appear one after another; every sample equals the sample of the finished token files, over two epochs."""
    corpus = TextCorpus(str(corpus_path), settings)
    corpus.folder.mkdir(parents=True)
    _stop_before_joining(monkeypatch, corpus, tokenizer, unit_bytes=1024)
    units = sorted(corpus.shard_folder.glob("unit-*.json"))
    hidden = {path: path.with_suffix(".hidden") for path in units}
    for path, name in hidden.items():
        path.rename(name)
    num_shown = []

    def show_next_unit(self: TextCorpus) -> None:
        waiting = [path for path in units if hidden[path].exists()]
        if waiting:
            hidden[waiting[0]].rename(waiting[0])
            num_shown.append(len(units) - len(waiting) + 1)
        else:
            run_job(corpus, tokenizer)

    monkeypatch.setattr(TextCorpus, "_start_if_unlocked", show_next_unit)
    monkeypatch.setattr(text_corpus_module, "_POLL_S", 0.0)
    flags = {"shuffle_window": WINDOW, "split": split, "split_by": split_by}
    paths = BlendPaths(data_path=str(corpus_path), text=settings, **flags)  # type: ignore[arg-type]
    count = 420 if split_idx == 0 else 90
    first, _ = read_all(paths, tokenizer, WINDOW, split_idx)
    assert 0 < num_shown[-1] < len(units), "the first window must not wait for the whole corpus"
    growing, dataset = read_all(paths, tokenizer, count, split_idx)
    assert corpus.is_finished()
    assert isinstance(next(iter(dataset.parts.values())).token_file, GrowingTokens)
    of_cache = BlendPaths(data_path=corpus.prefix, **flags)  # type: ignore[arg-type]
    finished, of_files = read_all(of_cache, tokenizer, count, split_idx)
    assert np.array_equal(growing, finished) and np.array_equal(growing[: len(first)], first)
    per_epoch = next(iter(of_files.parts.values())).samples_per_epoch
    assert per_epoch < count, "more than one epoch must be compared"
    if split_by == "range":  # a run continues from its checkpoint on the finished files
        streamed, (described,) = dataset.order.corpora[0].fingerprint, of_files.order.corpora
        assert {streamed.split(".")[0], streamed.split(".")[2]} <= {
            part for text in described.other_fingerprints for part in text.split(".")
        }


def test_a_window_is_a_permutation_of_its_samples(
    settings: TextSettings, corpus_path: Path, tokenizer: Tokenizer, encoded_here: list[str]
) -> None:
    """The samples of each window are those of the unshuffled corpus, in another order in every epoch."""
    file = TextCorpus(str(corpus_path), settings).open("mmap", IndexCache())
    text = np.concatenate([file.read(document) for document in range(file.num_documents)])
    per_epoch = (len(text) - 1) // SEQ_LENGTH
    paths = BlendPaths(data_path=file.prefix, shuffle_window=WINDOW, split="100,0,0")
    samples, _ = read_all(paths, tokenizer, 2 * per_epoch)
    expected = [tuple(text[idx * SEQ_LENGTH : (idx + 1) * SEQ_LENGTH + 1]) for idx in range(per_epoch)]
    is_moved = False
    for epoch in (samples[:per_epoch], samples[per_epoch:]):
        for begin in range(0, per_epoch, WINDOW):
            window = [tuple(sample) for sample in epoch[begin : begin + WINDOW]]
            assert sorted(window) == sorted(expected[begin : begin + WINDOW])
            is_moved = is_moved or window != expected[begin : begin + WINDOW]
    assert is_moved and not np.array_equal(samples[:per_epoch], samples[per_epoch:])


def test_the_window_is_part_of_the_fingerprint(
    settings: TextSettings, corpus_path: Path, tokenizer: Tokenizer, encoded_here: list[str]
) -> None:
    prefix = TextCorpus(str(corpus_path), settings).open("mmap", IndexCache()).prefix
    fingerprints = {
        read_all(BlendPaths(data_path=prefix, split="100,0,0", shuffle_window=window), tokenizer, 1)[1].fingerprint
        for window in (0, 4, 8)
    }
    assert len(fingerprints) == 3
