"""A Ray cluster makes the bytes of one machine, also when a node is killed in the middle."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.data import preprocess
from megatron.data.preprocess import cluster, shards
from megatron.data.preprocess.encode import Encoder
from megatron.data.preprocess.workers import UnitError
from megatron.errors import DataError
from tests.helpers.fake_ray import FakeRay
from tests.helpers.preprocess_job import GOOD, SUFFIXES, Corpus, lines, small_tokenizer
from tools import preprocess_data

ROOT = Path(__file__).resolve().parents[3]
TOOL, TWO_NODES = ROOT / "tools" / "preprocess_data.py", ROOT / "tests" / "helpers" / "ray_cluster.py"
HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs Ray: pip install -e '.[ray]'")
CONTENT = lines(*GOOD)
UNIT_BYTES = len(CONTENT) // 5 + 1  # five units


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    found = Corpus(tmp_path)
    found.write(CONTENT)
    return found


@pytest.fixture
def expected(corpus: Corpus) -> tuple[bytes, ...]:
    corpus.run()
    return corpus.output()


@pytest.fixture(autouse=True)
def every_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tasks report after each chunk, of which a unit has several."""
    monkeypatch.setattr(cluster, "_SECONDS_BETWEEN_REPORTS", 0)
    monkeypatch.setattr("megatron.data.preprocess.encode.CHUNK_BYTES", 200)


def on(ray: FakeRay, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, **changed: object) -> preprocess.Summary:
    """Run the job on this cluster."""
    monkeypatch.setattr(cluster, "_imported", lambda: ray)
    return corpus.run(**{"cluster": "auto", "num_workers": 0, "unit_bytes": UNIT_BYTES} | changed)


def test_the_bytes_are_those_of_one_machine(corpus: Corpus, expected, monkeypatch, capsys) -> None:
    monkeypatch.setattr("megatron.data.preprocess.progress._SECONDS_BETWEEN_LINES", 0)
    ray = FakeRay()
    summary = on(ray, corpus, monkeypatch)
    assert corpus.output() == expected and corpus.names() == []
    assert (summary.num_units, len(ray.started), ray.most_at_once, ray.is_shut_down) == (5, 5, 4, True)
    said = capsys.readouterr().err
    assert "encoding on 2 Ray machines with 2 CPUs" in said and "idle for" in said
    assert re.search(r"encoding: \d+%, .* MB/s, \d+ documents", said)


def test_units_of_a_lost_machine_go_again(corpus: Corpus, expected, monkeypatch, capsys) -> None:
    """Two tasks are lost, one of them after it has written a part of its unit."""
    ray = FakeRay(lose={0: 0, 3: 2})
    assert on(ray, corpus, monkeypatch).num_units == 5
    assert corpus.output() == expected and len(ray.started) == 7 and corpus.names() == []
    said = capsys.readouterr().err
    assert (
        said.count("was lost (NodeDiedError: Task failed because the node it was running on is dead.); the unit") == 2
    )
    assert "c.jsonl bytes 0:" in said


def test_what_a_lost_machine_had_counted_is_not_counted_twice(corpus: Corpus, monkeypatch) -> None:
    """Six bad lines in a unit that is lost behind them stay six."""
    corpus.write(b"x\n" * 6 + CONTENT)
    summary = on(FakeRay(lose={0: 1}), corpus, monkeypatch, max_bad_lines=6)
    assert (summary.num_bad, summary.num_documents) == (6, 60)


def test_a_unit_that_is_lost_again_and_again_ends_the_job(corpus: Corpus, monkeypatch) -> None:
    ray = FakeRay(lose=dict.fromkeys(range(100), 0))
    with pytest.raises(UnitError, match=r"c.jsonl bytes \d+:\d+ was lost 3 times .*NodeDied.*reduce --workers"):
        on(ray, corpus, monkeypatch)
    assert ray.is_shut_down and ray.cancelled


def test_a_job_that_was_cut_off_goes_on_on_a_cluster_and_back(corpus: Corpus, expected, monkeypatch) -> None:
    ray = FakeRay(num_cpus=1, lose=dict.fromkeys(range(3, 100), 0))
    with pytest.raises(UnitError, match="units are finished and saved; --resume continues with them"):
        on(ray, corpus, monkeypatch, num_workers=1)
    assert ray.most_at_once == 2, "of a cluster of this machine --workers is the number of CPUs"
    assert on(FakeRay(), corpus, monkeypatch, resume=True).num_resumed >= 1
    assert corpus.output() == expected


def test_what_a_task_fails_by_reaches_the_user(corpus: Corpus, monkeypatch) -> None:
    for error, kind, text in (
        (DataError("c.jsonl.gz is damaged"), DataError, "c.jsonl.gz is damaged"),
        (KeyError("x"), UnitError, "failed while it encoded .*c.jsonl bytes [0-9]+:.*KeyError: 'x'"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Encoder, "encode", lambda *_, error=error: _raise(error))
            with pytest.raises(kind, match=text):
                on(FakeRay(num_cpus=1), corpus, monkeypatch)
    monkeypatch.setattr(cluster, "reports", lambda *_: _raise(ModuleNotFoundError("No module named 'orjson'")))
    with pytest.raises(UnitError, match="a Ray task failed while it encoded .*No module named 'orjson'"):
        on(FakeRay(), corpus, monkeypatch)


def _raise(error: Exception) -> None:
    raise error


def test_a_machine_that_does_not_share_the_folders_is_named(corpus: Corpus, monkeypatch) -> None:
    def task(setup: tuple[Any, Any], folder: str, unit: preprocess.Unit) -> Iterator[object]:
        return real(setup, "/nowhere", unit)

    real = cluster.encode_unit
    monkeypatch.setattr(cluster, "encode_unit", task)
    monkeypatch.chdir(corpus.folder)
    with pytest.raises(DataError, match="No such file or directory: '/nowhere', on the machine .* of the cluster"):
        on(FakeRay(), corpus, monkeypatch, inputs=["c.jsonl"])
    monkeypatch.setattr(cluster, "encode_unit", real)
    monkeypatch.setattr(cluster, "PATIENCE_S", 0.1)
    monkeypatch.setattr(shards.PartWriter, "_rename", lambda writer, kind: None)  # as on another machine's own disk
    with pytest.raises(
        DataError, match="is not visible on this machine after 0 s. --output-prefix must be in a folder that all"
    ):
        on(FakeRay(), corpus, monkeypatch)


def test_what_cannot_be_a_cluster_is_refused(corpus: Corpus, monkeypatch, capsys) -> None:
    for address, text in (
        ("localhost", "must be auto or HOST:PORT, got localhost"),
        ("127.0.0.1:1", "--cluster 127.0.0.1:1 does not answer .*ray start --head --port=1"),
    ):
        with pytest.raises(DataError, match=text):
            on(FakeRay(), corpus, monkeypatch, cluster=address)
    with pytest.raises(DataError, match="--cluster needs input that can be read again"):
        on(FakeRay(), corpus, monkeypatch, inputs=["-"])
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DataError, match=r"--cluster needs Ray: pip install -e '.\[ray\]'"):
        corpus.run(cluster="auto")
    given = ["--input", "c", "--output-prefix", "o", "--cluster", "auto"]
    with pytest.raises(SystemExit):
        preprocess_data.parse_args([*given, "--part", "1/2"])
    assert "--part (independent jobs) cannot be combined with --cluster" in capsys.readouterr().err
    assert preprocess_data.job_of(preprocess_data.parse_args(given)).num_workers == 0


def test_the_address_of_the_environment_counts(corpus: Corpus, expected, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    ray = FakeRay(num_cpus=7)
    on(ray, corpus, monkeypatch, num_workers=1)
    assert ray.address == "auto" and "num_cpus" not in ray.options and ray.most_at_once == 1
    assert str(ROOT) in ray.options["runtime_env"]["env_vars"]["PYTHONPATH"].split(os.pathsep)
    assert corpus.output() == expected


# With Ray itself.


def prepare(folder: Path, num_lines: int) -> None:
    (folder / "t.json").write_text(small_tokenizer().description)  # type: ignore[attr-defined]
    (folder / "c.jsonl").write_bytes(lines(*(f"{text} {number} " * 20 for number in range(num_lines) for text in GOOD)))


def start(folder: Path, prefix: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(TOOL), "--input", "c.jsonl", "--tokenizer-path", "t.json", "--output-prefix", prefix]
    return subprocess.Popen([*command, *more], cwd=folder, stderr=subprocess.PIPE, text=True)


def ended(job: subprocess.Popen[str]) -> str:
    said = job.communicate(timeout=400)[1]
    assert job.returncode == 0, said
    return said


def writers(parts: Path) -> set[str]:
    """Return the processes that are at a unit now, one for each CPU of the cluster when all have begun."""
    return {path.name.rsplit("-", 2)[1] for path in parts.glob("unit-*.bin.tmp-*")}


def sha256(folder: Path, prefix: str) -> list[str]:
    return [hashlib.sha256((folder / f"{prefix}{suffix}").read_bytes()).hexdigest() for suffix in SUFFIXES]


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_node_that_is_killed_in_the_middle_changes_no_byte(tmp_path: Path) -> None:
    """Two nodes on this machine; the second and all its processes end by SIGKILL while they encode."""
    prepare(tmp_path, 300)
    ended(start(tmp_path, "one", "--workers", "2"))
    nodes = subprocess.Popen(
        [sys.executable, str(TWO_NODES)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert nodes.stdin and nodes.stdout

    def asked(line: str) -> str:
        print(line, file=nodes.stdin, flush=True)
        return nodes.stdout.readline()  # type: ignore[union-attr]

    try:
        address = nodes.stdout.readline().strip()
        job = start(tmp_path, "two", "--cluster", address, "--unit-bytes", "2000000")
        while True:
            assert job.poll() is None, job.communicate()[1]
            stopped = set(asked("stop").split())  # so that the unit it is at cannot end before it is killed
            if any((tmp_path / "two.parts").glob("unit-*.json")) and stopped & writers(tmp_path / "two.parts"):
                break
            asked("go")
            time.sleep(0.1)
        asked("kill")
        assert job.poll() is None, "it must be killed in the middle"
        said = ended(job)
    finally:
        nodes.communicate("end\n", timeout=60)
    assert "encoding on 2 Ray machines with 2 CPUs" in said and "retrying the unit" in said, said
    assert sha256(tmp_path, "two") == sha256(tmp_path, "one")
    assert not (tmp_path / "two.parts").exists()


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_of_this_machine_does_a_job_and_ends_with_it(tmp_path: Path) -> None:
    prepare(tmp_path, 5)
    ended(start(tmp_path, "one", "--workers", "2"))
    said = ended(start(tmp_path, "two", "--cluster", "auto", "--workers", "2", "--unit-bytes", "20000"))
    assert "encoding on 1 Ray machine with 2 CPUs" in said
    assert sha256(tmp_path, "two") == sha256(tmp_path, "one")
