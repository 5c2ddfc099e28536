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
from tests.helpers.preprocess_job import GOOD_TEXTS, SUFFIXES, Corpus, json_lines, make_small_tokenizer
from tools import preprocess_data

ROOT = Path(__file__).resolve().parents[3]
TOOL, CLUSTER_SCRIPT = ROOT / "tools" / "preprocess_data.py", ROOT / "tests" / "helpers" / "ray_cluster.py"
HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs Ray: pip install -e '.[ray]'")
CONTENT = json_lines(*GOOD_TEXTS)
UNIT_BYTES = len(CONTENT) // 5 + 1  # five units


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    corpus = Corpus(tmp_path)
    corpus.write(CONTENT)
    return corpus


@pytest.fixture
def expected(corpus: Corpus) -> tuple[bytes, ...]:
    corpus.preprocess()
    return corpus.read_output()


@pytest.fixture(autouse=True)
def report_after_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tasks report after each chunk, of which a unit has several."""
    monkeypatch.setattr(cluster, "_REPORT_INTERVAL_S", 0)
    monkeypatch.setattr("megatron.data.preprocess.encode.CHUNK_BYTES", 200)


def run_on_cluster(
    ray: FakeRay, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, **overrides: object
) -> preprocess.Summary:
    """Run the job on this cluster."""
    monkeypatch.setattr(cluster, "_import_ray", lambda: ray)
    return corpus.preprocess(**{"cluster": "auto", "num_workers": 0, "unit_bytes": UNIT_BYTES} | overrides)


def test_cluster_output_equals_single_machine_output(corpus: Corpus, expected, monkeypatch, capsys) -> None:
    monkeypatch.setattr("megatron.data.preprocess.progress._LOG_INTERVAL_S", 0)
    ray = FakeRay()
    summary = run_on_cluster(ray, corpus, monkeypatch)
    assert corpus.read_output() == expected and corpus.list_leftovers() == []
    assert (summary.num_units, len(ray.started_tasks), ray.max_concurrent, ray.is_shut_down) == (5, 5, 4, True)
    stderr = capsys.readouterr().err
    assert "encoding on 2 Ray machines with 2 CPUs" in stderr and "idle for" in stderr
    assert re.search(r"encoding: \d+%, .* MB/s, \d+ documents", stderr)


def test_units_of_lost_machine_are_retried(corpus: Corpus, expected, monkeypatch, capsys) -> None:
    """Two tasks are lost, one of them after it has written a part of its unit."""
    ray = FakeRay(lost_after={0: 0, 3: 2})
    assert run_on_cluster(ray, corpus, monkeypatch).num_units == 5
    assert corpus.read_output() == expected and len(ray.started_tasks) == 7 and corpus.list_leftovers() == []
    stderr = capsys.readouterr().err
    reason = "NodeDiedError: Task failed because the node it was running on is dead."
    assert stderr.count(f"was lost ({reason}); retrying the unit") == 2
    assert "c.jsonl bytes 0:" in stderr


def test_counts_of_lost_machine_are_not_double_counted(corpus: Corpus, monkeypatch) -> None:
    """Six bad lines in a unit that is lost behind them stay six."""
    corpus.write(b"x\n" * 6 + CONTENT)
    summary = run_on_cluster(FakeRay(lost_after={0: 1}), corpus, monkeypatch, max_bad_lines=6)
    assert (summary.num_bad, summary.num_documents) == (6, 60)


def test_unit_lost_repeatedly_raises(corpus: Corpus, monkeypatch) -> None:
    ray = FakeRay(lost_after=dict.fromkeys(range(100), 0))
    with pytest.raises(UnitError, match=r"c.jsonl bytes \d+:\d+ was lost 3 times .*NodeDied.*reduce --workers"):
        run_on_cluster(ray, corpus, monkeypatch)
    assert ray.is_shut_down and ray.cancelled


def test_interrupted_job_resumes_on_cluster_and_locally(corpus: Corpus, expected, monkeypatch) -> None:
    ray = FakeRay(num_cpus=1, lost_after=dict.fromkeys(range(3, 100), 0))
    with pytest.raises(UnitError, match="units are finished and saved; --resume continues with them"):
        run_on_cluster(ray, corpus, monkeypatch, num_workers=1)
    assert ray.max_concurrent == 2, "of a cluster of this machine --workers is the number of CPUs"
    assert run_on_cluster(FakeRay(), corpus, monkeypatch, resume=True).num_resumed >= 1
    assert corpus.read_output() == expected


def test_task_errors_reach_user(corpus: Corpus, monkeypatch) -> None:
    for error, error_type, text in (
        (DataError("c.jsonl.gz is damaged"), DataError, "c.jsonl.gz is damaged"),
        (KeyError("x"), UnitError, "failed while it encoded .*c.jsonl bytes [0-9]+:.*KeyError: 'x'"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Encoder, "encode", lambda *_, error=error: _raise(error))
            with pytest.raises(error_type, match=text):
                run_on_cluster(FakeRay(num_cpus=1), corpus, monkeypatch)
    monkeypatch.setattr(
        cluster, "encode_with_reports", lambda *_: _raise(ModuleNotFoundError("No module named 'orjson'"))
    )
    with pytest.raises(UnitError, match="a Ray task failed while it encoded .*No module named 'orjson'"):
        run_on_cluster(FakeRay(), corpus, monkeypatch)


def _raise(error: Exception) -> None:
    raise error


def test_machine_without_shared_folder_is_named(corpus: Corpus, monkeypatch) -> None:
    def task(setup: tuple[Any, Any], folder: str, unit: preprocess.Unit) -> Iterator[object]:
        return encode_unit(setup, "/nowhere", unit)

    encode_unit = cluster.encode_unit
    monkeypatch.setattr(cluster, "encode_unit", task)
    monkeypatch.chdir(corpus.folder)
    with pytest.raises(DataError, match="No such file or directory: '/nowhere', on the machine .* of the cluster"):
        run_on_cluster(FakeRay(), corpus, monkeypatch, inputs=["c.jsonl"])
    monkeypatch.setattr(cluster, "encode_unit", encode_unit)
    monkeypatch.setattr(cluster, "VISIBILITY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(shards.ShardWriter, "_rename", lambda writer, kind: None)  # as on another machine's own disk
    with pytest.raises(
        DataError, match="is not visible on this machine after 0 s. --output-prefix must be in a folder that all"
    ):
        run_on_cluster(FakeRay(), corpus, monkeypatch)


def test_invalid_cluster_addresses_are_rejected(corpus: Corpus, monkeypatch, capsys) -> None:
    for address, text in (
        ("localhost", "must be auto or HOST:PORT, got localhost"),
        ("127.0.0.1:1", "--cluster 127.0.0.1:1 does not answer .*ray start --head --port=1"),
    ):
        with pytest.raises(DataError, match=text):
            run_on_cluster(FakeRay(), corpus, monkeypatch, cluster=address)
    with pytest.raises(DataError, match="--cluster needs input that can be read again"):
        run_on_cluster(FakeRay(), corpus, monkeypatch, inputs=["-"])
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DataError, match=r"--cluster needs Ray: pip install -e '.\[ray\]'"):
        corpus.preprocess(cluster="auto")
    arguments = ["--input", "c", "--output-prefix", "o", "--cluster", "auto"]
    with pytest.raises(SystemExit):
        preprocess_data.parse_args([*arguments, "--part", "1/2"])
    assert "--part (independent jobs) cannot be combined with --cluster" in capsys.readouterr().err
    assert preprocess_data.make_job(preprocess_data.parse_args(arguments)).num_workers == 0


def test_ray_address_environment_variable_is_used(corpus: Corpus, expected, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    ray = FakeRay(num_cpus=7)
    run_on_cluster(ray, corpus, monkeypatch, num_workers=1)
    assert ray.address == "auto" and "num_cpus" not in ray.options and ray.max_concurrent == 1
    assert str(ROOT) in ray.options["runtime_env"]["env_vars"]["PYTHONPATH"].split(os.pathsep)
    assert corpus.read_output() == expected


# With Ray itself.


def write_inputs(folder: Path, num_lines: int) -> None:
    (folder / "t.json").write_text(make_small_tokenizer().description)  # type: ignore[attr-defined]
    (folder / "c.jsonl").write_bytes(
        json_lines(*(f"{text} {line_idx} " * 20 for line_idx in range(num_lines) for text in GOOD_TEXTS))
    )


def start_job(folder: Path, prefix: str, *extra_arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(TOOL), "--input", "c.jsonl", "--tokenizer-path", "t.json", "--output-prefix", prefix]
    return subprocess.Popen([*command, *extra_arguments], cwd=folder, stderr=subprocess.PIPE, text=True)


def wait_for_job(job: subprocess.Popen[str]) -> str:
    stderr = job.communicate(timeout=400)[1]
    assert job.returncode == 0, stderr
    return stderr


def active_writers(parts_dir: Path) -> set[str]:
    """Return the processes that are at a unit now, one for each CPU of the cluster when all have begun."""
    return {path.name.rsplit("-", 2)[1] for path in parts_dir.glob("unit-*.bin.tmp-*")}


def output_hashes(folder: Path, prefix: str) -> list[str]:
    return [hashlib.sha256((folder / f"{prefix}{suffix}").read_bytes()).hexdigest() for suffix in SUFFIXES]


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_node_does_not_change_output_bytes(tmp_path: Path) -> None:
    """Two nodes on this machine; the second and all its processes end by SIGKILL while they encode."""
    write_inputs(tmp_path, 300)
    wait_for_job(start_job(tmp_path, "one", "--workers", "2"))
    nodes = subprocess.Popen(
        [sys.executable, str(CLUSTER_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert nodes.stdin and nodes.stdout

    def send_command(line: str) -> str:
        print(line, file=nodes.stdin, flush=True)
        return nodes.stdout.readline()  # type: ignore[union-attr]

    try:
        address = nodes.stdout.readline().strip()
        job = start_job(tmp_path, "two", "--cluster", address, "--unit-bytes", "2000000")
        while True:
            assert job.poll() is None, job.communicate()[1]
            stopped_pids = set(send_command("stop").split())  # so that the unit it is at cannot end before it is killed
            if any((tmp_path / "two.parts").glob("unit-*.json")) and stopped_pids & active_writers(
                tmp_path / "two.parts"
            ):
                break
            send_command("go")
            time.sleep(0.1)
        send_command("kill")
        assert job.poll() is None, "it must be killed in the middle"
        stderr = wait_for_job(job)
    finally:
        nodes.communicate("end\n", timeout=60)
    assert "encoding on 2 Ray machines with 2 CPUs" in stderr and "retrying the unit" in stderr, stderr
    assert output_hashes(tmp_path, "two") == output_hashes(tmp_path, "one")
    assert not (tmp_path / "two.parts").exists()


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_local_ray_cluster_runs_job_and_shuts_down(tmp_path: Path) -> None:
    write_inputs(tmp_path, 5)
    wait_for_job(start_job(tmp_path, "one", "--workers", "2"))
    stderr = wait_for_job(start_job(tmp_path, "two", "--cluster", "auto", "--workers", "2", "--unit-bytes", "20000"))
    assert "encoding on 1 Ray machine with 2 CPUs" in stderr
    assert output_hashes(tmp_path, "two") == output_hashes(tmp_path, "one")
