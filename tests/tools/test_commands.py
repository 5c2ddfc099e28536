"""Every tool runs by a documented command, on the files of a small run."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.helpers.documented_commands import Clone, documented_commands, find_smoke_table_problems
from tests.helpers.legacy_files import NUM_HEADS, make_model, write_cpm1_checkpoint

SMOKE_COMMANDS = {
    "tools/audit.py": [
        "python tools/audit.py runs/gpt2-20260101-120000 --document 17",
        "python tools/audit.py runs/gpt2-20260101-120000 --step 120 --positions --step 12",
    ],
    "tools/average.py": [
        "python tools/average.py runs/my-run --last 4 --output runs/mean",
        "python tools/average.py runs/one runs/another --output runs/soup",
    ],
    "tools/check_accelerator.py": ["python tools/check_accelerator.py --device cpu"],
    "tools/check_layout.py": [
        "python tools/check_layout.py --model-parallel-size 2 --pipe-parallel-size 2 --pipe-parallel-size 1 --steps 1 "
        "--num-layers 2"
    ],
    "tools/compare_dumps.py": ["python tools/compare_dumps.py one two --rtol 1e-6 --picture errors.png"],
    "tools/convert_hf.py": [
        "python tools/convert_hf.py export --load runs/my-run --output my-model --dtype bf16 --verify",
        "cp -r my-model gpt2",
        "python tools/convert_hf.py import --input gpt2 --output runs/from-gpt2 --verify",
    ],
    "tools/coord_check.py": ["python tools/coord_check.py --out coord.png --widths 32 64 --steps 1"],
    "tools/count_tokens.py": [
        "python tools/count_tokens.py data/a data/b",
        "python tools/count_tokens.py --data-path 0.7 data/a 0.3 data/b --split 949,50,1 --seq-length 1024 "
        "--train-tokens 2e9 --seq-length 32",
    ],
    "tools/docs.py": ["python tools/docs.py --out FOLDER --only grid layer"],
    "tools/draw_schedule.py": [
        "python tools/draw_schedule.py --schedule zb-h1 --stages 8 --micro-batches 16",
        "python tools/draw_schedule.py --schedule zb-v --stages 4 --micro-batches 8 --csv order.csv",
        "python tools/draw_schedule.py --schedule-file order.csv",
    ],
    "tools/evaluate.py": [
        "python tools/evaluate.py --load runs/my-run --texts data/story.txt news=news.jsonl wiki=data/wiki"
    ],
    "tools/export_megatron.py": [
        "python tools/export_megatron.py --load runs/my-run --output my-megatron",
        "python tools/export_megatron.py --load runs/my-run --output my-megatron --use-distributed-optimizer "
        "--output my-other-megatron",
    ],
    "tools/generate.py": [
        "python tools/generate.py --load runs/my-run --prompt 'The tide' --prompt 'At noon' --max-new-tokens 4",
        "python tools/generate.py --load runs/my-run --max-new-tokens 4 <<< 'At noon'",
    ],
    "tools/import_checkpoint.py": [
        "python tools/import_checkpoint.py --input CPM-large --output runs/cpm1 --num-attention-heads 32 "
        f"--num-attention-heads {NUM_HEADS}"
    ],
    "tools/inspect_checkpoint.py": [
        "python tools/inspect_checkpoint.py runs/my-run",
        "python tools/inspect_checkpoint.py runs/my-run/checkpoints/step-00000020 --compare runs/other --weights-only",
    ],
    "tools/inspect_data.py": [
        "python tools/inspect_data.py data/corpus --picture lengths.png",
        "python tools/inspect_data.py data/corpus --tokenizer-path t.json --samples 3 --seq-length 1024 "
        "--eod-mask-loss --seq-length 32",
    ],
    "tools/make_big_corpus.py": ["python tools/make_big_corpus.py --bytes 2e9 --output data/big.jsonl --bytes 2e4"],
    "tools/make_sample_data.py": [
        "python tools/make_sample_data.py --number 50 --vocab-size 600 --output data/sample",
        "python tools/make_sample_data.py --print text --number 4",
    ],
    "tools/merge_data.py": [
        "python tools/merge_data.py --input data/a data/b data/c --output-prefix data/all",
        "for K in 1 2; do python tools/preprocess_data.py --input corpus.jsonl news.jsonl --tokenizer-path t.json "
        "--output-prefix data/joined --part $K/2; done",
        "python tools/merge_data.py --input data/corpus.parts --output-prefix data/corpus --input data/joined.parts "
        "--output-prefix data/joined",
    ],
    "tools/plan.py": [
        "python tools/plan.py --model gpt2 --num-layers 48 --hidden-size 8192 --gpus 512 --gpu h100-80g --num-layers 8 "
        "--gpus 8",
        "python tools/plan.py --load Qwen3-8B --gpus 8 --load runs/my-run --gpus 2",
    ],
    "tools/preprocess_data.py": [
        "python tools/preprocess_data.py --input corpus.jsonl --tokenizer-path tokenizer.json "
        "--output-prefix data/corpus --output-prefix data/again"
    ],
    "tools/report.py": ["python tools/report.py runs -o runs/all.html"],
    "tools/train_tokenizer.py": [
        "python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output tokenizer.json "
        "--vocab-size 400 --output trained.json"
    ],
    "tools/verify.py": ["python tools/verify.py runs/my-run"],
}
"""The commands of each tool, in the order in which they run: a documented command, and flags that make it small. A
repeated flag replaces the documented value."""

EXEMPT = {
    "tools/set_up.py": "tools/setup.sh starts it; every run script does so, and benchmarks/start_up.py runs one",
    "tools/referee.py": "tests/tools/test_referee.py runs it on dumps, which another program writes",
}

TRAIN_COMMAND = (
    "python pretrain_gpt2.py --device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 "
    "--batch-size 2 --gas 1 --train-iters 20 --save-interval 5 --eval-iters 1 --lr 1e-3 --data-path data/corpus "
    "--tokenizer-path tokenizer.json --split 900,50,50 --save runs/my-run --debug-dump one --debug-dump-steps 1"
)


def test_every_tool_has_documented_smoke_command() -> None:
    assert find_smoke_table_problems(SMOKE_COMMANDS, EXEMPT, "tools") == []


def test_missing_and_outdated_smoke_commands_are_reported() -> None:
    smoke = {**SMOKE_COMMANDS, "tools/report.py": ["python tools/report.py old-runs"], "tools/gone.py": []}
    del smoke["tools/plan.py"]
    problems = find_smoke_table_problems(smoke, EXEMPT, "tools")
    assert [problem.split()[0] for problem in problems] == ["tools/plan.py", "tools/gone.py", "'python"]


def test_documented_commands_join_lines_and_drop_comments() -> None:
    assert "python tools/report.py runs" in documented_commands("tools/report.py")
    assert (
        documented_commands("tools/average.py")[-1]
        == "python tools/average.py runs/one runs/another --output runs/soup"
    )
    assert any("--data-parallel-size 2 --num-layers 6" in line for line in documented_commands("tools/check_layout.py"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone with a small corpus, its tokens, a trained run and a released checkpoint, named as in the docstrings."""
    clone = Clone(tmp_path_factory.mktemp("clone"))
    folder = clone.folder
    clone.run("python tools/make_sample_data.py --print json --number 200 > corpus.jsonl")
    clone.run("python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 400 --output tokenizer.json")
    shutil.copy(folder / "tokenizer.json", folder / "t.json")
    clone.run(
        "python tools/preprocess_data.py --input corpus.jsonl --tokenizer-path tokenizer.json "
        "--output-prefix data/corpus"
    )
    for name in ("a", "b", "c", "wiki"):
        for suffix in (".bin", ".idx", ".meta.json"):
            shutil.copy(folder / f"data/corpus{suffix}", folder / f"data/{name}{suffix}")
    texts = [json.loads(line)["text"] for line in (folder / "corpus.jsonl").read_text("utf-8").splitlines()[:3]]
    (folder / "data/story.txt").write_text(texts[0], encoding="utf-8")
    (folder / "news.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    clone.run(TRAIN_COMMAND)
    shutil.copytree(folder / "one", folder / "two")
    for name in ("one", "another", "other", "gpt2-20260101-120000"):
        shutil.copytree(folder / "runs/my-run", folder / "runs" / name)
    weights = {name: parameter.detach() for name, parameter in make_model().named_parameters()}
    write_cpm1_checkpoint(folder / "CPM-large", weights)
    return clone


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", SMOKE_COMMANDS)
def test_documented_tool_commands_run(tool: str, clone: Clone) -> None:
    for command in SMOKE_COMMANDS[tool]:
        clone.run(command)


@pytest.mark.slow
def test_failing_command_raises_with_its_output(clone: Clone) -> None:
    with pytest.raises(AssertionError, match="(?s)exit code 3.*nowhere"):
        clone.run("python tools/inspect_checkpoint.py nowhere")
