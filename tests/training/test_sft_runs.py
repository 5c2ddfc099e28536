"""Runs on conversations: resumed to the bit in mid-epoch, exported while they train, and talked to."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.tensorboard  # noqa: F401 - imported once, not by every fork
import transformers

from megatron.checkpoint.huggingface import convert
from megatron.checkpoint.one_process import open_folder
from megatron.generate.options import parse_args
from megatron.generate.text import ChatPrompts
from megatron.tokenizer import build
from megatron.tokenizer.chat import find_template
from megatron.training.callbacks import hf_exporter
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.chats import CHATML, CONVERSATIONS, make_messages, write_conversations, write_tokenizer
from tests.helpers.instruct_folders import read_files, write_instruct_folder
from tests.helpers.runs import launch_script
from tests.training.test_saves_in_runs import assert_equal_state
from tools import generate

BASE_FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --hidden-bias --seq-length 96 --batch-size 1 --gas 2 "
    "--lr 3e-3 --log-interval 1 --eval-iters 1 --eval-interval 4 --split 8,1,1 --device cpu --progress plain "
    "--train-iters 6 --hidden-dropout 0.1 --max-position-embeddings 160 --activation gelu-tanh"
)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("sft"), CHATML)
    write_conversations(
        folder / "c.jsonl", [*CONVERSATIONS, *(make_messages(f"question {n}", f"the answer {n}") for n in range(40))]
    )
    return folder


def make_argv(data_dir: Path, run_dir: Path, extra_flags: str = "") -> list[str]:
    return (
        f"{BASE_FLAGS} --sft {data_dir / 'c.jsonl'} --tokenizer-path {data_dir} --save {run_dir} {extra_flags}".split()
    )


@pytest.fixture(scope="module")
def uninterrupted_run(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was not stopped, and exported at steps 4 and 6."""
    folder = tmp_path_factory.mktemp("runs")
    extra_flags = "--export-hf-interval 4 --async-save --save-interval 3 --keep-last 1"
    assert launch_script(1, make_argv(data_dir, folder / "run", extra_flags), folder / "log") == [0], (
        folder / "log"
    ).read_text()
    return folder


def read_losses(run_dir: Path) -> list[tuple[str, int, float]]:
    records = read_metrics(run_dir / "metrics.jsonl")
    return [(record["kind"], record["step"], record["loss"]) for record in records if "loss" in record]


def test_sft_run_resumes_bitwise_within_epoch(uninterrupted_run: Path, data_dir: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    assert launch_script(1, make_argv(data_dir, run_dir, "--exit-interval 3"), log) == [75], log.read_text()
    assert launch_script(1, make_argv(data_dir, run_dir, f"--load {run_dir}"), log) == [0], log.read_text()
    assert read_losses(run_dir) == read_losses(uninterrupted_run / "run")
    assert {kind for kind, _, _ in read_losses(run_dir)} == {"train", "valid", "test"}
    assert_equal_state(open_folder(run_dir), open_folder(uninterrupted_run / "run"))
    epochs = [record["epoch"] for record in read_metrics(run_dir / "metrics.jsonl") if record["kind"] == "train"]
    assert 0 < epochs[2] < 1


@pytest.mark.slow
def test_changed_conversations_are_rejected(uninterrupted_run: Path, data_dir: Path, tmp_path: Path) -> None:
    """The sibling without a run: the fingerprint in tests/data/test_sft.py."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    changed_path = write_conversations(tmp_path / "c.jsonl", CONVERSATIONS * 3)
    changed_argv = [
        str(changed_path) if arg.endswith("c.jsonl") else arg
        for arg in make_argv(data_dir, run_dir, f"--load {uninterrupted_run / 'run'}")
    ]
    assert launch_script(1, [*changed_argv, "--train-iters", "9"], log) == [3]
    assert "the data differ from the data of the checkpoint" in log.read_text()


def test_hf_exports_are_written_next_to_checkpoints(uninterrupted_run: Path, data_dir: Path, tmp_path: Path) -> None:
    run_dir, log_text = uninterrupted_run / "run", (uninterrupted_run / "log").read_text()
    assert sorted(path.name for path in (run_dir / "hf").iterdir()) == ["step-00000004", "step-00000006"]
    assert [path.name for path in (run_dir / "checkpoints").glob("step-*")] == ["step-00000006"]
    assert log_text.count("| exported ") == 2
    export_dir = run_dir / "hf" / "step-00000006"
    convert.export(open_folder(run_dir), tmp_path / "by-hand")
    for name in sorted(path.name for path in (tmp_path / "by-hand").iterdir()):
        assert (export_dir / name).read_bytes() == (tmp_path / "by-hand" / name).read_bytes(), name
    assert (export_dir / "chat_template.jinja").exists()
    assert (export_dir / "chat_template.jinja").read_text() == CHATML
    tokenizer = transformers.AutoTokenizer.from_pretrained(export_dir, local_files_only=True)
    source_tokenizer = transformers.AutoTokenizer.from_pretrained(data_dir, local_files_only=True)
    for messages in CONVERSATIONS:
        assert tokenizer.apply_chat_template(messages) == source_tokenizer.apply_chat_template(messages)
    end_ids = [tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|endoftext|>")]
    assert json.loads((export_dir / "generation_config.json").read_text())["eos_token_id"] == end_ids


def test_greedy_chat_equals_transformers(uninterrupted_run: Path) -> None:
    """fp32, one turn; the exported folder on the one side, the checkpoint on the other."""
    run_dir, question = uninterrupted_run / "run", "question 7"
    export_dir = run_dir / "hf" / "step-00000006"
    tokenizer = transformers.AutoTokenizer.from_pretrained(export_dir, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(export_dir, dtype=torch.float32, local_files_only=True)
    assert model.generation_config.eos_token_id == [
        tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    ]  # fmt: skip
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": question}]
    inputs: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    with torch.no_grad():
        expected = model.eval().generate(**inputs, max_new_tokens=12, do_sample=False)[
            0, inputs["input_ids"].shape[1] :
        ]
    (answer,) = (
        json.loads(line) for line in run_chat(run_dir, "--system", "s", "--prompt", question, "--json").splitlines()
    )
    assert answer["tokens"] == expected.tolist()
    assert answer["num_prompt_tokens"] == inputs["input_ids"].shape[1] and answer["prompt"] == question


def run_chat(run_dir: Path, *options: str) -> str:
    options = (*options, *([] if "--max-new-tokens" in options else ["--max-new-tokens", "12"]))
    output, base_options = io.StringIO(), ["--load", str(run_dir), "--chat", "--device", "cpu"]
    with redirect_stdout(output):
        generate.run(parse_args("", [*base_options, *options]), {})
    return output.getvalue()


def test_chat_prompt_includes_previous_turns(uninterrupted_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read at the second turn is the whole conversation, in which the model's own answer stands."""
    prompts: list[list[int]] = []
    original_encode = ChatPrompts.encode

    def record_encode(self: ChatPrompts, text: str) -> list[int]:
        prompts.append(original_encode(self, text))
        return prompts[-1]

    monkeypatch.setattr(ChatPrompts, "encode", record_encode)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"question 7\nand 8?\n")))
    answers: list[str] = []
    original_remember = ChatPrompts.remember

    def record_answer(self: ChatPrompts, text: str, answer: str) -> None:
        answers.append(answer)
        original_remember(self, text, answer)

    monkeypatch.setattr(ChatPrompts, "remember", record_answer)
    output = run_chat(uninterrupted_run / "run", "--max-new-tokens", "6")
    first_answer = answers[0]
    assert output == "".join(f"{answer}\n" for answer in answers) and len(answers) == 2
    template = find_template(build("TokenizersJSON", tokenizer_path=uninterrupted_run / "run" / "hf" / "step-00000006"))
    assert prompts == [
        template.prompt_ids(make_messages("question 7")),
        template.prompt_ids(make_messages("question 7", first_answer, "and 8?")),
    ]
    assert run_chat(uninterrupted_run / "run", "--max-new-tokens", "6", "--prompt", "question 7") == f"{first_answer}\n"
    assert ChatPrompts(template).eos_id == template.tokenizer.token_to_id("<|im_end|>")


@pytest.mark.slow
def test_failed_export_does_not_end_run(data_dir: Path, tmp_path: Path) -> None:
    def inject_fault(rank: int) -> None:
        def raise_no_space(*_: Any, **__: Any) -> None:
            raise OSError("No space left on device")

        hf_exporter.export = raise_no_space  # type: ignore[assignment]

    run_dir, log = tmp_path / "run", tmp_path / "log"
    extra_flags = "--train-iters 2 --export-hf-interval 1 --eval-iters 0 --pipe-parallel-size 2"
    assert launch_script(2, make_argv(data_dir, run_dir, extra_flags), log, inject_fault) == [0, 0], log.read_text()
    text = log.read_text()
    assert text.count("NOT EXPORTED") == 2 and "No space left on device. The run continues" in text
    assert open_folder(run_dir).step == 2


@pytest.mark.slow
def test_instruct_folder_survives_training_resume_and_export(tmp_path: Path) -> None:
    """Its control tokens, templates, generation settings and unknown keys, on two stages and then on one process.

    The siblings of the short run: tests/checkpoint/huggingface/test_origin.py, and a folder's start in test_pretrained.
    """
    source = write_instruct_folder(tmp_path / "source")
    expected = {name: content for name, content in read_files(source).items() if name != "generation_config.json"}
    expected["chat_template.jinja"] = CHATML.encode()
    data = write_conversations(
        tmp_path / "c.jsonl", [*CONVERSATIONS, *(make_messages(f"question {n}", f"yes {n}") for n in range(20))]
    )
    (tmp_path / "chatml.jinja").write_text(CHATML)
    run_dir, log = tmp_path / "run", tmp_path / "log"
    base_args = (
        f"--sft {data} --tokenizer-path {source} --chat-template {tmp_path / 'chatml.jinja'} --save {run_dir} "
        "--seq-length 96 --batch-size 1 --gas 2 --lr 1e-3 --eval-iters 0 --device cpu --progress plain --split 1,0,0 "
        "--attention-dropout 0 --hidden-dropout 0"
    )
    first_args = f"{base_args} --load {source} --finetune --train-iters 1 --export-hf-interval 1 --pipe-parallel-size 2"
    assert launch_script(2, first_args.split(), log) == [0, 0], log.read_text()
    assert launch_script(1, f"{base_args} --load {run_dir} --train-iters 2".split(), log) == [0], log.read_text()
    (tmp_path / "chatml.jinja").unlink()
    convert.export(open_folder(run_dir), tmp_path / "by-hand")
    im_end_id = transformers.AutoTokenizer.from_pretrained(source, local_files_only=True).convert_tokens_to_ids(
        "<|im_end|>"
    )
    source_generation = json.loads((source / "generation_config.json").read_text())
    for folder in (run_dir / "hf" / "step-00000001", tmp_path / "by-hand"):
        exported_files = read_files(folder)
        exported_generation = json.loads(exported_files.pop("generation_config.json"))
        assert exported_generation == {
            **source_generation,
            "eos_token_id": [im_end_id, *source_generation["eos_token_id"]],
        }
        assert exported_files == expected
