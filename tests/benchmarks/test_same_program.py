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


def made_run(folder: Path, losses: dict[int, tuple[float, float]], weight: float = 0.25) -> Path:
    """Write what a run leaves."""
    checkpoint = folder / "checkpoints" / f"step-{max(losses):08d}"
    checkpoint.mkdir(parents=True)
    save_file({"weight": np.array([1.0, weight]), "moment": np.zeros(2)}, checkpoint / "rank-00000.safetensors")
    rows = [{"kind": "train", "step": step, "loss": one, "grad_norm": norm} for step, (one, norm) in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"kind": "save"}, *rows]))
    return folder


def made_job(folder: Path, reasons: dict[str, str] | None = None, pairs: int = 15) -> Job:
    here, other = Checkout(folder / "here"), Checkout(folder / "other")
    args = argparse.Namespace(pairs=pairs, smoke=False, benchmarks=tuple(same_program.BENCHMARKS))
    return Job(here, other, folder, args, reasons or {})


def test_equal_runs_are_the_same(tmp_path: Path) -> None:
    here, other = made_run(tmp_path / "a", LOSSES), made_run(tmp_path / "b", LOSSES)
    assert same_program.same_runs(here, other, 0.0) == ([], "6 steps, last loss 6.2500, tensors up to 0.0e+00 apart")


@pytest.mark.parametrize(("within", "is_same"), [(0.0, False), (1e-12, True), (1e-16, False)])
def test_a_planted_loss_is_found_unless_it_is_within_what_is_allowed(
    tmp_path: Path, within: float, is_same: bool
) -> None:
    planted = LOSSES | {4: (np.nextafter(LOSSES[4][0], 8), 1.5)}
    here, other = made_run(tmp_path / "a", planted), made_run(tmp_path / "b", LOSSES)
    found, _ = same_program.same_runs(here, other, within)
    assert (found == []) is is_same
    assert is_same or "step" in found[0] and "most at 4" in found[0]


def test_the_last_bit_of_a_norm_may_differ_and_no_more(tmp_path: Path) -> None:
    other = made_run(tmp_path / "b", LOSSES)
    last_bit = LOSSES | {4: (LOSSES[4][0], float(np.nextafter(np.float32(1.5), np.float32(2))))}
    assert same_program.same_runs(made_run(tmp_path / "a", last_bit), other, 0.0)[0] == []
    more = LOSSES | {4: (LOSSES[4][0], 1.501)}
    assert "grad_norm of step" in same_program.same_runs(made_run(tmp_path / "c", more), other, 0.0)[0][0]


def test_a_planted_weight_is_found_by_its_name(tmp_path: Path) -> None:
    here = made_run(tmp_path / "a", LOSSES, weight=np.nextafter(0.25, 1))
    found, _ = same_program.same_runs(here, made_run(tmp_path / "b", LOSSES), 0.0)
    assert len(found) == 1 and "most at rank-00000.safetensors weight" in found[0]


def test_a_resumed_run_is_compared_from_its_first_step_on(tmp_path: Path) -> None:
    other = made_run(tmp_path / "b", LOSSES)
    resumed = {step: loss for step, loss in LOSSES.items() if step > 3}
    assert same_program.same_resumed(made_run(tmp_path / "a", resumed), other) == (
        [],
        "3 steps, last loss 6.2500, tensors up to 0.0e+00 apart",
    )
    resumed[5] = (resumed[4][0], 1.5)
    assert same_program.same_resumed(made_run(tmp_path / "c", resumed), other)[0] != []
    from_the_start, _ = same_program.same_resumed(made_run(tmp_path / "d", LOSSES), other)
    assert from_the_start == ["the resumed run must start at step 4, got 1"]


def test_a_run_that_ends_early_is_not_the_same(tmp_path: Path) -> None:
    short = {step: loss for step, loss in LOSSES.items() if step < 6}
    runs = [made_run(tmp_path / name, short) for name in "ab"]
    assert "must reach step 6" in same_program.same_runs(*runs, 0.0)[0][0]
    found, _ = same_program.same_runs(runs[0], made_run(tmp_path / "c", LOSSES), 0.0)
    assert any("lost 6" in each for each in found)


def test_numbers_of_another_kind_none_at_all_and_not_a_number_are_found() -> None:
    one = {"w": np.zeros(2)}
    assert compare.differing_numbers("tensor", one, {"w": np.zeros(2, np.float32)}, 1.0) != []
    assert compare.differing_numbers("tensor", one, {"w": np.zeros(3)}, 1.0) != []
    assert compare.differing_numbers("tensor", one, {"w": np.array([0, np.nan])}, 1.0) != []
    assert compare.differing_numbers("tensor", {}, {}) != []
    assert compare.differing_numbers("tensor", {"w": np.array([np.nan])}, {"w": np.array([np.nan])}) == []


def test_the_newest_checkpoint_of_either_format_is_taken(tmp_path: Path) -> None:
    for name in ("checkpoints/step-00000003", "checkpoints/step-00000012"):
        (tmp_path / "native" / name).mkdir(parents=True)
    (tmp_path / "deepspeed" / "global_step3").mkdir(parents=True)
    assert same_program.checkpoint_of(tmp_path / "native").name == "step-00000012"
    assert same_program.checkpoint_of(tmp_path / "native", 3).name == "step-00000003"
    assert same_program.checkpoint_of(tmp_path / "deepspeed", 3).name == "global_step3"


def test_a_planted_word_is_listed_and_the_wrong_error_is_no_comparison(tmp_path: Path) -> None:
    job = made_job(tmp_path)
    texts = {job.here: "usage: x\n  --load  told\nexit code 2\n", job.other: "usage: x\n  --load  said\nexit code 2\n"}
    found, _ = same_program.same_text(job, texts.__getitem__, "exit code [1-9]")
    assert found[1:] == ["    -  --load  said", "    +  --load  told"]
    texts[job.here] = texts[job.other]
    assert same_program.same_text(job, texts.__getitem__, "exit code [1-9]")[0] == []
    assert same_program.same_text(job, texts.__getitem__, "exit code 0")[0] != []
    assert compare.differing_texts("x", "a\n", "a") != []


def test_a_file_with_another_byte_and_a_key_that_is_lost_are_found(tmp_path: Path) -> None:
    sums = []
    for name, content in (("a.bin", b"1"), ("a.bin", b"2"), ("b.bin", b"2")):
        (tmp_path / name).write_bytes(content)
        sums.append(same_program.checksums(tmp_path.glob(name)))
    assert compare.differing_names("files", sums[0], sums[0]) == []
    assert len(compare.differing_names("files", sums[0], sums[1])) == 2, "other bytes"
    assert "lost ('b.bin'" in compare.differing_names("files", sums[1], sums[2])[0]
    assert compare.differing_names("files", set(), set()) == ["files: nothing to compare"]
    (tmp_path / "m.jsonl").write_text('{"kind": "train", "a": [{"b": 1}]}\n\n{"kind": "save", "c": 2}\n')
    keys = same_program.keys_in(tmp_path / "m.jsonl")
    assert {"train/a", "train/a[]/b", "save/c"} < keys
    assert compare.differing_names("m.jsonl", keys - {"save/c"}, keys) == ["m.jsonl: lost save/c"]


def test_a_lost_test_is_found_and_a_moved_one_is_not_lost() -> None:
    other = compare.collected_tests("tests/a/test_x.py::test_one[1/2]\ntests/a/test_x.py::test_two\n\n2 tests\n")
    moved = compare.collected_tests("tests/b/c/test_x.py::test_one[1/2]\ntests/b/c/test_x.py::test_two\n")
    assert compare.lost_tests(moved, other, {})[0] == []
    here = Counter({"test_x.py::test_two": 1, "test_y.py::test_one[1/2]": 1})
    found, told = compare.lost_tests(here, other, {})
    assert found == ["lost test_x.py::test_one[1/2] (new in test_y.py)"] and "new test_y.py" in told
    found, told = compare.lost_tests(here, other, {"test_x.py::test_one*": "is in y"})
    assert found == [] and "gone test_x.py::test_one[1/2] -- is in y" in told
    assert compare.lost_tests(here, Counter(), {})[0] != []


def test_one_of_two_tests_of_a_name_that_is_lost_is_found() -> None:
    twice = compare.collected_tests("tests/a/test_x.py::test_one\ntests/b/test_x.py::test_one\n")
    assert compare.lost_tests(Counter({"test_x.py::test_one": 1}), twice, {})[0] == ["lost test_x.py::test_one"]


def test_a_reason_is_read_and_one_without_words_refused() -> None:
    assert compare.read_reasons("# why\n\nwords: docs/flags.md -- a word\n") == {"words: docs/flags.md": "a word"}
    with pytest.raises(ValueError, match="NAME -- reason"):
        compare.read_reasons("words: docs/flags.md\n")


def test_the_interval_holds_the_median_and_narrows_with_pairs() -> None:
    few = [0.9, 1.0, 1.1] * 5
    middle, low, high = compare.median_interval(few)
    assert middle == 1.0 and 0.9 <= low <= middle <= high <= 1.1
    assert compare.median_interval([1.0] * 15) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(("slower", "is_same"), [(1.0, True), (1.03, False)])
def test_a_slower_checkout_is_found_in_interleaved_pairs(tmp_path: Path, slower: float, is_same: bool) -> None:
    job, order = made_job(tmp_path), []

    def take_pair(turns: Sequence[Checkout]) -> dict[Checkout, dict[str, list[float]]]:
        order.extend(turns)
        noise = 1 + len(order) % 5 / 1000
        return {where: {"step": [noise * (slower if where is job.here else 1.0)] * 3} for where in turns}

    found, summary = same_program.same_speed(job, take_pair)
    assert (found == []) is is_same, summary
    assert len(order) == 30 and order[:4] == [job.other, job.here, job.here, job.other]


def test_what_both_time_is_compared_turn_by_turn(tmp_path: Path) -> None:
    job = made_job(tmp_path, pairs=3)
    took = {
        job.here: {"1f1b": [1.2, 9.0, 2.2], "gone": [9.0]},
        job.other: {"1f1b": [1.0, 9.0, 2.0], "new": [1.0]},
    }
    found, summary = same_program.same_speed(job, lambda turns: took)
    assert summary.startswith("1f1b: 1.100 times") and "3 pairs" in summary and len(found) == 1
    del took[job.here]["1f1b"]
    assert "3 pairs must be comparable" in same_program.same_speed(job, lambda turns: took)[0][0]


WORKER = """
import json, sys
print("ready", flush=True)
for number, _ in enumerate(sys.stdin, 1):
    open("turns.txt", "a").write(f"{sys.argv[1:]} {number}\\n")
    print(json.dumps({"step": number}), flush=True)
"""


def test_processes_of_both_live_side_by_side_and_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = made_job(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/same_program_turns.py").write_text(WORKER)
    for where in (job.here, job.other):
        where.root.mkdir()
    monkeypatch.setattr(same_program, "ROOT", tmp_path)
    took = same_program.in_turns(job, "step_time gpt2", [job.other, job.here])
    steps = [float(number) for number in range(1, same_program.TURNS + 1)]
    assert took == {job.here: {"step": steps}, job.other: {"step": steps}}
    lines = (job.here.root / "turns.txt").read_text().splitlines()
    assert lines == [f"['step_time', 'gpt2'] {number}" for number in range(1, same_program.TURNS + 1)]
    (tmp_path / "benchmarks/same_program_turns.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="step_time gpt2 ended with code 3"):
        same_program.in_turns(job, "step_time gpt2", [job.here, job.other])


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", ["step_time gpt2", "pipeline gpt2"])
def test_this_checkout_takes_turns(benchmark: str, tmp_path: Path) -> None:
    with Checkout(ROOT).worker(benchmark.split()) as worker:
        assert same_program.answer_of(worker) == "ready\n"
        worker.stdin.write("\n")
        worker.stdin.flush()
        seconds = json.loads(same_program.answer_of(worker))
    assert seconds.keys() == ({"step"} if "step" in benchmark else {"1f1b", "zb-h1"}) and min(seconds.values()) > 0


def test_a_slow_help_and_too_few_pairs_are_found() -> None:
    ratios = {"--help": [1.0] * 15}
    assert same_program.judge_speed(ratios, {"--help": [0.3] * 15}, 15)[0] == []
    assert same_program.judge_speed(ratios, {"--help": [0.4] * 15}, 15)[0] == ["--help takes 0.40 s, allowed 0.35"]
    assert same_program.judge_speed(ratios, {"--help": [0.3] * 15}, 16)[0] != []
    assert same_program.judge_speed({}, {}, 15)[0] != []


def test_one_failure_does_not_end_the_others_and_a_reason_lets_words_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = made_job(tmp_path, {"words: c": "the field's word", "losses: a": "none may be given", "files: *": "a key"})
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


def test_the_whole_help_is_compared_where_it_is_named_and_the_programs_own_elsewhere(tmp_path: Path) -> None:
    own = "import sys; print('  -h, --help  this\\n  --a', *sys.argv[1:])"
    (tmp_path / "own.py").write_text(own)
    (tmp_path / "both.py").write_text(own.replace("'  -h", "'  --help-all  more\\n  -h"))
    checkout = Checkout(tmp_path)
    assert same_program.help_of(checkout, "own.py").splitlines() == ["  --a --help", "", "exit code 0"]
    assert same_program.help_of(checkout, "both.py").splitlines() == ["  --a --help-all", "", "exit code 0"]


def test_a_program_that_ends_otherwise_than_it_must_is_named(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    with pytest.raises(RuntimeError, match="code 3"):
        checkout.run(["-c", "raise SystemExit(3)"])
    text = checkout.run(["-c", "import os; print(os.environ['PYTHONPATH'])"], code=None)
    assert text.splitlines() == ["<checkout>", "", "exit code 0"]


def test_the_cases_are_of_all_families_and_as_many_as_promised() -> None:
    assert len(LAYOUTS) == 20 and {family for family, _, _ in LAYOUTS} == set(SCRIPTS)
    assert len(BAD_INPUTS) == 10 and all((ROOT / program).exists() for program, _ in BAD_INPUTS)
    assert {"bash run_gpt2.sh", "tools/plan.py", "tools/generate.py"} < set(same_program.programs_of(ROOT))
    assert len(same_program.fixtures(ROOT)) >= 4


def test_help_shows_examples_and_nothing_of_the_program_is_imported() -> None:
    program = (
        "import runpy, sys; sys.argv = ['same_program.py', '--help']\n"
        "try: runpy.run_path('benchmarks/same_program.py', run_name='__main__')\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'megatron', 'tds'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert "python benchmarks/same_program.py ../before --only losses resume" in done.stdout


def test_what_is_no_checkout_is_refused_with_code_2(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        same_program.parse_args([str(tmp_path)])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("words", "message"), [("pipeline t5", "pipeline supports only gpt2"), ("step_time bert", "invalid choice")]
)
def test_what_takes_no_turns_is_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        same_program_turns.main(words.split())
    assert message in capsys.readouterr().err
