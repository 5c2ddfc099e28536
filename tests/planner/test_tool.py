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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config import parse
from megatron.models.registry import FAMILIES
from megatron.planner.layout import Layout, layout_of
from megatron.planner.machine import gpu_machine
from megatron.planner.options import with_defaults
from tools import plan

ROOT = Path(__file__).parents[2]
SIZE_FLAGS = "--num-layers 8 --hidden-size 1024 --gpus 16 --gpu a100-80g --global-batch-size 64"
CASES = {
    "gpt2": f"--model gpt2 {SIZE_FLAGS}",
    "gpt2, many flags": f"--model gpt2 {SIZE_FLAGS} --model-parallel-size 2 --pipe-parallel-size 2 --pipeline-chunks 2 "
    "--zero-stage 1 --checkpoint-activations --ff-hidden-size 2048 --activation relu --sequence-parallel --fp16 "
    "--untie-embeddings-and-output-weights",
    "gpt2, split": f"--model gpt2 {SIZE_FLAGS} --pipe-parallel-size 4 --pipeline-schedule zb-h1 --offload-optimizer",
    "t5": f"--model t5 {SIZE_FLAGS} --enc-layers 8 --dec-layers 4 --pipe-parallel-size 4".replace(
        "--num-layers 8 ", ""
    ),
    "t5, even": f"--model t5 {SIZE_FLAGS}",
    "llama": f"--model llama {SIZE_FLAGS} --num-query-groups 4 --ff-hidden-size 2816",
    "gpt2, compiled": f"--model gpt2 {SIZE_FLAGS} --compile --hidden-dropout 0.1 --no-overlap-grad-reduce",
    "mpt": f"--model mpt {SIZE_FLAGS} --zero-stage 3",
    "bert": f"--model bert {SIZE_FLAGS}",
    "t5, split": f"--model t5 {SIZE_FLAGS} --pipeline-split-rank 2",
    "gpt2, micro-batches": f"--model gpt2 {SIZE_FLAGS} --gas 4",
    "gpt2, sequence": f"--model gpt2 {SIZE_FLAGS} --sequence-parallel",
    "gpt2, chunks": f"--model gpt2 {SIZE_FLAGS} --pipeline-chunks 2",
    "llama, experts": f"--model llama {SIZE_FLAGS} --num-experts 8 --moe-ffn-hidden-size 512 --moe-layer-freq [0,1]*4 "
    "--moe-aux-loss-coeff 0.01 --expert-tensor-parallel-size 1 --expert-model-parallel-size 4",
    "gpt2, any order": f"--model gpt2 {SIZE_FLAGS} --pipeline-schedule auto",
}
QUICK_CASES = ("gpt2, many flags", "gpt2, split", "t5", "mpt", "bert", "llama, experts", "gpt2, sequence")

TINY_FLAGS = "--model gpt2 --num-layers 12"
TIGHT_FLAGS = "--fits --model gpt2 --num-layers 24 --hidden-size 4096 --gpus 8 --gpu a100-80g"
OVERFLOW_CASES = {
    "compiled": f"{TIGHT_FLAGS} --compile --memory 34 --model-parallel-size 2 --batch-size 2 --gas 4",
    "no overlap": f"{TIGHT_FLAGS} --no-overlap-grad-reduce --memory 34 --model-parallel-size 2 --batch-size 2 --gas 4",
    "offloaded": f"{TIGHT_FLAGS} --zero-stage 3 --offload-parameters --memory 16 --batch-size 2 --gas 4",
    "split": "--fits --model t5 --enc-layers 8 --dec-layers 1 --hidden-size 4096 --gpus 8 --pipeline-split-rank 1 "
    "--pipe-parallel-size 2 --memory 16 --batch-size 4 --gas 4",
    "experts": "--fits --model llama --num-layers 24 --hidden-size 2048 --num-experts 8 --gpus 8 --memory 60 "
    "--ff-hidden-size 5632 --batch-size 2 --gas 4 --zero-stage 1",
    "last replica": f"{TIGHT_FLAGS} --zero-stage 1 --model-parallel-size 4 --memory 30 --batch-size 4 --gas 4",
}


@functools.cache
def find_layouts(words: str) -> list[dict[str, Any]]:
    """Return the layouts that the tool finds: several tests ask for the same."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert plan.main([*words.split(), "--json"]) == 0
    result: list[dict[str, Any]] = json.loads(out.getvalue())["layouts"]
    return result


def run_plan(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = plan.main(words.split())
    return code, capsys.readouterr().out


def run_script_words(lines: list[str], family: str) -> tuple[list[str], int, list[str]]:
    """Return the flags that the run script makes of pasted lines, the ranks, and its recipe, as tools/run.sh does."""
    pasted = shlex.split(" ".join(line.removesuffix("\\") for line in lines))
    start = pasted.index("bash")
    assigned = dict(word.split("=") for word in pasted[:start])
    assert pasted[start + 1] == FAMILIES[family].run_script
    script = (ROOT / FAMILIES[family].run_script).read_text()
    shared_script = (ROOT / "tools/run.sh").read_text()
    variable_pairs = script.split("\nscript_flags=(")[1].split(")")[0].split()
    flags = dict(zip(variable_pairs[1::2], variable_pairs[::2], strict=True))
    flags |= {line.split()[2]: line.split()[1] for line in shared_script.splitlines() if line.startswith("add --")}
    words = [word for name, value in assigned.items() if name in flags for word in (flags[name], value)]
    recipe = shlex.split(script.split('\nrecipe="')[1].split('"')[0].replace("--model $MODEL ", ""))
    ranks = int(assigned["GPUS_PER_NODE"]) * int(assigned["NNODES"])
    missing = set(assigned) - set(flags) - {"GPUS_PER_NODE", "NNODES"}
    assert not missing, "a variable that the run script does not know"
    return [*words, *pasted[start + 2 :]], ranks, recipe


def printed_values(layout: Layout, keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of ``layout`` under the keys that --json prints."""
    names = {"overlaps_sums": "overlap_grad_reduce"}
    return {key: getattr(layout, names.get(key, key)) for key in keys}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_CASES else pytest.mark.slow) for name in CASES]
)
def test_printed_lines_reproduce_layout(name: str) -> None:
    family = CASES[name].split()[1]
    for entry in find_layouts(CASES[name])[:3]:
        words, ranks, recipe = run_script_words(entry["lines"], family)
        env = {"MEGATRON_DEFAULTS": shlex.join(recipe)}
        config = parse([*words, "--dry-run"], world_size=ranks, env=env, family=family)
        layout = layout_of(config, ranks)
        expected_values = {key: value for key, value in entry["layout"].items() if key != "waiting"}
        assert printed_values(layout, expected_values) == expected_values
        assert layout.global_batch_size == 64
        expected = plan.planning_task(*plan.make_parser("").parse_known_args(CASES[name].split())).config
        assert config.identity() == expected.identity()


@pytest.mark.parametrize("name", list(OVERFLOW_CASES))
def test_remedy_lines_are_accepted_by_parser(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_plan(OVERFLOW_CASES[name] + " --json", capsys)
    result, family = json.loads(out), OVERFLOW_CASES[name].split()[2]
    assert list(result["overflow"]) == ["stage", "part", "part_bytes", "needed", "over"]
    fixes = result["remedies"]
    assert code == 1 and fixes
    for fix in fixes:
        words, ranks, recipe = run_script_words(fix["lines"], family)
        env = {"MEGATRON_DEFAULTS": shlex.join(recipe)}
        config = parse([*words, "--dry-run"], world_size=ranks, env=env, family=family)
        layout = layout_of(config, ranks)
        expected = {key: value for key, value in fix["layout"].items() if key != "waiting"}
        assert printed_values(layout, expected) == expected
    assert len({json.dumps(fix["layout"]) for fix in fixes}) == len(fixes)


@pytest.mark.slow
def test_search_respects_fixed_layout_flags() -> None:
    def found_layouts(words: str) -> list[dict[str, Any]]:
        return [entry["layout"] for entry in find_layouts(words)]

    assert {layout["num_micro_batches"] for layout in found_layouts(CASES["gpt2, micro-batches"])} == {4}
    sharded = found_layouts(CASES["gpt2, sequence"])
    assert all(layout["sequence_parallel"] for layout in sharded) and {layout["tensor"] for layout in sharded} == {
        2,
        4,
        8,
    }
    assert {layout["chunks"] for layout in found_layouts(CASES["gpt2, chunks"])} == {2}
    assert len({layout["schedule"] for layout in found_layouts(CASES["gpt2, any order"])}) > 1
    base_flags = CASES["gpt2"].replace(" --global-batch-size 64", "")
    fixed_layouts = found_layouts(base_flags + " --gas 4 --batch-size 2 --model-parallel-size 2 --pipe-parallel-size 2")
    assert [(layout["data"], layout["num_micro_batches"], layout["micro_batch_size"]) for layout in fixed_layouts] == [
        (4, 4, 2)
    ]


def test_assumptions_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    out = run_plan("--model t5 --num-layers 8 --hidden-size 1024 --top 1", capsys)[1]
    assert (
        "assumed: --num-attention-heads 16 --enc-seq-length 512 --vocab-size 32128 --bf16 --global-batch-size 8192 "
        "--attention-dropout 0 --hidden-dropout 0 --dec-seq-length 114 --optimizer adamw --gpu h100-80g --gpus 8\n"
    ) in out
    out = run_plan(f"{TINY_FLAGS} --hidden-size 1024 --gpu v100-32g --top 1 --compile", capsys)[1]
    assert "--fp16 --global-batch-size 2048" in out and "bash run_gpt2.sh --fp16" in out
    assert "--compile: the savings" in out and "expect an MFU" in out


@pytest.mark.parametrize(
    ("family", "hidden_size", "num_heads"),
    [("gpt2", 768, 12), ("gpt2", 1024, 16), ("gpt2", 1280, 20), ("gpt2", 1536, 16), ("gpt2", 1600, 25),
     ("gpt2", 2560, 32), ("gpt2", 12288, 96), ("t5", 512, 8), ("bert", 1024, 16), ("llama", 4096, 32),
     ("mpt", 7168, 56)],
)  # fmt: skip
def test_default_heads_match_published_models(family: str, hidden_size: int, num_heads: int) -> None:
    """GPT-3's table 2.1, GPT-2, and the first releases of the other families."""
    machine = plan.planning_task(*plan.make_parser("").parse_known_args(CASES["gpt2"].split())).machine
    words, assumed = with_defaults(family, ["--num-layers", "2", "--hidden-size", str(hidden_size)], machine)
    assert f"--num-attention-heads {num_heads}" in assumed and " ".join(words).count("--num-attention-heads") == 1


def test_fp8_assumes_bf16_on_every_machine() -> None:
    """As in a run; a CPU's default is fp32, which --fp8-format rejects."""
    flags, cpu = ["--num-layers", "2", "--hidden-size", "64"], replace(gpu_machine("h100-80g"), is_cpu=True)
    assert "--fp32" in with_defaults("gpt2", flags, cpu)[1]
    assert "--bf16" in with_defaults("gpt2", [*flags, "--fp8-format", "e4m3"], cpu)[1]


def test_small_models_use_small_units_and_note_few_steps(capsys: pytest.CaptureFixture[str]) -> None:
    small_model = "--model llama --num-layers 6 --hidden-size 256 --vocab-size 16384 --gpus 8 --top 1"
    out = run_plan(f"{small_model} --tokens 1e9", capsys)[1]
    assert "llama of 14.7 M parameters" in out and re.search(r"\d\.\d minutes for 1e\+09 tokens", out)
    assert re.search(r"\d\d\.\d\d MB", out) and "0.0 days" not in out and " 0.01 GB" not in out
    assert "note: 1e+09 tokens are only 238 steps of 2,048 samples (4.19M tokens)" in out
    assert "note: 20 tokens per parameter are only 70 steps" in run_plan(small_model, capsys)[1]
    for words in (
        f"{small_model} --global-batch-size 64 --tokens 1e9",
        f"{small_model} --tokens 1e12",
        f"{TINY_FLAGS} --hidden-size 4096",
    ):
        assert "note:" not in run_plan(words, capsys)[1]


RUN_YAML = """\
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


def test_config_file_sets_model_and_batch_but_not_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run_file(tmp_path)
    words = f"--model gpt2 --config {path} --gpus 8"
    out = run_plan(words, capsys)[1]
    [best, *_] = find_layouts(words)
    layout = best["layout"]
    assert "gpt2 of 29.7 M parameters on 8" in out
    assert layout["micro_batch_size"] * layout["num_micro_batches"] * layout["data"] == 2 * 8 * 2
    assert (layout["tensor"], layout["pipe"]) == (1, 1) and layout["recompute"] == "none"
    changed = dict(line.split(": ") for line in re.findall(r"^  ([a-z-]+: \S+)$", out, re.MULTILINE))
    assert "remove from it: pipeline-chunks" in out and f"bash run_gpt2.sh --config {path}" in out
    line_by_name = {
        line.split(":")[0]: line for line in RUN_YAML.splitlines() if not line.startswith("pipeline-chunks")
    }
    path.write_text(
        "\n".join({**line_by_name, **{name: f"{name}: {value}" for name, value in changed.items()}}.values())
    )
    config = parse(["--config", str(path), "--dry-run"], world_size=8, env={})
    actual = layout_of(config, 8)
    expected = {name: value for name, value in layout.items() if name != "waiting"}
    assert printed_values(actual, expected) == expected
    fixed = find_layouts(f"{words} --model-parallel-size 2 --pipe-parallel-size 2")
    assert {(entry["layout"]["tensor"], entry["layout"]["pipe"]) for entry in fixed} == {(2, 2)}


def test_run_config_sets_family(tmp_path: Path) -> None:
    config = parse(f"--config {write_run_file(tmp_path)} --dry-run".split(), world_size=4, env={}, family="llama")
    saved = tmp_path / "config.json"
    saved.write_text(json.dumps(config.to_dict()))
    request = plan.planning_task(*plan.read_flags(["--config", str(saved), "--gpus", "4"])[1:])
    assert request.config.identity() == config.identity()
    assert request.search_spec.global_batch_size == 2 * 8


def test_run_config_json_is_not_modified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "config.json"
    size_flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 512"
    saved.write_text(json.dumps(parse(f"{size_flags} --dry-run".split(), world_size=1, env={}).to_dict()))
    out = run_plan(f"--config {saved} --gpus 1 --fits", capsys)[1]
    assert f"write to a copy of {saved}:" in out and "bash run_gpt2.sh --config COPY.json" in out
    assert "remove from it" not in out, "its other entries are defaults"


def write_run_file(folder: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text(RUN_YAML)
    return path


def test_heading_names_unset_settings(capsys: pytest.CaptureFixture[str]) -> None:
    (heading,) = [
        line for line in run_plan(CASES["gpt2, split"], capsys)[1].splitlines() if line.startswith("start it with (")
    ]
    for name in ("--lr", "TRAIN_ITERS", "DATA_PATH", "TOKENIZER"):
        assert name in heading
    entry = find_layouts(CASES["gpt2, split"])[0]
    assert not re.search(r"--lr|TRAIN_ITERS|DATA_PATH|TOKENIZER", " ".join(entry["lines"]))


def test_closed_stdout_exits_cleanly() -> None:
    script = (
        "import os, runpy, sys\n"
        "read, write = os.pipe()\n"
        "os.close(read); os.dup2(write, 1)\n"
        f"sys.argv = ['plan.py', *{CASES['gpt2, split'].split()!r}]\n"
        "runpy.run_path('tools/plan.py', run_name='__main__')\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_ranking_prints_time_memory_traffic_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_plan(CASES["gpt2"] + " --tokens 1e9", capsys)
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
    for category in ("weights", "gradients", "optimizer", "activations", "logits", "buffers"):
        assert category in out
    assert "assumed: --num-attention-heads 16 --seq-length 2048 --vocab-size 50304" in out


def test_overflowing_layout_exits_1_with_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--fits --model gpt2 --num-layers 24 --hidden-size 4096 --gpus 8 --gpu a100-80g --model-parallel-size 2 "
    code, out = run_plan(words + "--batch-size 16 --gas 2", capsys)
    assert code == 1
    assert "does not fit: stage 0 needs" in out and "the largest item is activations" in out
    assert "changes that make it fit, fastest first:" in out
    code, out = run_plan(words + "--batch-size 1 --gas 8 --zero-stage 1 --json", capsys)
    assert code == 0 and json.loads(out)["fits"] is True
    code, out = run_plan("--model gpt2 --num-layers 96 --hidden-size 16384 --gpus 8", capsys)
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
        (f"{TINY_FLAGS} --hidden-size 100 --num-attention-heads 3", "must be a multiple of --num-attention-heads"),
        (f"{TINY_FLAGS} --hidden-size 256 --lr 1", "--lr has no effect on a plan"),
        (f"{TINY_FLAGS} --gpus 7 --model-parallel-size 2 --hidden-size 256", "no layout is possible with 7 devices"),
        (f"{TINY_FLAGS} --gpus 7 --model-parallel-size 2 --hidden-size 256 --json", "no layout is possible with 7"),
        (
            f"{TINY_FLAGS} --gpus 12 --model-parallel-size 4 --hidden-size 256",
            "must be a multiple of the devices per node (8)",
        ),
        (
            f"{TINY_FLAGS} --fits --gpus 7 --model-parallel-size 2 --hidden-size 256",
            "must be a multiple of tensor x pipe",
        ),
        (
            f"{TINY_FLAGS} --gas 4 --hidden-size 256",
            "depend on --model-parallel-size, --pipe-parallel-size, --batch-size",
        ),
        (
            f"{TINY_FLAGS} --pipeline-chunks 9 --hidden-size 256",
            "every chunk of every pipeline stage must have at least one layer",
        ),
        (f"{TINY_FLAGS} --memory 3 --hidden-size 256", "--memory must be above the 4 GB"),
        ("--model gpt2 --machine none.json", "--machine needs a file"),
        ("--model gpt2 --machine none.json --gpu h200", "Use one of them"),
        ("--config none.yaml", "none.yaml"),
        ("--config examples/run.yaml", "--model is required, one of gpt2, t5, llama, mpt, bert, unless --load"),
        ("--model gpt2 --ranks 2", "--ranks has no effect without --calibrate"),
        ("--model gpt2 --calibrate m.json", "cannot be combined with --model"),
        ("--model gpt2 --fits --top 3", "Use one of them"),
        ("--model gpt2 --tokens many", "must be a number above 0"),
        ("--model gpt2 --fp32 --gpu l40s --memory -1", "must be a number above 0"),
    ],
)
def test_invalid_command_exits_2_with_one_message(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exc_info:
        plan.main(words.split())
    assert exc_info.value.code == 2
    assert message in capsys.readouterr().err


def test_machine_file_and_node_size_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu_machine("h200").save(tmp_path / "machine.json")
    words = (
        f"{CASES['gpt2'].replace('--gpu a100-80g', '')} --machine {tmp_path}/machine.json --gpus-per-node 4 --memory 50"
    )
    code, out = run_plan(words, capsys)
    assert code == 0 and "16 x h200 (4 per node)" in out and "at most 46.00 GB" in out
    assert "GPUS_PER_NODE=4 NNODES=4" in out


def test_unwritable_output_raises_before_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.planner import calibrate

    monkeypatch.setattr(calibrate, "calibrate", lambda *args, **kwargs: pytest.fail("it measured"))
    for path in (tmp_path / "none" / "m.json", tmp_path):
        with pytest.raises(SystemExit, match="2"):
            plan.main(["--calibrate", str(path)])
        assert f"a writable folder, got {path}" in capsys.readouterr().err


def test_calibrate_writes_measured_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.planner import calibrate

    calls = []

    def measured(ranks: int, device_type: str, *, report: object) -> object:
        calls.append((ranks, device_type))
        return gpu_machine("h20")

    monkeypatch.setattr(calibrate, "calibrate", measured)
    assert plan.main(["--calibrate", str(tmp_path / "m.json"), "--ranks", "3", "--device", "cpu"]) == 0
    assert calls == [(3, "cpu")] and "h20" in (tmp_path / "m.json").read_text()

    def broken(*_: object, **__: object) -> object:
        raise RuntimeError("rank 1 failed")

    monkeypatch.setattr(calibrate, "calibrate", broken)
    with pytest.raises(SystemExit) as exc_info:
        plan.main(["--calibrate", str(tmp_path / "m.json")])
    assert exc_info.value.code == 2 and capsys.readouterr().err == "plan.py: rank 1 failed\n"


def test_help_and_plan_import_no_torch_or_deepspeed() -> None:
    code = (
        "import sys; sys.argv = ['plan.py', {words}]\n"
        "import runpy\n"
        "try: runpy.run_path('tools/plan.py', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "slow = ('torch', 'deepspeed', 'numpy', 'yaml', 'rich', 'jinja2', 'tokenizers')\n"
        "print([name for name in slow[: 99 if '--help' in sys.argv else 3] if name in sys.modules])\n"
    )
    for words in ("'--help'", ", ".join(map(repr, CASES["gpt2, many flags"].split()))):
        result = subprocess.run(
            [sys.executable, "-c", code.format(words=words)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == "[]"


def test_hf_model_type_is_planned_as_its_family(tmp_path: Path) -> None:
    size_flags = "--num-layers 4 --hidden-size 256 --gpus 2"
    (tmp_path / "run.yaml").write_text("model: qwen3\n")
    for words in (f"--model qwen3 {size_flags}", f"--config {tmp_path / 'run.yaml'} {size_flags}"):
        _, flags, extra_words = plan.read_flags(words.split())
        config = plan.planning_task(flags, extra_words).config
        assert (flags.model, config.family, config.model.qk_norm) == ("llama", "llama", "head")
