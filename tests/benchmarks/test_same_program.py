"""Two checkouts compared: what differs is found, what is allowed is not, and one failure does not end the others."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks import same_program, same_program_turns
from benchmarks import same_program_compare as compare
from benchmarks.same_program import BAD_INPUTS, LAYOUTS, Checkout, Job
from benchmarks.scripts import SCRIPTS

ROOT = Path(__file__).resolve().parents[2]
LOSSES = {step: (7.0 - step / 8, 1.5) for step in range(1, 7)}


def make_run(folder: Path, losses: dict[int, tuple[float, float]], weight: float = 0.25) -> Path:
    """Write what a run leaves."""
    checkpoint = folder / "checkpoints" / f"step-{max(losses):08d}"
    checkpoint.mkdir(parents=True)
    save_file({"weight": np.array([1.0, weight]), "moment": np.zeros(2)}, checkpoint / "rank-00000.safetensors")
    rows = [{"kind": "train", "step": step, "loss": loss, "grad_norm": norm} for step, (loss, norm) in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"kind": "save"}, *rows]))
    return folder


def make_job(folder: Path, reasons: dict[str, str] | None = None, pairs: int = 15) -> Job:
    checkout, other = Checkout(folder / "here"), Checkout(folder / "other")
    args = argparse.Namespace(pairs=pairs, smoke=False, benchmarks=tuple(same_program.BENCHMARKS))
    return Job(checkout, other, folder, args, reasons or {})


def test_equal_runs_match(tmp_path: Path) -> None:
    current, other = make_run(tmp_path / "a", LOSSES), make_run(tmp_path / "b", LOSSES)
    assert same_program.same_runs(current, other, 0.0) == ([], "6 steps, last loss 6.2500, tensors up to 0.0e+00 apart")


@pytest.mark.parametrize(("tolerance", "is_same"), [(0.0, False), (1e-12, True), (1e-16, False)])
def test_changed_loss_is_detected_beyond_tolerance(tmp_path: Path, tolerance: float, is_same: bool) -> None:
    changed = LOSSES | {4: (np.nextafter(LOSSES[4][0], 8), 1.5)}
    current, other = make_run(tmp_path / "a", changed), make_run(tmp_path / "b", LOSSES)
    differences, _ = same_program.same_runs(current, other, tolerance)
    assert (differences == []) is is_same
    assert is_same or "step" in differences[0] and "most at 4" in differences[0]


def test_norm_may_differ_only_in_last_bit(tmp_path: Path) -> None:
    other = make_run(tmp_path / "b", LOSSES)
    last_bit = LOSSES | {4: (LOSSES[4][0], float(np.nextafter(np.float32(1.5), np.float32(2))))}
    assert same_program.same_runs(make_run(tmp_path / "a", last_bit), other, 0.0)[0] == []
    larger = LOSSES | {4: (LOSSES[4][0], 1.501)}
    assert "grad_norm of step" in same_program.same_runs(make_run(tmp_path / "c", larger), other, 0.0)[0][0]


def test_changed_weight_is_reported_by_name(tmp_path: Path) -> None:
    current = make_run(tmp_path / "a", LOSSES, weight=np.nextafter(0.25, 1))
    differences, _ = same_program.same_runs(current, make_run(tmp_path / "b", LOSSES), 0.0)
    assert len(differences) == 1 and "most at rank-00000.safetensors weight" in differences[0]


def test_resumed_run_is_compared_from_its_first_step(tmp_path: Path) -> None:
    other = make_run(tmp_path / "b", LOSSES)
    resumed = {step: loss for step, loss in LOSSES.items() if step > 3}
    assert same_program.same_resumed(make_run(tmp_path / "a", resumed), other) == (
        [],
        "3 steps, last loss 6.2500, tensors up to 0.0e+00 apart",
    )
    resumed[5] = (resumed[4][0], 1.5)
    assert same_program.same_resumed(make_run(tmp_path / "c", resumed), other)[0] != []
    from_the_start, _ = same_program.same_resumed(make_run(tmp_path / "d", LOSSES), other)
    assert from_the_start == ["the resumed run must start at step 4, got 1"]


def test_shorter_run_does_not_match(tmp_path: Path) -> None:
    short = {step: loss for step, loss in LOSSES.items() if step < 6}
    runs = [make_run(tmp_path / name, short) for name in "ab"]
    assert "must reach step 6" in same_program.same_runs(*runs, 0.0)[0][0]
    differences, _ = same_program.same_runs(runs[0], make_run(tmp_path / "c", LOSSES), 0.0)
    assert any("lost 6" in difference for difference in differences)


def test_dtype_shape_nan_and_missing_values_are_detected() -> None:
    reference = {"w": np.zeros(2)}
    assert compare.differing_numbers("tensor", reference, {"w": np.zeros(2, np.float32)}, 1.0) != []
    assert compare.differing_numbers("tensor", reference, {"w": np.zeros(3)}, 1.0) != []
    assert compare.differing_numbers("tensor", reference, {"w": np.array([0, np.nan])}, 1.0) != []
    assert compare.differing_numbers("tensor", {}, {}) != []
    assert compare.differing_numbers("tensor", {"w": np.array([np.nan])}, {"w": np.array([np.nan])}) == []


def test_newest_checkpoint_of_each_format_is_selected(tmp_path: Path) -> None:
    for name in ("checkpoints/step-00000003", "checkpoints/step-00000012"):
        (tmp_path / "native" / name).mkdir(parents=True)
    (tmp_path / "deepspeed" / "global_step3").mkdir(parents=True)
    assert same_program.checkpoint_of(tmp_path / "native").name == "step-00000012"
    assert same_program.checkpoint_of(tmp_path / "native", 3).name == "step-00000003"
    assert same_program.checkpoint_of(tmp_path / "deepspeed", 3).name == "global_step3"


def test_changed_text_is_listed_and_exit_code_is_checked(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    texts = {
        job.current: "usage: x\n  --load  told\nexit code 2\n",
        job.other: "usage: x\n  --load  said\nexit code 2\n",
    }
    differences, _ = same_program.same_text(job, texts.__getitem__, "exit code [1-9]")
    assert differences[1:] == ["    -  --load  said", "    +  --load  told"]
    texts[job.current] = texts[job.other]
    assert same_program.same_text(job, texts.__getitem__, "exit code [1-9]")[0] == []
    assert same_program.same_text(job, texts.__getitem__, "exit code 0")[0] != []
    assert compare.differing_texts("x", "a\n", "a") != []


def test_changed_files_and_lost_keys_are_detected(tmp_path: Path) -> None:
    checksums = []
    for name, content in (("a.bin", b"1"), ("a.bin", b"2"), ("b.bin", b"2")):
        (tmp_path / name).write_bytes(content)
        checksums.append(same_program.checksums(tmp_path.glob(name)))
    assert compare.differing_names("files", checksums[0], checksums[0]) == []
    assert len(compare.differing_names("files", checksums[0], checksums[1])) == 2, "other bytes"
    assert "lost ('b.bin'" in compare.differing_names("files", checksums[1], checksums[2])[0]
    assert compare.differing_names("files", set(), set()) == ["files: nothing to compare"]
    (tmp_path / "m.jsonl").write_text('{"kind": "train", "a": [{"b": 1}]}\n\n{"kind": "save", "c": 2}\n')
    keys = same_program.keys_in(tmp_path / "m.jsonl")
    assert {"train/a", "train/a[]/b", "save/c"} < keys
    assert compare.differing_names("m.jsonl", keys - {"save/c"}, keys) == ["m.jsonl: lost save/c"]


def test_lost_tests_are_detected_and_moved_tests_are_not_lost() -> None:
    other = compare.collected_tests("tests/a/test_x.py::test_one[1/2]\ntests/a/test_x.py::test_two\n\n2 tests\n")
    moved = compare.collected_tests("tests/b/c/test_x.py::test_one[1/2]\ntests/b/c/test_x.py::test_two\n")
    assert compare.lost_tests(moved, other, {})[0] == []
    current = Counter({"test_x.py::test_two": 1, "test_y.py::test_one[1/2]": 1})
    differences, summary = compare.lost_tests(current, other, {})
    assert differences == ["lost test_x.py::test_one[1/2] (new in test_y.py)"] and "new test_y.py" in summary
    differences, summary = compare.lost_tests(current, other, {"test_x.py::test_one*": "is in y"})
    assert differences == [] and "removed test_x.py::test_one[1/2] -- is in y" in summary
    assert compare.lost_tests(current, Counter(), {})[0] != []


def test_lost_test_with_duplicate_name_is_detected() -> None:
    twice = compare.collected_tests("tests/a/test_x.py::test_one\ntests/b/test_x.py::test_one\n")
    assert compare.lost_tests(Counter({"test_x.py::test_one": 1}), twice, {})[0] == ["lost test_x.py::test_one"]


def test_reasons_are_read_and_empty_reason_is_rejected() -> None:
    assert compare.read_reasons("# why\n\nwords: docs/flags.md -- a word\n") == {"words: docs/flags.md": "a word"}
    with pytest.raises(ValueError, match="NAME -- reason"):
        compare.read_reasons("words: docs/flags.md\n")


def test_median_interval_contains_median() -> None:
    values = [0.9, 1.0, 1.1] * 5
    median, low, high = compare.median_interval(values)
    assert median == 1.0 and 0.9 <= low <= median <= high <= 1.1
    assert compare.median_interval([1.0] * 15) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(("slowdown", "is_same"), [(1.0, True), (1.03, False)])
def test_slower_checkout_is_detected_in_interleaved_pairs(tmp_path: Path, slowdown: float, is_same: bool) -> None:
    job, order = make_job(tmp_path), []

    def time_pair(turns: Sequence[Checkout]) -> dict[Checkout, dict[str, list[float]]]:
        order.extend(turns)
        noise = 1 + len(order) % 5 / 1000
        return {checkout: {"step": [noise * (slowdown if checkout is job.current else 1.0)] * 3} for checkout in turns}

    differences, summary = same_program.same_speed(job, time_pair)
    assert (differences == []) is is_same, summary
    assert len(order) == 30 and order[:4] == [job.other, job.current, job.current, job.other]


def test_only_common_timings_are_compared(tmp_path: Path) -> None:
    job = make_job(tmp_path, pairs=3)
    timings = {
        job.current: {"1f1b": [1.2, 9.0, 2.2], "gone": [9.0]},
        job.other: {"1f1b": [1.0, 9.0, 2.0], "new": [1.0]},
    }
    differences, summary = same_program.same_speed(job, lambda turns: timings)
    assert summary.startswith("1f1b: 1.100 times") and "3 pairs" in summary and len(differences) == 1
    del timings[job.current]["1f1b"]
    assert "3 pairs must be comparable" in same_program.same_speed(job, lambda turns: timings)[0][0]


WORKER = """
import json, sys
print("ready", flush=True)
for number, _ in enumerate(sys.stdin, 1):
    open("turns.txt", "a").write(f"{sys.argv[1:]} {number}\\n")
    print(json.dumps({"step": number}), flush=True)
"""


def test_processes_of_both_checkouts_alternate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/same_program_turns.py").write_text(WORKER)
    for checkout in (job.current, job.other):
        checkout.root.mkdir()
    monkeypatch.setattr(same_program, "ROOT", tmp_path)
    timings = same_program.in_turns(job, "step_time gpt2", [job.other, job.current])
    steps = [float(turn) for turn in range(1, same_program.NUM_TURNS + 1)]
    assert timings == {job.current: {"step": steps}, job.other: {"step": steps}}
    lines = (job.current.root / "turns.txt").read_text().splitlines()
    assert lines == [f"['step_time', 'gpt2'] {turn}" for turn in range(1, same_program.NUM_TURNS + 1)]
    (tmp_path / "benchmarks/same_program_turns.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="step_time gpt2 ended with code 3"):
        same_program.in_turns(job, "step_time gpt2", [job.current, job.other])


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", ["step_time gpt2", "pipeline gpt2"])
def test_worker_of_this_checkout_answers(benchmark: str, tmp_path: Path) -> None:
    with Checkout(ROOT).worker(benchmark.split()) as worker:
        assert same_program.read_answer(worker) == "ready\n"
        worker.stdin.write("\n")
        worker.stdin.flush()
        seconds = json.loads(same_program.read_answer(worker))
    assert seconds.keys() == ({"step"} if "step" in benchmark else {"1f1b", "zb-h1"}) and min(seconds.values()) > 0


def test_slow_help_and_too_few_pairs_are_detected() -> None:
    ratios = {"--help": [1.0] * 15}
    assert same_program.judge_speed(ratios, {"--help": [0.3] * 15}, 15)[0] == []
    assert same_program.judge_speed(ratios, {"--help": [0.4] * 15}, 15)[0] == ["--help takes 0.40 s, allowed 0.35"]
    assert same_program.judge_speed(ratios, {"--help": [0.3] * 15}, 16)[0] != []
    assert same_program.judge_speed({}, {}, 15)[0] != []


def test_failed_comparison_continues_and_reason_allows_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(tmp_path, {"words: c": "the field's word", "losses: a": "none may be given", "files: *": "a key"})
    with job.comparison("losses: a") as results:
        results.append((["-old"], "told"))
        raise RuntimeError("ended with code 3")
    with job.comparison("losses: b") as results:
        results += [([], "6 steps"), ([], "")]
    for line in ("words: c", "words: d", "files: e"):
        with job.comparison(line) as results:
            results.append((["-old"], ""))
    assert job.failed == ["losses: a", "words: d"]
    printed = capsys.readouterr().out
    assert "DIFFERS losses: a" in printed and "    -old\n    could not be compared: RuntimeError: ended" in printed
    assert "same    losses: b (0 s) 6 steps\n" in printed and "reason  words: c (0 s) the field's word" in printed


def test_help_all_is_compared_if_available(tmp_path: Path) -> None:
    program = "import sys; print('  -h, --help  this\\n  --a', *sys.argv[1:])"
    (tmp_path / "own.py").write_text(program)
    (tmp_path / "both.py").write_text(program.replace("'  -h", "'  --help-all  more\\n  -h"))
    checkout = Checkout(tmp_path)
    assert same_program.help_of(checkout, "own.py").splitlines() == ["  --a --help", "", "exit code 0"]
    assert same_program.help_of(checkout, "both.py").splitlines() == ["  --a --help-all", "", "exit code 0"]


def test_unexpected_exit_code_raises(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    with pytest.raises(RuntimeError, match="code 3"):
        checkout.run(["-c", "raise SystemExit(3)"])
    text = checkout.run(["-c", "import os; print(os.environ['PYTHONPATH'])"], code=None)
    assert text.splitlines() == ["<checkout>", "", "exit code 0"]


def test_cases_cover_all_families() -> None:
    assert len(LAYOUTS) == 20 and {family for family, _, _ in LAYOUTS} == set(SCRIPTS)
    assert len(BAD_INPUTS) == 10 and all((ROOT / program).exists() for program, _ in BAD_INPUTS)
    assert {"bash run_gpt2.sh", "tools/plan.py", "tools/generate.py"} < set(same_program.programs_of(ROOT))
    assert len(same_program.fixtures(ROOT)) >= 4


def test_help_shows_examples_and_imports_no_torch() -> None:
    program = (
        "import runpy, sys; sys.argv = ['same_program.py', '--help']\n"
        "try: runpy.run_path('benchmarks/same_program.py', run_name='__main__')\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'megatron', 'tds'}))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout.splitlines()[-1] == "[]", result.stderr
    assert "python benchmarks/same_program.py ../before --only losses resume" in result.stdout


def test_folder_without_checkout_exits_with_code_2(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        same_program.parse_args([str(tmp_path)])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("command_line", "message"), [("pipeline t5", "pipeline supports only gpt2"), ("step_time bert", "invalid choice")]
)
def test_unsupported_benchmark_is_rejected(command_line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        same_program_turns.main(command_line.split())
    assert message in capsys.readouterr().err
