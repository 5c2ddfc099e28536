"""Compare this checkout with another one: losses, checkpoints, files, texts, tests and speed must be the same.

    git worktree add ../before COMMIT
    python benchmarks/same_program.py ../before
    python benchmarks/same_program.py ../before --only losses resume
    python benchmarks/same_program.py ../before --only words tests --reasons changed.txt
    python benchmarks/same_program.py ../before --only speed --benchmarks step_time --pairs 30

| part | what must be the same |
|---|---|
| losses | losses and checkpoints of four families on tp 2 x pp 2, with dropout (``CLIP_TOLERANCES``) |
| resume | runs resumed from checkpoints of the other checkout, native and DeepSpeed's, bitwise; older fixtures |
| files | .bin and .idx byte for byte; keys of metrics.jsonl, stages.json, dump.json, plan.json, machine.json |
| words | docs/flags.md, --help, --dry-run of 20 layouts, messages and exit codes of ten bad inputs: byte for byte |
| tests | no test is lost: names of pytest without folders, with and without --all |
| speed | step_time, pipeline, start_up in pairs that take turns: median ratio below 1.02 at 95 %; --help in 0.35 s |

Both checkouts run as subprocesses of this Python, each with its own PYTHONPATH. Each comparison prints a line with
"same" or "DIFFERS", and a failure does not stop the others. --reasons names a file with lines ``NAME -- reason`` for
allowed differences: a lost test (``test_x.py::test_y``), or a line of files, words or speed (``words: docs/flags.md``).
NAME* matches a prefix.
The exit code is 1 if anything differs. All parts except speed take about 15 minutes on 2 cores, and speed about 40
minutes. speed needs an otherwise idle machine and creates sample data in both checkouts (data/sample, which git
ignores).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

try:
    from benchmarks import same_program_compare as compare
except ModuleNotFoundError as error:  # numpy is not installed
    from megatron.environment import exit_if_outside

    exit_if_outside(error)
    raise
from benchmarks.scripts import SCRIPTS  # noqa: E402

FIXTURE_TESTS = ("test_format_1.py", "test_formats.py")
TEXTS, TOKENIZER = "examples/corpus/*/*.txt", "tests/golden/tokenizer.json"
FAMILY_FLAGS = {
    "gpt2": "--seq-length 32", "t5": "--enc-seq-length 32", "bert": "--seq-length 32",
    "llama": "--seq-length 32 --num-experts 4 --moe-z-loss-coeff 1e-3 --hidden-dropout 0.1 --attention-dropout 0.1",
}  # fmt: skip
"""Family -> its own flags; LLaMA has no dropout by default."""
SIZES = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --batch-size 2 --gas 2 --train-iters 6 --lr 3e-3 "
    "--warmup 0 --log-interval 1 --eval-iters 0 --split 900,50,50 --device cpu --progress plain"
)
GRID = "--model-parallel-size 2 --pipe-parallel-size 2"
CLIP_TOLERANCES = {"--fp32 --clip-grad 0": 0.0, "--fp64 --clip-grad 0.1": 1e-12, "--fp32 --clip-grad 0.1": 1e-6}
"""Flags -> allowed difference of losses and tensors: 0 (bitwise) without clipping, 1e-12 or 1e-6 with clipping.

The gradient norm of every step is above 0.1, so that --clip-grad 0.1 clips in every step.
"""
NORM_TOLERANCE = 1e-5
"""Allowed difference of logged gradient norms, whose sums may round differently.

With --clip-grad 0 the norms have no effect on the run, so the losses are still compared bitwise.
"""
RESUME_STEP, LAST_STEP = 3, 6
"""Step from whose checkpoint runs are resumed, and last step."""
LAYOUTS = [
    ("gpt2", 1, ""), ("gpt2", 4, GRID), ("gpt2", 8, f"{GRID} --zero-stage 1"), ("gpt2", 4, "--zero-stage 3"),
    ("gpt2", 2, "--pipe-parallel-size 2 --pipeline-schedule zb-h1 --gas 8"),
    ("gpt2", 2, "--pipe-parallel-size 2 --pipeline-chunks 2 --gas 8"),
    ("gpt2", 4, "--model-parallel-size 4 --sequence-parallel"), ("gpt2", 4, f"{GRID} --checkpoint-activations"),
    ("t5", 1, ""), ("t5", 4, GRID), ("t5", 3, "--pipe-parallel-size 3 --pipeline-split-rank 1"),
    ("t5", 4, "--pipe-parallel-size 2 --zero-stage 1 --bf16"),
    ("bert", 1, ""), ("bert", 4, GRID), ("bert", 8, f"{GRID} --recompute-granularity selective"),
    ("llama", 4, GRID), ("llama", 2, "--model-parallel-size 2 --num-query-groups 2 --packing best-fit"),
    ("llama", 2, "--pipe-parallel-size 2 --pipeline-schedule gpipe"),
    ("mpt", 4, GRID), ("mpt", 4, "--zero-stage 2 --clip-qkv 6"),
]  # fmt: skip
"""Family, number of ranks and flags of each --dry-run."""
BAD_INPUTS = [
    (SCRIPTS["gpt2"], "--no-such-flag 1"),
    (SCRIPTS["gpt2"], "--data-path none --num-layers -1 --lr much --hidden-size 30"),
    (SCRIPTS["gpt2"], "--data-path none --model-parallel-size 3"),
    (SCRIPTS["gpt2"], "--data-path {folder}/nowhere --tokenizer-path {folder}/nowhere.json --dry-run"),
    (SCRIPTS["gpt2"], "--data-path none --deepspeed_config {folder}/bad.json"),
    (SCRIPTS["t5"], "--data-path none --noise-density 2 --denoisers Q"),
    (SCRIPTS["gpt2"], "--device cpu --eval-iters 0 {data} --load {folder}/nowhere --save {folder}/unused"),
    ("tools/preprocess_data.py", "--input {folder}/nowhere --output-prefix {folder}/out --tokenizer-path none.json"),
    ("tools/plan.py", "--model gpt2 --gpus 8 --gpu abacus"),
    ("tools/inspect_checkpoint.py", "{folder}/nowhere"),
]
SPEED_BAR, HELP_BAR_S = 1.02, 0.35
DEADLINE_S = 900
NUM_TURNS = 7
"""Number of steps per pair; the ratio of the pair is the median of the ratios of its steps."""

T = TypeVar("T")
ComparisonResult = tuple[list[str], str]
"""Result of a comparison: the differences, and a summary to print."""


@dataclass(frozen=True)
class Checkout:
    """A working tree whose programs are run."""

    root: Path

    def run(self, command: str | list[str], env: Mapping[str, str] | None = None, code: int | None = 0) -> str:
        """Run Python with ``command`` in the checkout; return its stdout and stderr, with the checkout's path replaced.

        Raises:
            RuntimeError: the exit code is not ``code``. None accepts any exit code and appends it as the last line of
                the result.
        """
        words = command.split() if isinstance(command, str) else command
        program = words if words[0] == "bash" else [sys.executable, *words]
        variables = self.environment(env)
        process = subprocess.run(
            program, cwd=self.root, env=variables, capture_output=True, text=True, timeout=DEADLINE_S
        )
        text = f"{process.stdout}{process.stderr}".replace(str(self.root), "<checkout>")
        if code is None:
            return f"{text}\nexit code {process.returncode}\n"
        if process.returncode != code:
            tail = "\n".join(text.splitlines()[-15:])
            raise RuntimeError(f"{' '.join(words)} ended with code {process.returncode} in {self.root}:\n{tail}")
        return text

    @contextmanager
    def worker(self, benchmark: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
        """Yield a process of same_program_turns.py in the checkout, which takes a turn for each line of input."""
        command = [sys.executable, "-P", str(ROOT / "benchmarks/same_program_turns.py"), *benchmark]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, cwd=self.root, env=self.environment(), stdin=pipe, stdout=pipe, text=True
        ) as process:
            try:
                yield process
            except BaseException:
                process.kill()
                raise

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment variables for a program of this checkout, including ``extra``."""
        variables = {key: value for key, value in os.environ.items() if not key.startswith("MEGATRON_")}
        variables |= {"PYTHONPATH": str(self.root), "PYTHON": sys.executable, "DS_ACCELERATOR": "cpu", "COLUMNS": "100"}
        variables |= {
            "OMP_NUM_THREADS": variables.get("OMP_NUM_THREADS", "1"),
            "TOKENIZERS_PARALLELISM": "false",
            **(extra or {}),
        }
        # Byte code is cached, as for a user, in a separate folder for each checkout.
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        variables["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / f"byte-code{self.root}".replace("/", "-"))
        return variables

    def train(self, family: str, folder: Path, data: str, flags: str) -> Path:
        """Train on four ranks in the run folder ``folder``, and return it."""
        launch = "-m megatron.launch --nproc-per-node 4 --preload torch,deepspeed"
        self.run(f"{launch} {SCRIPTS[family]} {SIZES} {FAMILY_FLAGS[family]} {data} {flags} --save {folder}")
        return folder

    def tokenize(self, texts: Iterable[Path], tokenizer: Path, prefix: Path, code: int = 0) -> None:
        """Write the token files ``prefix`` for ``texts``."""
        flags = f"--tokenizer-path {tokenizer} --output-prefix {prefix} --workers 1"
        self.run(["tools/preprocess_data.py", "--input", *map(str, texts), *flags.split()], code=code)


@dataclass(frozen=True)
class Job:
    """Inputs and state shared by all parts."""

    current: Checkout
    other: Checkout
    folder: Path
    args: argparse.Namespace
    reasons: Mapping[str, str]
    failed: list[str] = field(default_factory=list)
    warmed_up: list[Checkout] = field(default_factory=list)

    @contextmanager
    def comparison(self, line: str) -> Iterator[list[ComparisonResult]]:
        """Yield a list that receives the results of the comparison ``line``, then print the verdict.

        An error in the block counts as a difference.
        """
        results: list[ComparisonResult] = []
        start = time.monotonic()
        try:
            yield results
        except Exception as error:
            results.append(([f"could not be compared: {type(error).__name__}: {error}"], ""))
        differences = [difference for result_differences, _ in results for difference in result_differences]
        may_differ = line.startswith(("files: ", "words: ", "speed: "))
        reason = compare.reason_of(line, self.reasons) if differences and may_differ else None
        self.failed.extend([line] if differences and not reason else [])
        verdict = "same    " if not differences else "reason  " if reason else "DIFFERS "
        summary = reason or ", ".join(text for _, text in results if text)
        print(f"{verdict}{line} ({time.monotonic() - start:.0f} s) {summary}".rstrip(), flush=True)
        print("".join(f"    {difference}\n" for difference in differences), end="", flush=True)

    def checkouts(self) -> Iterator[tuple[str, Checkout]]:
        yield "here", self.current
        yield "other", self.other

    def limit_cases(self, cases: Iterable[T]) -> list[T]:
        """Return the first of ``cases`` with --smoke, otherwise all."""
        return list(cases)[: 1 if self.args.smoke else None]

    def data(self) -> str:
        """Return the flags that select token files of the repository's texts; the other checkout writes them once."""
        prefix, tokenizer = self.folder / "texts", self.folder / "tokenizer.json"
        if not prefix.with_suffix(".idx").exists():
            shutil.copy(self.other.root / TOKENIZER, tokenizer)
            self.other.tokenize(sorted(self.other.root.glob(TEXTS)), tokenizer, prefix)
        return f"--data-path {prefix} --tokenizer-path {tokenizer}"


def losses(job: Job) -> None:
    """Train each family in both checkouts."""
    for family in job.limit_cases(FAMILY_FLAGS):
        for flags, tolerance in job.limit_cases(CLIP_TOLERANCES.items()):
            with job.comparison(f"losses: {family} {flags}") as results:
                run = job.folder / f"{family}-{flags.replace(' ', '')}"
                runs = [
                    checkout.train(family, run / side, job.data(), f"{GRID} {flags}")
                    for side, checkout in job.checkouts()
                ]
                results.append(same_runs(*runs, tolerance))


def same_runs(current: Path, other: Path, tolerance: float) -> ComparisonResult:
    """Compare losses, gradient norms and last checkpoints of two runs, from the first step that both have."""
    differences: list[str] = []
    for key, allowed in (("loss", tolerance), ("grad_norm", NORM_TOLERANCE)):
        metrics = [read_metric(run, key) for run in (current, other)]
        first = max(min(values) for values in metrics)
        current_values, other_values = (
            {step: value for step, value in values.items() if step >= first} for values in metrics
        )
        differences += compare.differing_numbers(f"{key} of step", current_values, other_values, allowed)
    tensors = read_checkpoint(current), read_checkpoint(other)
    differences += compare.differing_numbers("tensor", *tensors, tolerance)
    if max(other_values) != LAST_STEP:
        differences.append(f"the run of {other} must reach step {LAST_STEP}, got {max(other_values)}")
    tensor_text = f"tensors up to {compare.furthest(*tensors)[0]:.1e} apart"
    return (
        differences,
        f"{len(other_values)} steps, last loss {read_metric(current, 'loss')[max(current_values)]:.4f}, {tensor_text}",
    )


def read_metric(run: Path, key: str) -> dict[int, float]:
    """Return step -> value of a training metric."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["step"]: row[key] for row in rows if row["kind"] == "train"}


def checkpoint_of(run: Path, step: int | None = None) -> Path:
    """Return the checkpoint folder of a step, or the newest one, in either format."""
    names = re.compile(r"(?:step-|global_step)0*(\d+)$")
    folders = {int(match[1]): path for path in run.rglob("*") if path.is_dir() and (match := names.match(path.name))}
    return folders[max(folders) if step is None else step]


def read_checkpoint(run: Path) -> dict[str, Any]:
    """Return every tensor of the newest checkpoint by file and name: weights, optimizer state, random states."""
    import torch
    from safetensors.numpy import load_file

    arrays: dict[str, Any] = {}
    for path in sorted(checkpoint_of(run).glob("*.safetensors")):
        arrays |= {f"{path.name} {name}": array for name, array in load_file(path).items()}
    for path in sorted(checkpoint_of(run).glob("*.pt")):
        state = torch.load(path, map_location="cpu", weights_only=True)
        arrays |= {f"{path.name} {tensor_path}": tensor.numpy(force=True) for tensor_path, tensor in tensors_in(state)}
    return arrays


def tensors_in(value: Any, tensor_path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every tensor in nested containers with its path."""
    if isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(inner, f"{tensor_path}/{key}")
    elif hasattr(value, "numpy"):
        yield tensor_path, value


def resume(job: Job) -> None:
    """Resume runs in this checkout from checkpoints of the other one."""
    for form in job.limit_cases(("native", "deepspeed")):
        for family in job.limit_cases(FAMILY_FLAGS):
            with job.comparison(f"resume: {family}, checkpoint format {form}") as results:
                run, flags = (
                    job.folder / f"resume-{family}-{form}",
                    f"{GRID} --fp32 --clip-grad 0 --checkpoint-format {form}",
                )
                uninterrupted = job.other.train(
                    family, run / "other", job.data(), f"{flags} --save-interval {RESUME_STEP}"
                )
                flags += f" --load {checkpoint_of(uninterrupted, RESUME_STEP)}"
                results.append(same_resumed(job.current.train(family, run / "here", job.data(), flags), uninterrupted))
    with job.comparison("resume: fixtures of older commits, byte for byte") as results:
        current, other = fixtures(job.current.root), fixtures(job.other.root)
        results.append((compare.differing_names("files under format_1", current, other), f"{len(other)} files"))
    with job.comparison("resume: fixtures of older commits, their tests") as results:
        files = [path for name in FIXTURE_TESTS for path in sorted((job.current.root / "tests").rglob(name))]
        if len(files) != len(FIXTURE_TESTS):
            raise FileNotFoundError(f"tests must have one {' and one '.join(FIXTURE_TESTS)}, found {files}")
        passed = job.current.run(["-m", "pytest", "-p", "no:cacheprovider", *map(str, files)])
        results.append(([], passed.splitlines()[-1]))


def same_resumed(current: Path, uninterrupted: Path) -> ComparisonResult:
    """Compare a run that was resumed after step RESUME_STEP with one that was not interrupted."""
    differences, summary = same_runs(current, uninterrupted, 0.0)
    if (first := min(read_metric(current, "loss"))) != RESUME_STEP + 1:
        differences.append(f"the resumed run must start at step {RESUME_STEP + 1}, got {first}")
    return differences, summary


def fixtures(root: Path) -> set[tuple[str, str]]:
    """Return name and checksum of each committed checkpoint file of an older format."""
    return {pair for folder in (root / "tests").rglob("format_1") for pair in checksums(folder.rglob("*"))}


def checksums(paths: Iterator[Path]) -> set[tuple[str, str]]:
    """Return name and checksum of each file."""
    return {(path.name, hashlib.sha256(path.read_bytes()).hexdigest()[:12]) for path in paths if path.is_file()}


def files(job: Job) -> None:
    """Compare the files that the programs write."""
    tokenizer = job.other.root / TOKENIZER
    with job.comparison("files: token files, byte for byte") as results:
        for side, checkout in job.checkouts():
            (job.folder / side).mkdir()
            checkout.tokenize(sorted(job.other.root.glob(TEXTS)), tokenizer, job.folder / side / "corpus")
        current, other = (checksums((job.folder / side).glob("corpus.*")) for side, _ in job.checkouts())
        results.append((compare.differing_names("token files", current, other), ", ".join(sorted(dict(other)))))
    with job.comparison("files: keys of metrics.jsonl, stages.json, dump.json") as results:
        for side, checkout in job.checkouts():
            flags = f"{GRID} --save-interval 3 --eval-iters 1 --debug-dump {job.folder}/dump-{side}"
            checkout.train("gpt2", job.folder / f"files-{side}", job.data(), flags)
        for name in ("files-{}/metrics.jsonl", "files-{}/stages.json", "dump-{}/dump.json", "dump-{}/rank-00000.jsonl"):
            results.append(same_keys(job, name))
    with job.comparison("files: keys of plan.json of an unfinished job") as results:
        # The valid file is finished before the invalid one fails, so plan.json remains.
        texts = [job.folder / "good.jsonl", job.folder / "bad.jsonl"]
        for text, line in zip(texts, ('{"text": "a"}\n', "no JSON\n"), strict=True):
            text.write_text(line, encoding="utf-8")
        for side, checkout in job.checkouts():
            checkout.tokenize(texts, tokenizer, job.folder / f"plan-{side}", code=2)
        results.append(same_keys(job, "plan-{}.parts/plan.json"))
    with job.comparison("files: keys of machine.json") as results:
        for side, checkout in job.checkouts():
            checkout.run(f"tools/plan.py --calibrate {job.folder}/machine-{side}.json --ranks 1")
        results.append(same_keys(job, "machine-{}.json"))
        size_flags = "--model gpt2 --num-layers 4 --hidden-size 64 --gpus 4"
        plan = partial(Checkout.run, command=f"tools/plan.py {size_flags} --machine {job.folder}/machine-other.json")
        results.append(same_text(job, plan))


def same_keys(job: Job, name: str) -> ComparisonResult:
    """Compare the keys of a file that both checkouts wrote; {} in ``name`` stands for "here" or "other"."""
    current, other = (keys_in(job.folder / name.format(side)) for side, _ in job.checkouts())
    shown = Path(name).name.replace("-{}", "")
    return compare.differing_names(shown, current, other), f"{shown} {len(other)} keys"


def keys_in(path: Path) -> set[str]:
    """Return the keys of a JSON file, or of each type of line of a JSONL file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return set(compare.keys_of(json.loads(text)))
    rows = [json.loads(line) for line in text.splitlines() if line]
    return {key for row in rows for key in compare.keys_of(row, row.get("kind", ""))}


def words(job: Job) -> None:
    """Compare the texts that users read."""
    with job.comparison("words: docs/flags.md") as results:
        results.append(same_text(job, lambda checkout: (checkout.root / "docs/flags.md").read_text("utf-8")))
    for program in job.limit_cases(
        sorted({path for _, checkout in job.checkouts() for path in programs_of(checkout.root)})
    ):
        with job.comparison(f"words: --help of {program}") as results:
            results.append(same_text(job, partial(help_of, program=program)))
    for family, ranks, flags in job.limit_cases(LAYOUTS):
        with job.comparison(f"words: --dry-run of {family} on {ranks} ranks {flags}") as results:
            command = f"{SCRIPTS[family]} {SIZES} {job.data()} --dry-run {flags}"
            run = partial(Checkout.run, command=command, env={"WORLD_SIZE": str(ranks)}, code=None)
            results.append(same_text(job, run, "exit code 0"))
    (job.folder / "bad.json").write_text('{"train_batch_size": "some", "no_such_key": 1}', encoding="utf-8")
    for program, flags in job.limit_cases(BAD_INPUTS):
        with job.comparison(f"words: bad input {program} {flags}") as results:
            bad = flags.format(folder=job.folder, data=job.data() if "{data}" in flags else "")
            run = partial(Checkout.run, command=f"{program} {bad}", code=None)
            results.append(same_text(job, run, "exit code [1-9]"))


def programs_of(root: Path) -> Iterator[str]:
    """Yield the programs that have a --help: scripts, tools, run scripts and the launcher."""
    yield "-m megatron.launch"
    for path in [*root.glob("*.py"), *root.glob("examples/*/pretrain_*.py"), *root.glob("tools/*.py")]:
        text = path.read_text("utf-8")
        if "__main__" in text and re.search(r"Parser\b|pretrain\(|parse_args|generate", text):
            yield path.relative_to(root).as_posix()
    for path in [*root.glob("run_*.sh"), *root.glob("examples/*/run_*.sh")]:
        if path.name != "run_tests.sh":
            yield f"bash {path.relative_to(root).as_posix()}"


def help_of(checkout: Checkout, program: str) -> str:
    """Return the full help of a program, by --help-all if it exists, without the lines of --help and --help-all."""
    text = checkout.run(f"{program} --help", code=None)
    if "--help-all" in text:
        text = checkout.run(f"{program} --help-all", code=None)
    return re.sub(r"^  (-h, --help|--help-all)  .*\n", "", text, flags=re.M)


def same_text(job: Job, get_text: Callable[[Checkout], str], ending: str = "") -> ComparisonResult:
    """Compare the texts of both checkouts.

    Args:
        ending: pattern for the last line of the other checkout's text, which rules out an unexpected error.
    """
    current, other = get_text(job.current), get_text(job.other)
    differences = compare.differing_texts("differences (- there, + here)", current, other)
    last_line = other.rstrip().rpartition("\n")[2]
    if ending and not re.fullmatch(ending, last_line):
        differences.append(f"the other checkout's text must end with {ending!r}, got {other.strip()[-500:]!r}")
    return differences, f"{len(other.splitlines())} lines" + (f", {last_line}" if ending else "")


def tests(job: Job) -> None:
    """Find tests that were lost."""
    for flags in job.limit_cases(("", " --all")):
        with job.comparison(f"tests: names of tests{flags}") as results:
            collect = f"-m pytest --collect-only -q -o addopts=--strict-markers -p no:cacheprovider{flags}"
            current, other = (compare.collected_tests(checkout.run(collect)) for _, checkout in job.checkouts())
            results.append(compare.lost_tests(current, other, job.reasons))


def speed(job: Job) -> None:
    """Time both checkouts with the benchmarks that both have; the order of the turns changes from pair to pair."""
    for name in job.args.benchmarks:
        measure_pair, cases = BENCHMARKS[name]
        for case in job.limit_cases(cases):
            with job.comparison(f"speed: {name} {case}".strip()) as results:
                results.append(same_speed(job, partial(measure_pair, job, f"{name} {case}")))


Seconds = dict[str, list[float]]
"""Name of a measurement -> seconds of each turn."""


def same_speed(job: Job, measure_pair: Callable[[Sequence[Checkout]], Mapping[Checkout, Seconds]]) -> ComparisonResult:
    """Compare the times of both checkouts in pairs of measurements.

    Args:
        measure_pair: function that measures the checkouts in the given order; returns checkout -> seconds.
    """
    ratios: Seconds = {}
    seconds: Seconds = {}
    for pair_idx in range(job.args.pairs):
        seconds_of = measure_pair([job.current, job.other][:: 1 if pair_idx % 2 else -1])
        for name in sorted(seconds_of[job.current].keys() & seconds_of[job.other].keys()):
            current, other = seconds_of[job.current][name], seconds_of[job.other][name]
            ratios.setdefault(name, []).append(statistics.median(a / b for a, b in zip(current, other, strict=True)))
            seconds.setdefault(name, []).append(statistics.median(current))
        latest = ", ".join(f"{name} {values[-1]:.3f}" for name, values in ratios.items())
        print(f"    pair {pair_idx + 1} of {job.args.pairs}: {latest}", file=sys.stderr, flush=True)
    return judge_speed(ratios, seconds, job.args.pairs)


def judge_speed(
    ratios: Mapping[str, list[float]], seconds: Mapping[str, list[float]], num_pairs: int
) -> ComparisonResult:
    """Return the measurements that are slower than allowed or have too few pairs."""
    problems, summary = [], []
    for name, values in sorted(ratios.items()):
        median, low, high = compare.median_interval(values)
        text = (
            f"{name}: {median:.3f} times the other's time, 95 % interval {low:.3f} ... {high:.3f}, {len(values)} pairs"
        )
        if name == "--help":
            text += f", {(median_s := statistics.median(seconds[name])):.2f} s of {HELP_BAR_S}"
            problems += [f"--help takes {median_s:.2f} s, allowed {HELP_BAR_S}"] if median_s > HELP_BAR_S else []
        problems += [f"{name}: the interval must be below {SPEED_BAR}, ends at {high:.3f}"] if high >= SPEED_BAR else []
        summary.append(text)
    if len(max(ratios.values(), key=len, default=[])) < num_pairs:
        problems.append(
            f"{num_pairs} pairs must be comparable, got { ({name: len(values) for name, values in ratios.items()}) }"
        )
    return problems, "\n    ".join(summary)


def in_turns(job: Job, benchmark: str, turns: Sequence[Checkout]) -> dict[Checkout, Seconds]:
    """Start a worker in each checkout and let them train alternately, so that a temporary slowdown affects both."""
    seconds_of: dict[Checkout, Seconds] = {checkout: {} for checkout in turns}
    with ExitStack() as stack:
        workers = {checkout: stack.enter_context(checkout.worker(benchmark.split())) for checkout in turns}
        for worker in workers.values():
            read_answer(worker)
        for turn_idx in range(NUM_TURNS):
            for checkout in turns[:: 1 if turn_idx % 2 else -1]:
                workers[checkout].stdin.write("\n")
                workers[checkout].stdin.flush()
                for name, seconds in json.loads(read_answer(workers[checkout])).items():
                    seconds_of[checkout].setdefault(name, []).append(seconds)
    return seconds_of


def read_answer(worker: Any) -> str:
    """Return the next line of a worker's stdout; raise RuntimeError if the worker has ended."""
    line: str = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"{shlex.join(worker.args)} ended with code {worker.wait()}")
    return line


def start_up(job: Job, _: str, turns: Sequence[Checkout]) -> dict[Checkout, Seconds]:
    """Run benchmarks/start_up.py in each checkout. An untimed first run creates byte code and sample data."""
    seconds_of: dict[Checkout, Seconds] = {}
    for checkout in turns:
        if checkout not in job.warmed_up:
            checkout.run("benchmarks/start_up.py --runs 1")
            job.warmed_up.append(checkout)
        results = json.loads(checkout.run("benchmarks/start_up.py --runs 1").splitlines()[0])
        seconds_of[checkout] = {
            name: [row["wall_s"]] for name, row in results.items() if isinstance(row, dict) and "wall_s" in row
        }
    return seconds_of


BENCHMARKS = {
    "step_time": (in_turns, ("gpt2", "t5", "llama")),
    "pipeline": (in_turns, ("gpt2",)),
    "start_up": (start_up, ("",)),
}
PARTS = {part_function.__name__: part_function for part_function in (losses, resume, files, words, tests, speed)}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exit with code 2 if it is invalid."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT", help="working tree of the commit to compare with")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=tuple(PARTS), metavar="PART", help=f"{[*PARTS]}")
    parser.add_argument("--smoke", action="store_true", help="run only the first case of each part, to test the tool")
    parser.add_argument("--reasons", type=Path, metavar="FILE", help="allowed differences with their reasons")
    parser.add_argument(
        "--benchmarks", nargs="+", choices=BENCHMARKS, default=tuple(BENCHMARKS), help="benchmarks of the part speed"
    )
    parser.add_argument("--pairs", type=int, default=15, help="pairs of each speed benchmark (default: 15)")
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
    """Run the comparisons; return the exit code."""
    args = parse_args(argv)
    signal.signal(
        signal.SIGTERM, lambda signal_number, _: sys.exit(128 + signal_number)
    )  # also removes the temporary folder
    with tempfile.TemporaryDirectory(prefix="same-program-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # document orders, stores and byte code are removed with it
        job = Job(Checkout(ROOT), Checkout(args.other.resolve()), Path(folder), args, args.reasons)
        for part_function in args.only:
            PARTS[part_function](job)
    print(
        f"verdict: NOT THE SAME: {len(job.failed)} of the comparisons above differ"
        if job.failed
        else "verdict: the same program"
    )
    return 1 if job.failed else 0


if __name__ == "__main__":
    sys.exit(main())
