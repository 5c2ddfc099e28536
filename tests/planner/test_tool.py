"""The command: its words, its exit codes, what it prints, and that its lines start a run."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config import parse
from megatron.config.option import RUN_SCRIPTS
from megatron.planner.devices import device
from megatron.planner.layout import layout_of
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
}


def run(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = plan.main(words.split())
    return code, capsys.readouterr().out


def script_words(lines: list[str], family: str) -> tuple[list[str], int, list[str]]:
    """Return the flags that the run script makes of pasted lines, the ranks, and its recipe, as tools/run.sh does."""
    pasted = shlex.split(" ".join(line.removesuffix("\\") for line in lines))
    start = pasted.index("bash")
    given = dict(word.split("=") for word in pasted[:start])
    assert pasted[start + 1] == RUN_SCRIPTS[family]
    script = (ROOT / RUN_SCRIPTS[family]).read_text()
    shared = (ROOT / "tools/run.sh").read_text()
    own = script.split("\nown=(")[1].split(")")[0].split()
    flags = dict(zip(own[1::2], own[::2], strict=True))
    flags |= {line.split()[2]: line.split()[1] for line in shared.splitlines() if line.startswith("add --")}
    words = [word for name, value in given.items() if name in flags for word in (flags[name], value)]
    recipe = shlex.split(script.split('\nrecipe="')[1].split('"')[0])
    ranks = int(given["GPUS_PER_NODE"]) * int(given["NNODES"])
    missing = set(given) - set(flags) - {"GPUS_PER_NODE", "NNODES"}
    assert not missing, "a variable that the run script does not know"
    return [*words, *pasted[start + 2 :]], ranks, recipe


@pytest.mark.parametrize("name", list(CASES))
def test_the_pasted_lines_are_taken_by_the_parser_and_make_the_layout(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    family = CASES[name].split()[1]
    code, out = run(CASES[name] + " --json --top 3", capsys)
    assert code == 0
    for one in json.loads(out)["layouts"]:
        words, ranks, recipe = script_words(one["lines"], family)
        env = {"MEGATRON_DEFAULTS": shlex.join(recipe)}
        config = parse([*words, "--dry-run"], world_size=ranks, env=env, family=family)
        layout = layout_of(config, ranks)
        wanted = {key: value for key, value in one["layout"].items() if key != "waiting"}
        assert {key: getattr(layout, key) for key in wanted} == wanted
        assert layout.global_batch_size == 64
        expected = plan.question(*plan.make_parser("").parse_known_args(CASES[name].split())).config
        assert config.identity() == expected.identity()


def test_the_ranking_tells_time_memory_messages_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(CASES["gpt2"] + " --tokens 1e9", capsys)
    assert code == 0
    for word in (
        "tokens/s",
        "MFU",
        "bubble",
        "days for 1e+09 tokens",
        "tensor",
        "pipeline",
        "data",
        "bash run_gpt2.sh",
    ):
        assert word in out
    for part in ("weights", "gradients", "optimizer", "activations", "logits", "buffers"):
        assert part in out
    assert "assumed: --num-attention-heads 8 --seq-length 2048 --vocab-size 50304" in out


def test_a_layout_that_does_not_fit_ends_with_code_1_and_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--fits --model gpt2 --num-layers 24 --hidden-size 4096 --gpus 8 --gpu a100-80g --model-parallel-size 2 "
    code, out = run(words + "--batch-size 16 --gas 2", capsys)
    assert code == 1
    assert "does not fit: stage 0 needs" in out and "its largest part is activations" in out
    assert "what makes it fit, the fastest first:" in out
    code, out = run(words + "--batch-size 1 --gas 8 --zero-stage 1 --json", capsys)
    assert code == 0 and json.loads(out)["fits"] is True
    code, out = run("--model gpt2 --num-layers 96 --hidden-size 16384 --gpus 8", capsys)
    assert code == 1 and "no layout fits" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "--model must be given"),
        ("--model gpt3", "invalid choice"),
        ("--model gpt2 --gpu a1000", "--gpu must be one of"),
        ("--model gpt2 --num-layer 4", "--num-layer"),
        ("--model gpt2 --gpus 0", "at least 1, got '0'"),
        ("--model gpt2 --hidden-size 100 --num-attention-heads 3", "must be a multiple of --num-attention-heads"),
        ("--model gpt2 --lr 1", "--lr changes nothing in a plan"),
        ("--model gpt2 --gpus 7 --model-parallel-size 2 --hidden-size 256", "no layout divides 7 devices"),
        (
            "--model gpt2 --fits --gpus 7 --model-parallel-size 2 --hidden-size 256",
            "must be a multiple of tensor x pipe",
        ),
        ("--model gpt2 --zero-stage 2 --pipe-parallel-size 2 --hidden-size 256", "cannot be in a pipeline"),
        ("--model gpt2 --machine none.json", "--machine needs a file"),
        ("--model gpt2 --machine none.json --gpu h200", "give one of them"),
        ("--model gpt2 --ranks 2", "--ranks acts with --calibrate only"),
        ("--model gpt2 --calibrate m.json", "does nothing else, got --model"),
        ("--model gpt2 --fits --top 3", "give one of them"),
        ("--model gpt2 --tokens many", "must be a number above 0"),
        ("--model gpt2 --fp32 --gpu l40s --memory -1", "must be a number above 0"),
    ],
)
def test_what_cannot_be_ends_with_code_2_and_one_clear_message(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        plan.main(words.split())
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_machine_from_a_file_and_other_nodes_are_planned_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device("h200").save(tmp_path / "machine.json")
    words = (
        f"{CASES['gpt2'].replace('--gpu a100-80g', '')} --machine {tmp_path}/machine.json --gpus-per-node 4 --memory 50"
    )
    code, out = run(words, capsys)
    assert code == 0 and "16 x h200 (4 in a node)" in out and "at most 46.00 GB" in out
    assert "GPUS_PER_NODE=4 NNODES=4" in out


def test_calibrate_writes_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.planner import calibrate

    asked = []

    def measured(ranks: int, kind: str, *, tell: object) -> object:
        asked.append((ranks, kind))
        return device("h20")

    monkeypatch.setattr(calibrate, "calibrate", measured)
    assert plan.main(["--calibrate", str(tmp_path / "m.json"), "--ranks", "3", "--device", "cpu"]) == 0
    assert asked == [(3, "cpu")] and "h20" in (tmp_path / "m.json").read_text()


def test_help_and_a_plan_import_neither_torch_nor_deepspeed() -> None:
    told = (
        "import sys; sys.argv = ['plan.py', {words}]\n"
        "import time, runpy\n"
        "try: runpy.run_path('tools/plan.py', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(time.process_time(), [name for name in ('torch', 'deepspeed', 'numpy') if name in sys.modules])\n"
    )
    for words in ("'--help'", ", ".join(map(repr, CASES["gpt2"].split()))):
        done = subprocess.run(
            [sys.executable, "-c", told.format(words=words)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        seconds, imported = done.stdout.splitlines()[-1].split(maxsplit=1)
        assert imported == "[]"
        assert "help" not in words or float(seconds) < 0.5
