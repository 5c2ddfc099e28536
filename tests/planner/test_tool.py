"""The command: its words, its exit codes, what it prints, and that its lines start a run."""

from __future__ import annotations

import functools
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from megatron.config import parse
from megatron.models.registry import FAMILIES
from megatron.planner.layout import Layout, layout_of
from megatron.planner.machine import device
from megatron.planner.options import with_defaults
from tools import plan

ROOT = Path(__file__).parents[2]
SIZES = "--num-layers 8 --hidden-size 1024 --gpus 16 --gpu a100-80g --global-batch-size 64"
CASES = {
    "gpt2": f"--model gpt2 {SIZES}",
    "gpt2, much to say": f"--model gpt2 {SIZES} --model-parallel-size 2 --pipe-parallel-size 2 --pipeline-chunks 2 "
    "--zero-stage 1 --checkpoint-activations --ff-hidden-size 2048 --activation relu --sequence-parallel --fp16 "
    "--untie-embeddings-and-output-weights",
    "gpt2, split": f"--model gpt2 {SIZES} --pipe-parallel-size 4 --pipeline-schedule zb-h1 --offload-optimizer",
    "t5": f"--model t5 {SIZES} --enc-layers 8 --dec-layers 4 --pipe-parallel-size 4".replace("--num-layers 8 ", ""),
    "t5, even": f"--model t5 {SIZES}",
    "llama": f"--model llama {SIZES} --num-query-groups 4 --ff-hidden-size 2816",
    "gpt2, compiled": f"--model gpt2 {SIZES} --compile --hidden-dropout 0.1 --no-overlap-grad-reduce",
    "mpt": f"--model mpt {SIZES} --zero-stage 3",
    "bert": f"--model bert {SIZES}",
    "t5, split": f"--model t5 {SIZES} --pipeline-split-rank 2",
    "gpt2, micro-batches": f"--model gpt2 {SIZES} --gas 4",
    "gpt2, tokens cut": f"--model gpt2 {SIZES} --sequence-parallel",
    "gpt2, chunks": f"--model gpt2 {SIZES} --pipeline-chunks 2",
    "llama, experts": f"--model llama {SIZES} --num-experts 8 --moe-ffn-hidden-size 512 --moe-layer-freq [0,1]*4 "
    "--moe-aux-loss-coeff 0.01 --expert-tensor-parallel-size 1 --expert-model-parallel-size 4",
    "gpt2, any order": f"--model gpt2 {SIZES} --pipeline-schedule auto",
}
QUICK = ("gpt2, much to say", "gpt2, split", "t5", "mpt", "bert", "llama, experts", "gpt2, tokens cut")

TINY = "--model gpt2 --num-layers 12"
TIGHT = "--fits --model gpt2 --num-layers 24 --hidden-size 4096 --gpus 8 --gpu a100-80g"
OVER = {
    "compiled": f"{TIGHT} --compile --memory 34 --model-parallel-size 2 --batch-size 2 --gas 4",
    "summed behind": f"{TIGHT} --no-overlap-grad-reduce --memory 34 --model-parallel-size 2 --batch-size 2 --gas 4",
    "weights away": f"{TIGHT} --zero-stage 3 --offload-parameters --memory 16 --batch-size 2 --gas 4",
    "split": "--fits --model t5 --enc-layers 8 --dec-layers 1 --hidden-size 4096 --gpus 8 --pipeline-split-rank 1 "
    "--pipe-parallel-size 2 --memory 16 --batch-size 4 --gas 4",
    "experts": "--fits --model llama --num-layers 24 --hidden-size 2048 --num-experts 8 --gpus 8 --memory 60 "
    "--ff-hidden-size 5632 --batch-size 2 --gas 4 --zero-stage 1",
    "last replica": f"{TIGHT} --zero-stage 1 --model-parallel-size 4 --memory 30 --batch-size 4 --gas 4",
}


@functools.cache
def layouts(words: str) -> list[dict[str, Any]]:
    """Return the layouts that the tool finds: several tests ask for the same."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert plan.main([*words.split(), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(out.getvalue())["layouts"]
    return found


def run(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = plan.main(words.split())
    return code, capsys.readouterr().out


def script_words(lines: list[str], family: str) -> tuple[list[str], int, list[str]]:
    """Return the flags that the run script makes of pasted lines, the ranks, and its recipe, as tools/run.sh does."""
    pasted = shlex.split(" ".join(line.removesuffix("\\") for line in lines))
    start = pasted.index("bash")
    given = dict(word.split("=") for word in pasted[:start])
    assert pasted[start + 1] == FAMILIES[family].run_script
    script = (ROOT / FAMILIES[family].run_script).read_text()
    shared = (ROOT / "tools/run.sh").read_text()
    own = script.split("\nown=(")[1].split(")")[0].split()
    flags = dict(zip(own[1::2], own[::2], strict=True))
    flags |= {line.split()[2]: line.split()[1] for line in shared.splitlines() if line.startswith("add --")}
    words = [word for name, value in given.items() if name in flags for word in (flags[name], value)]
    recipe = shlex.split(script.split('\nrecipe="')[1].split('"')[0].replace("--model $MODEL ", ""))
    ranks = int(given["GPUS_PER_NODE"]) * int(given["NNODES"])
    missing = set(given) - set(flags) - {"GPUS_PER_NODE", "NNODES"}
    assert not missing, "a variable that the run script does not know"
    return [*words, *pasted[start + 2 :]], ranks, recipe


def printed(layout: Layout, keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of ``layout`` under the keys that --json prints."""
    names = {"overlaps_sums": "overlap_grad_reduce"}
    return {key: getattr(layout, names.get(key, key)) for key in keys}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_the_pasted_lines_are_taken_by_the_parser_and_make_the_layout(name: str) -> None:
    family = CASES[name].split()[1]
    for one in layouts(CASES[name])[:3]:
        words, ranks, recipe = script_words(one["lines"], family)
        env = {"MEGATRON_DEFAULTS": shlex.join(recipe)}
        config = parse([*words, "--dry-run"], world_size=ranks, env=env, family=family)
        layout = layout_of(config, ranks)
        wanted = {key: value for key, value in one["layout"].items() if key != "waiting"}
        assert printed(layout, wanted) == wanted
        assert layout.global_batch_size == 64
        expected = plan.question(*plan.make_parser("").parse_known_args(CASES[name].split())).config
        assert config.identity() == expected.identity()


@pytest.mark.parametrize("name", list(OVER))
def test_what_makes_a_layout_fit_is_taken_by_the_parser(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(OVER[name] + " --json", capsys)
    ways, family = json.loads(out)["remedies"], OVER[name].split()[2]
    assert code == 1 and ways
    for way in ways:
        words, ranks, recipe = script_words(way["lines"], family)
        env = {"MEGATRON_DEFAULTS": shlex.join(recipe)}
        config = parse([*words, "--dry-run"], world_size=ranks, env=env, family=family)
        layout = layout_of(config, ranks)
        wanted = {key: value for key, value in way["layout"].items() if key != "waiting"}
        assert printed(layout, wanted) == wanted
    assert len({json.dumps(way["layout"]) for way in ways}) == len(ways)


@pytest.mark.slow
def test_what_is_given_of_a_layout_is_kept_and_the_rest_is_sought() -> None:
    def found(words: str) -> list[dict[str, Any]]:
        return [one["layout"] for one in layouts(words)]

    assert {one["num_micro_batches"] for one in found(CASES["gpt2, micro-batches"])} == {4}
    cut = found(CASES["gpt2, tokens cut"])
    assert all(one["sequence_parallel"] for one in cut) and {one["tensor"] for one in cut} == {2, 4, 8}
    assert {one["chunks"] for one in found(CASES["gpt2, chunks"])} == {2}
    assert len({one["schedule"] for one in found(CASES["gpt2, any order"])}) > 1
    whole = CASES["gpt2"].replace(" --global-batch-size 64", "")
    made = found(whole + " --gas 4 --batch-size 2 --model-parallel-size 2 --pipe-parallel-size 2")
    assert [(one["data"], one["num_micro_batches"], one["micro_batch_size"]) for one in made] == [(4, 4, 2)]


def test_all_that_is_assumed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    out = run("--model t5 --num-layers 8 --hidden-size 1024 --top 1", capsys)[1]
    assert (
        "assumed: --num-attention-heads 16 --enc-seq-length 512 --vocab-size 32128 --bf16 --global-batch-size 8192 "
        "--attention-dropout 0 --hidden-dropout 0 --dec-seq-length 114 --optimizer adamw --gpu h100-80g --gpus 8\n"
    ) in out
    out = run(f"{TINY} --hidden-size 1024 --gpu v100-32g --top 1 --compile", capsys)[1]
    assert "--fp16 --global-batch-size 2048" in out and "bash run_gpt2.sh --fp16" in out
    assert "--compile: the savings" in out and "expect an MFU" in out


@pytest.mark.parametrize(
    ("family", "hidden", "heads"),
    [("gpt2", 768, 12), ("gpt2", 1024, 16), ("gpt2", 1280, 20), ("gpt2", 1536, 16), ("gpt2", 1600, 25),
     ("gpt2", 2560, 32), ("gpt2", 12288, 96), ("t5", 512, 8), ("bert", 1024, 16), ("llama", 4096, 32),
     ("mpt", 7168, 56)],
)  # fmt: skip
def test_heads_that_are_not_said_are_those_of_published_models(family: str, hidden: int, heads: int) -> None:
    """GPT-3's table 2.1, GPT-2, and the first releases of the other families."""
    machine = plan.question(*plan.make_parser("").parse_known_args(CASES["gpt2"].split())).machine
    words, assumed = with_defaults(family, ["--num-layers", "2", "--hidden-size", str(hidden)], machine)
    assert f"--num-attention-heads {heads}" in assumed and " ".join(words).count("--num-attention-heads") == 1


def test_small_models_have_units_that_fit_and_a_note_about_few_steps(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--model llama --num-layers 6 --hidden-size 256 --vocab-size 16384 --gpus 8 --top 1"
    out = run(f"{small} --tokens 1e9", capsys)[1]
    assert "llama of 14.7 M parameters" in out and re.search(r"\d\.\d minutes for 1e\+09 tokens", out)
    assert re.search(r"\d\d\.\d\d MB", out) and "0.0 days" not in out and " 0.01 GB" not in out
    assert "note: 1e+09 tokens are only 238 steps of 2,048 samples (4.19M tokens)" in out
    assert "note: 20 tokens per parameter are only 70 steps" in run(small, capsys)[1]
    for words in (
        f"{small} --global-batch-size 64 --tokens 1e9",
        f"{small} --tokens 1e12",
        f"{TINY} --hidden-size 4096",
    ):
        assert "note:" not in run(words, capsys)[1]


RUN_FILE = """\
num-layers: 8
hidden-size: 512
num-attention-heads: 8
seq-length: 512
max-position-embeddings: 512
vocab-size: 8192
batch-size: 2
gas: 8
model-parallel-size: 2
pipe-parallel-size: 2
pipeline-chunks: 2
checkpoint-activations: true
lr: 3e-4
train-iters: 100
data-path: nowhere
bf16: true
"""


def test_a_file_of_config_gives_model_and_batch_and_its_layout_is_sought_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run_file(tmp_path)
    words = f"--model gpt2 --config {file} --gpus 8"
    out = run(words, capsys)[1]
    [best, *_] = layouts(words)
    layout = best["layout"]
    assert "gpt2 of 29.7 M parameters on 8" in out
    assert layout["micro_batch_size"] * layout["num_micro_batches"] * layout["data"] == 2 * 8 * 2
    assert (layout["tensor"], layout["pipe"]) == (1, 1) and layout["recompute"] == "none"
    changed = dict(line.split(": ") for line in re.findall(r"^  ([a-z-]+: \S+)$", out, re.MULTILINE))
    assert "remove from it: pipeline-chunks" in out and f"bash run_gpt2.sh --config {file}" in out
    written = {line.split(":")[0]: line for line in RUN_FILE.splitlines() if not line.startswith("pipeline-chunks")}
    file.write_text("\n".join({**written, **{name: f"{name}: {value}" for name, value in changed.items()}}.values()))
    config = parse(["--config", str(file), "--dry-run"], world_size=8, env={})
    found = layout_of(config, 8)
    wanted = {name: value for name, value in layout.items() if name != "waiting"}
    assert printed(found, wanted) == wanted
    fixed = layouts(f"{words} --model-parallel-size 2 --pipe-parallel-size 2")
    assert {(one["layout"]["tensor"], one["layout"]["pipe"]) for one in fixed} == {(2, 2)}


def test_the_config_of_a_run_names_its_family(tmp_path: Path) -> None:
    config = parse(f"--config {write_run_file(tmp_path)} --dry-run".split(), world_size=4, env={}, family="llama")
    saved = tmp_path / "config.json"
    saved.write_text(json.dumps(config.to_dict()))
    asked = plan.question(*plan.read_flags(["--config", str(saved), "--gpus", "4"])[1:])
    assert asked.config.identity() == config.identity()
    assert asked.wanted.global_batch_size == 2 * 8


def test_the_record_of_a_run_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "config.json"
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 512"
    saved.write_text(json.dumps(parse(f"{sizes} --dry-run".split(), world_size=1, env={}).to_dict()))
    out = run(f"--config {saved} --gpus 1 --fits", capsys)[1]
    assert f"write to a copy of {saved}:" in out and "bash run_gpt2.sh --config COPY.json" in out
    assert "remove from it" not in out, "its other entries are defaults"


def write_run_file(folder: Path) -> Path:
    file = folder / "run.yaml"
    file.write_text(RUN_FILE)
    return file


def test_what_the_pasted_lines_do_not_set_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    (heading,) = [line for line in run(CASES["gpt2, split"], capsys)[1].splitlines() if line.startswith("start it with (")]
    for name in ("--lr", "TRAIN_ITERS", "DATA_PATH", "TOKENIZER"):
        assert name in heading
    lines = layouts(CASES["gpt2, split"])[0]
    assert not re.search(r"--lr|TRAIN_ITERS|DATA_PATH|TOKENIZER", " ".join(lines["lines"]))


def test_the_reader_may_leave_early() -> None:
    script = (
        "import os, runpy, sys\n"
        "read, write = os.pipe()\n"
        "os.close(read); os.dup2(write, 1)\n"
        f"sys.argv = ['plan.py', *{CASES['gpt2, split'].split()!r}]\n"
        "runpy.run_path('tools/plan.py', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_ranking_tells_time_memory_messages_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(CASES["gpt2"] + " --tokens 1e9", capsys)
    assert code == 0
    for word in (
        "tokens/s",
        "MFU",
        "bubble",
        "minutes for 1e+09 tokens",
        "tensor",
        "pipeline",
        "data",
        "bash run_gpt2.sh",
    ):
        assert word in out
    for part in ("weights", "gradients", "optimizer", "activations", "logits", "buffers"):
        assert part in out
    assert "assumed: --num-attention-heads 16 --seq-length 2048 --vocab-size 50304" in out


def test_a_layout_that_does_not_fit_ends_with_code_1_and_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--fits --model gpt2 --num-layers 24 --hidden-size 4096 --gpus 8 --gpu a100-80g --model-parallel-size 2 "
    code, out = run(words + "--batch-size 16 --gas 2", capsys)
    assert code == 1
    assert "does not fit: stage 0 needs" in out and "the largest item is activations" in out
    assert "changes that make it fit, fastest first:" in out
    code, out = run(words + "--batch-size 1 --gas 8 --zero-stage 1 --json", capsys)
    assert code == 0 and json.loads(out)["fits"] is True
    code, out = run("--model gpt2 --num-layers 96 --hidden-size 16384 --gpus 8", capsys)
    assert code == 1 and "no layout fits" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--model is required"),
        ("--model gpt3", "invalid choice"),
        ("--model gpt2 --gpu a1000", "--gpu must be one of"),
        ("--model gpt2 --num-layer 4", "--num-layer"),
        ("--model gpt2 --gpus 0", "at least 1, got '0'"),
        ("--model gpt2", "the size of the model is required, got no --num-layers and no --hidden-size"),
        ("--model t5 --enc-layers 2 --dec-layers 2", "got no --hidden-size"),
        (f"{TINY} --hidden-size 100 --num-attention-heads 3", "must be a multiple of --num-attention-heads"),
        (f"{TINY} --hidden-size 256 --lr 1", "--lr has no effect on a plan"),
        (f"{TINY} --gpus 7 --model-parallel-size 2 --hidden-size 256", "no layout divides 7 devices"),
        (f"{TINY} --gpus 7 --model-parallel-size 2 --hidden-size 256 --json", "no layout divides 7 devices"),
        (f"{TINY} --gpus 12 --model-parallel-size 4 --hidden-size 256", "must be a multiple of the devices per node (8)"),
        (
            f"{TINY} --fits --gpus 7 --model-parallel-size 2 --hidden-size 256",
            "must be a multiple of tensor x pipe",
        ),
        (f"{TINY} --zero-stage 2 --pipe-parallel-size 2 --hidden-size 256", "is not supported in a pipeline"),
        (f"{TINY} --gas 4 --hidden-size 256", "depend on --model-parallel-size, --pipe-parallel-size, --batch-size"),
        (
            f"{TINY} --pipeline-chunks 9 --hidden-size 256",
            "every chunk of every pipeline stage must have at least one layer",
        ),
        (f"{TINY} --memory 3 --hidden-size 256", "--memory must be above the 4 GB"),
        ("--model gpt2 --machine none.json", "--machine needs a file"),
        ("--model gpt2 --machine none.json --gpu h200", "give one of them"),
        ("--config none.yaml", "none.yaml"),
        ("--config examples/run.yaml", "--model is required, one of gpt2, t5, llama, mpt, bert, unless --load"),
        ("--model gpt2 --ranks 2", "--ranks has no effect without --calibrate"),
        ("--model gpt2 --calibrate m.json", "cannot be combined with --model"),
        ("--model gpt2 --fits --top 3", "give one of them"),
        ("--model gpt2 --tokens many", "must be a number above 0"),
        ("--model gpt2 --fp32 --gpu l40s --memory -1", "must be a number above 0"),
    ],
)
def test_what_cannot_be_ends_with_code_2_and_one_clear_message(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        plan.main(words.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_machine_from_a_file_and_other_nodes_are_planned_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device("h200").save(tmp_path / "machine.json")
    words = (
        f"{CASES['gpt2'].replace('--gpu a100-80g', '')} --machine {tmp_path}/machine.json --gpus-per-node 4 --memory 50"
    )
    code, out = run(words, capsys)
    assert code == 0 and "16 x h200 (4 per node)" in out and "at most 46.00 GB" in out
    assert "GPUS_PER_NODE=4 NNODES=4" in out


def test_a_place_that_cannot_be_written_is_refused_ahead_of_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.planner import calibrate

    monkeypatch.setattr(calibrate, "calibrate", lambda *args, **kwargs: pytest.fail("it measured"))
    for place in (tmp_path / "none" / "m.json", tmp_path):
        with pytest.raises(SystemExit, match="2"):
            plan.main(["--calibrate", str(place)])
        assert f"a writable folder, got {place}" in capsys.readouterr().err


def test_calibrate_writes_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.planner import calibrate

    asked = []

    def measured(ranks: int, kind: str, *, report: object) -> object:
        asked.append((ranks, kind))
        return device("h20")

    monkeypatch.setattr(calibrate, "calibrate", measured)
    assert plan.main(["--calibrate", str(tmp_path / "m.json"), "--ranks", "3", "--device", "cpu"]) == 0
    assert asked == [(3, "cpu")] and "h20" in (tmp_path / "m.json").read_text()

    def broken(*_: object, **__: object) -> object:
        raise RuntimeError("rank 1 failed")

    monkeypatch.setattr(calibrate, "calibrate", broken)
    with pytest.raises(SystemExit) as ended:
        plan.main(["--calibrate", str(tmp_path / "m.json")])
    assert ended.value.code == 2 and capsys.readouterr().err == "plan.py: rank 1 failed\n"


def test_help_and_a_plan_import_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys; sys.argv = ['plan.py', {words}]\n"
        "import runpy\n"
        "try: runpy.run_path('tools/plan.py', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "slow = ('torch', 'deepspeed', 'numpy', 'yaml', 'rich', 'jinja2', 'tokenizers')\n"
        "print([name for name in slow[: 99 if '--help' in sys.argv else 3] if name in sys.modules])\n"
    )
    for words in ("'--help'", ", ".join(map(repr, CASES["gpt2, much to say"].split()))):
        done = subprocess.run(
            [sys.executable, "-c", code.format(words=words)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "[]"


def test_a_hugging_face_model_type_is_planned_as_a_model_of_its_family(tmp_path: Path) -> None:
    sizes = "--num-layers 4 --hidden-size 256 --gpus 2"
    (tmp_path / "run.yaml").write_text("model: qwen3\n")
    for words in (f"--model qwen3 {sizes}", f"--config {tmp_path / 'run.yaml'} {sizes}"):
        _, flags, rest = plan.read_flags(words.split())
        config = plan.question(flags, rest).config
        assert (flags.model, config.family, config.model.qk_norm) == ("llama", "llama", "head")
