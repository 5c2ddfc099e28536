"""Show that this checkout is the same program as another one: losses, checkpoints, files, words, tests and speed.

    git worktree add ../before before-house
    python benchmarks/same_program.py ../before
    python benchmarks/same_program.py ../before --only losses resume
    python benchmarks/same_program.py ../before --only words tests --reasons changed.txt
    python benchmarks/same_program.py ../before --only speed --benchmarks step_time --pairs 30

| part | what must be the same |
|---|---|
| losses | GPT-2, T5, BERT at tensor 2 x pipe 2, dropout on: losses, checkpoints (bits; clipped 1e-12 and 1e-6) |
| resume | the other's checkpoints, native and DeepSpeed's, go on here as there, to the bit; older fixtures |
| files | .bin and .idx byte for byte; keys of metrics.jsonl, stages.json, dump.json, plan.json, machine.json |
| words | docs/flags.md, --help, --dry-run of 20 layouts, messages and exit codes of ten bad inputs: byte for byte |
| tests | no test is lost: pytest's names without folders, with and without --all |
| speed | step_time, pipeline, start_up in interleaved pairs: 95 % of the median ratio below 1.02; --help in 0.35 s |

Both checkouts run as subprocesses of this Python with PYTHONPATH of their own. Each comparison prints a line, same or
DIFFERS; after a failure the next one goes on. --reasons names a file of lines ``NAME -- reason``: a lost test
(``test_x.py::test_y``), or a line of words or speed (``words: docs/flags.md``), that may differ; NAME* is a beginning.
Ends with code 1 if anything differs. All parts but speed take about 15 minutes on 2 cores, speed about 40; speed wants
a machine that does nothing else, and leaves sample data in both checkouts (data/sample, which git ignores).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.same_program_parts import compare  # noqa: E402
from benchmarks.same_program_parts.cases import BAD_INPUTS, CLIPS, GRID, LAYOUTS, NORM_WITHIN, PROGRAMS, SIZES, STOP  # noqa: E402
from benchmarks.same_program_parts.checkout import Check, Checkout, Found, Job, tokenize  # noqa: E402
from benchmarks.same_program_parts.speed import BENCHMARKS, speed  # noqa: E402


def losses(job: Job) -> Iterator[Check]:
    """Train each family here and there."""
    for family in ("gpt2", "t5", "bert"):
        for flags, within in CLIPS.items():
            yield f"{family} {flags}", partial(same_training, job, family, flags, within)


def same_training(job: Job, family: str, flags: str, within: float) -> Found:
    name = f"{family}-{flags.replace(' ', '')}"
    runs = [each.train(family, job.folder / f"{name}-{at}", job.data(), f"{GRID} {flags}") for at, each in job.both()]
    return same_runs(runs[1], runs[0], within, 6)


def same_runs(here: Path, other: Path, within: float, steps: int) -> Found:
    """Compare losses, gradient norms and the last checkpoint of two runs; the shorter one says from which step."""
    found: list[str] = []
    for key, allowed in (("loss", within), ("grad_norm", NORM_WITHIN)):
        told = [read_metric(run, key) for run in (here, other)]
        first = max(min(each) for each in told)
        one, two = ({step: value for step, value in each.items() if step >= first} for each in told)
        found += compare.differing_numbers(f"{key} of step", one, two, allowed)
    tensors = read_checkpoint(here), read_checkpoint(other)
    found += compare.differing_numbers("tensor", *tensors, within)
    if max(told[1]) != steps:
        found.append(f"the run of {other} must reach step {steps}, got {max(told[1])}")
    apart = f"tensors up to {compare.furthest(*tensors)[0]:.1e} apart"
    return found, f"{len(two)} steps, last loss {read_metric(here, 'loss')[max(one)]:.4f}, {apart}"


def read_metric(run: Path, key: str) -> dict[int, float]:
    """Return a metric of training by step."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["step"]: row[key] for row in rows if row["kind"] == "train"}


def checkpoint_of(run: Path, step: int | None = None) -> Path:
    """Return the folder of a step's checkpoint, or of the newest, in either format."""
    names = re.compile(r"(?:step-|global_step)0*(\d+)$")
    found = {int(match[1]): path for path in run.rglob("*") if path.is_dir() and (match := names.match(path.name))}
    return found[max(found) if step is None else step]


def read_checkpoint(run: Path) -> dict[str, Any]:
    """Return every tensor of the newest checkpoint by its file and name: weights, optimizer state, random states."""
    import torch
    from safetensors.numpy import load_file

    found: dict[str, Any] = {}
    for path in sorted(checkpoint_of(run).iterdir()):
        if path.suffix == ".safetensors":
            found |= {f"{path.name} {name}": array for name, array in load_file(path).items()}
        elif path.suffix == ".pt":
            state = torch.load(path, map_location="cpu", weights_only=True)
            found |= {f"{path.name} {place}": tensor.numpy(force=True) for place, tensor in tensors_in(state)}
    return found


def tensors_in(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every tensor in nested containers with its place."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from tensors_in(inner, f"{place}/{key}")
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from tensors_in(inner, f"{place}/{number}")
    elif hasattr(value, "numpy"):
        yield place, value


def resume(job: Job) -> Iterator[Check]:
    """Go on here from checkpoints that the other checkout wrote."""
    for form in ("native", "deepspeed"):
        for family in ("gpt2", "t5", "bert"):
            yield f"{family}, checkpoint format {form}", partial(same_after_resume, job, family, form)
    yield "fixtures of older commits, byte for byte", partial(same_fixtures, job)
    yield "fixtures of older commits, their tests", partial(fixtures_pass, job)


def same_after_resume(job: Job, family: str, form: str) -> Found:
    flags = f"{GRID} --fp32 --clip-grad 0 --checkpoint-format {form}"
    run = job.folder / f"resume-{family}-{form}"
    whole = job.other.train(family, run / "other", job.data(), f"{flags} --save-interval {STOP}")
    flags += f" --load {checkpoint_of(whole, STOP)}"
    return same_resumed(job.here.train(family, run / "here", job.data(), flags), whole)


def same_resumed(here: Path, whole: Path) -> Found:
    """Compare a run that went on from step STOP with one that never stopped."""
    found, told = same_runs(here, whole, 0.0, 6)
    if (first := min(read_metric(here, "loss"))) != STOP + 1:
        found.append(f"the resumed run must begin with step {STOP + 1}, began with {first}")
    return found, told


def same_fixtures(job: Job) -> Found:
    here, other = (fixtures(where.root) for where in (job.here, job.other))
    return compare.differing_names("files under format_1", here, other), f"{len(other)} files"


def fixtures(root: Path) -> set[tuple[str, str]]:
    """Return name and checksum of each committed checkpoint file of an older format."""
    files = [path for folder in (root / "tests").rglob("format_1") for path in folder.rglob("*") if path.is_file()]
    return {(path.name, hashlib.sha256(path.read_bytes()).hexdigest()[:12]) for path in files}


def fixtures_pass(job: Job) -> Found:
    names = ("test_format_1.py", "test_formats.py")
    files = [str(path) for name in names for path in sorted((job.here.root / "tests").rglob(name))]
    if len(files) != len(names):
        return [f"tests must have one {' and one '.join(names)}, found {files}"], ""
    return [], job.here.run(["-m", "pytest", "-p", "no:cacheprovider", *files]).splitlines()[-1]


def files(job: Job) -> Iterator[Check]:
    """Compare what the programs leave on disk."""
    yield "token files, byte for byte", partial(same_token_files, job)
    yield "keys of metrics.jsonl, stages.json, dump.json", partial(same_run_files, job)
    yield "keys of plan.json of an unfinished job", partial(same_plan, job)
    yield "keys of machine.json", partial(same_machine, job)


def same_token_files(job: Job) -> Found:
    texts, tokenizer = job.other.root / "examples/corpus", job.other.root / "tests/golden/tokenizer.json"
    for at, where in job.both():
        (job.folder / at).mkdir(exist_ok=True)
        tokenize(where, sorted(texts.glob("*/*.txt")), tokenizer, job.folder / at / "corpus")
    found = [{p.name: p.read_bytes() for p in (job.folder / at).glob("corpus.*")} for at in ("here", "other")]
    return compare.differing_bytes(*found), ", ".join(found[1])


def same_run_files(job: Job) -> Found:
    keys: dict[str, dict[str, set[str]]] = {}
    for at, where in job.both():
        run, dump = job.folder / f"files-{at}", job.folder / f"dump-{at}"
        where.train("gpt2", run, job.data(), f"{GRID} --save-interval 3 --eval-iters 1 --debug-dump {dump}")
        for path in (run / "metrics.jsonl", run / "stages.json", dump / "dump.json", dump / "rank-00000.jsonl"):
            keys.setdefault(path.name, {})[at] = keys_in(path)
    found = [compare.differing_names(name, each["here"], each["other"]) for name, each in keys.items()]
    return sum(found, []), ", ".join(f"{name} {len(each['other'])}" for name, each in keys.items())


def keys_in(path: Path) -> set[str]:
    """Return the keys of a JSON file, or of each kind of line of a JSONL file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return set(compare.keys_of(json.loads(text)))
    rows = [json.loads(line) for line in text.splitlines() if line]
    return {key for row in rows for key in compare.keys_of(row, row.get("kind", ""))}


def same_plan(job: Job) -> Found:
    text = job.folder / "bad.jsonl"
    text.write_text('{"text": "a"}\nno JSON\n', encoding="utf-8")
    for at, where in job.both():
        tokenize(where, [text], job.other.root / "tests/golden/tokenizer.json", job.folder / f"plan-{at}", code=2)
    here, other = (keys_in(job.folder / f"plan-{at}.parts/plan.json") for at in ("here", "other"))
    return compare.differing_names("plan.json", here, other), f"{len(other)} keys"


def same_machine(job: Job) -> Found:
    for at, where in job.both():
        where.run(f"tools/plan.py --calibrate {job.folder}/machine-{at}.json --ranks 1")
    here, other = (keys_in(job.folder / f"machine-{at}.json") for at in ("here", "other"))
    plan = (
        f"tools/plan.py --model gpt2 --num-layers 4 --hidden-size 64 --gpus 4 --machine {job.folder}/machine-other.json"
    )
    texts = [where.run(plan) for where in (job.here, job.other)]
    found = compare.differing_texts("the plan by machine.json of the other", *texts)
    return compare.differing_names("machine.json", here, other) + found, f"{len(other)} keys"


def words(job: Job) -> Iterator[Check]:
    """Compare what a person reads."""
    yield "docs/flags.md", partial(same_text, job, lambda where: (where.root / "docs/flags.md").read_text("utf-8"))
    programs = {path for where in (job.here, job.other) for path in programs_of(where.root)}
    for program in sorted(programs):
        yield f"--help of {program}", partial(same_text, job, partial(help_of, program=program))
    (job.folder / "bad.json").write_text('{"train_batch_size": "some", "no_such_key": 1}', encoding="utf-8")
    for family, ranks, flags in LAYOUTS:
        command = f"{PROGRAMS[family]} {SIZES} {job.data()} --dry-run {flags}"
        run = partial(run_any, command=command, env={"WORLD_SIZE": str(ranks)})
        yield f"--dry-run of {family} on {ranks} ranks {flags}", partial(same_text, job, run, "exit code 0")
    for program, flags in BAD_INPUTS:
        bad = flags.format(folder=job.folder, data=job.data() if "{data}" in flags else "")
        run = partial(run_any, command=f"{program} {bad}")
        yield f"bad input {program} {flags}", partial(same_text, job, run, "exit code [1-9]")


def programs_of(root: Path) -> Iterator[str]:
    """Yield what has a --help: programs, tools, run scripts and the launcher."""
    yield "-m megatron.launch"
    for path in [*root.glob("*.py"), *root.glob("examples/*/pretrain_*.py"), *root.glob("tools/*.py")]:
        text = path.read_text("utf-8")
        if "__main__" in text and re.search(r"Parser\b|pretrain\(|parse_args|generate", text):
            yield path.relative_to(root).as_posix()
    for path in [*root.glob("run_*.sh"), *root.glob("examples/*/run_*.sh")]:
        if path.name != "run_tests.sh":
            yield f"bash {path.relative_to(root).as_posix()}"


def help_of(where: Checkout, program: str) -> str:
    """Return the whole help, of a training program without what it says of ``--help`` and ``--help-all``."""
    whole = where.run(f"{program} --help-all", code=None)
    if whole.rstrip().endswith("exit code 0"):
        return re.sub(r"^  (-h, --help|--help-all)  .*\n", "", whole, flags=re.M)
    return re.sub(r"^  -h, --help  .*\n", "", where.run(f"{program} --help", code=None), flags=re.M)


def run_any(where: Checkout, command: str, env: Mapping[str, str] | None = None) -> str:
    return where.run(command, env, code=None)


def same_text(job: Job, text_of: Callable[[Checkout], str], ending: str = "") -> Found:
    """Compare two texts; the other's last line must be ``ending``, so that no comparison is of the wrong error."""
    here, other = text_of(job.here), text_of(job.other)
    found = compare.differing_texts("differences (- there, + here)", here, other)
    last = other.rstrip().rpartition("\n")[2]
    if ending and not re.fullmatch(ending, last):
        found.append(f"the other's must end with {ending!r}, got {other.strip()[-500:]!r}")
    return found, f"{len(other.splitlines())} lines" + (f", {last}" if ending else "")


def tests(job: Job) -> Iterator[Check]:
    """Look for tests that are gone."""
    for flags in ("", "--all"):
        yield f"names of tests {flags}".strip(), partial(same_tests, job, flags)


def same_tests(job: Job, flags: str) -> Found:
    collect = f"-m pytest --collect-only -q -o addopts=--strict-markers -p no:cacheprovider {flags}"
    here, other = (compare.collected_tests(where.run(collect)) for where in (job.here, job.other))
    return compare.lost_tests(here, other, job.reasons)


PARTS: dict[str, Callable[[Job], Iterator[Check]]] = {
    "losses": losses,
    "resume": resume,
    "files": files,
    "words": words,
    "tests": tests,
    "speed": speed,
}


def judge(job: Job, parts: Sequence[str]) -> list[str]:
    """Make every comparison of ``parts``, print a line for each, and return the names of those that differ."""
    failed: list[str] = []
    for part in parts:
        try:
            checks = list(PARTS[part](job))
        except Exception as error:  # what the part needs could not be made
            checks = [("preparation", partial(failing, error))]
        for name, check in checks:
            start = time.monotonic()
            try:
                found, told = check()
            except Exception as error:
                found, told = [f"could not be compared: {type(error).__name__}: {error}"], ""
            line = f"{part}: {name}"
            reason = compare.reason_of(line, job.reasons) if found and part in ("words", "speed") else None
            verdict = "same    " if not found else "reason  " if reason else "DIFFERS "
            failed += [line] if found and not reason else []
            print(f"{verdict}{line} ({time.monotonic() - start:.0f} s) {reason or told}".rstrip(), flush=True)
            print("".join(f"    {each}\n" for each in found), end="", flush=True)
    return failed


def failing(error: Exception) -> Found:
    raise error


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; end with code 2 where they cannot be."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT", help="working tree of the commit to compare with")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=tuple(PARTS), metavar="PART", help=f"of {[*PARTS]}")
    parser.add_argument("--reasons", type=Path, metavar="FILE", help="what may differ, and why")
    parser.add_argument("--benchmarks", nargs="+", choices=BENCHMARKS, default=tuple(BENCHMARKS), help="of speed")
    parser.add_argument("--pairs", type=int, default=15, help="of each benchmark of speed (default: 15)")
    parser.add_argument("--tiny", action="store_true", help="speed of models of no use: whether it runs at all")
    args = parser.parse_args(argv)
    if not (args.other / "megatron").is_dir() or not (args.other / "tds").is_dir():
        parser.error(f"OTHER_CHECKOUT must be a working tree with megatron/ and tds/, got {args.other}")
    if args.pairs < 1:
        parser.error(f"--pairs must be at least 1, got {args.pairs}")
    try:
        args.reasons = compare.read_reasons(args.reasons.read_text("utf-8")) if args.reasons else {}
    except (OSError, ValueError) as error:
        parser.error(f"--reasons: {error}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; return the exit code."""
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the temporary folder goes then, too
    with tempfile.TemporaryDirectory(prefix="same-program-") as folder:
        os.environ["TMPDIR"] = folder  # orders of documents and stores of the runs go with it
        failed = judge(Job(Checkout(ROOT), Checkout(args.other.resolve()), Path(folder), args, args.reasons), args.only)
    print(f"verdict: NOT THE SAME: {len(failed)} of the comparisons above" if failed else "verdict: the same program")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
