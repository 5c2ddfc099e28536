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
from tests.helpers.chats import CHATML, SOME, turns, write_conversations, write_tokenizer
from tests.helpers.instruct_folders import files_in, write_folder
from tests.helpers.runs import start_script
from tests.training.test_saves_in_runs import assert_same
from tools import generate

SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --hidden-bias --seq-length 96 --batch-size 1 --gas 2 "
    "--lr 3e-3 --log-interval 1 --eval-iters 1 --eval-interval 4 --split 8,1,1 --device cpu --progress plain "
    "--train-iters 6 --hidden-dropout 0.1 --max-position-embeddings 160 --activation gelu-tanh"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("sft"), CHATML)
    write_conversations(folder / "c.jsonl", [*SOME, *(turns(f"question {n}", f"the answer {n}") for n in range(40))])
    return folder


def argv(place: Path, run: Path, more: str = "") -> list[str]:
    return f"{SIZES} --sft {place / 'c.jsonl'} --tokenizer-path {place} --save {run} {more}".split()


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was not stopped, and exported at steps 4 and 6."""
    folder = tmp_path_factory.mktemp("runs")
    more = "--export-hf-interval 4 --async-save --save-interval 3 --keep-last 1"
    assert start_script(1, argv(place, folder / "run", more), folder / "log") == [0], (folder / "log").read_text()
    return folder


def losses(run: Path) -> list[tuple[str, int, float]]:
    records = read_metrics(run / "metrics.jsonl")
    return [(one["kind"], one["step"], one["loss"]) for one in records if "loss" in one]


def test_a_run_goes_on_in_mid_epoch_to_the_bit(whole: Path, place: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    assert start_script(1, argv(place, run, "--exit-interval 3"), log) == [75], log.read_text()
    assert start_script(1, argv(place, run, f"--load {run}"), log) == [0], log.read_text()
    assert losses(run) == losses(whole / "run")
    assert {kind for kind, _, _ in losses(run)} == {"train", "valid", "test"}
    assert_same(open_folder(run), open_folder(whole / "run"))
    epochs = [one["epoch"] for one in read_metrics(run / "metrics.jsonl") if one["kind"] == "train"]
    assert 0 < epochs[2] < 1


@pytest.mark.slow
def test_other_conversations_are_refused(whole: Path, place: Path, tmp_path: Path) -> None:
    """The sibling without a run: the fingerprint in tests/data/test_sft.py."""
    run, log = tmp_path / "run", tmp_path / "log"
    changed = write_conversations(tmp_path / "c.jsonl", SOME * 3)
    again = [str(changed) if word.endswith("c.jsonl") else word for word in argv(place, run, f"--load {whole / 'run'}")]
    assert start_script(1, [*again, "--train-iters", "9"], log) == [3]
    assert "the data differ from the data of the checkpoint" in log.read_text()


def test_folders_appear_beside_checkpoints(whole: Path, place: Path, tmp_path: Path) -> None:
    run, text = whole / "run", (whole / "log").read_text()
    assert sorted(path.name for path in (run / "hf").iterdir()) == ["step-00000004", "step-00000006"]
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000006"]
    assert text.count("| exported ") == 2
    folder = run / "hf" / "step-00000006"
    convert.export(open_folder(run), tmp_path / "by-hand")
    for name in sorted(path.name for path in (tmp_path / "by-hand").iterdir()):
        assert (folder / name).read_bytes() == (tmp_path / "by-hand" / name).read_bytes(), name
    assert (folder / "chat_template.jinja").exists()
    assert (folder / "chat_template.jinja").read_text() == CHATML
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    theirs = transformers.AutoTokenizer.from_pretrained(place, local_files_only=True)
    for messages in SOME:
        assert tokenizer.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    ends = [tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|endoftext|>")]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == ends


def test_a_chat_is_the_greedy_text_of_transformers(whole: Path) -> None:
    """fp32, one turn; the exported folder on the one side, the checkpoint on the other."""
    run, question = whole / "run", "question 7"
    folder = run / "hf" / "step-00000006"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    assert model.generation_config.eos_token_id == [
        tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    ]  # fmt: skip
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": question}]
    given: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    with torch.no_grad():
        wanted = model.eval().generate(**given, max_new_tokens=12, do_sample=False)[0, given["input_ids"].shape[1] :]
    (found,) = (json.loads(line) for line in chat(run, "--system", "s", "--prompt", question, "--json").splitlines())
    assert found["tokens"] == wanted.tolist()
    assert found["num_prompt_tokens"] == given["input_ids"].shape[1] and found["prompt"] == question


def chat(run: Path, *words: str) -> str:
    words = (*words, *([] if "--max-new-tokens" in words else ["--max-new-tokens", "12"]))
    out, always = io.StringIO(), ["--load", str(run), "--chat", "--device", "cpu"]
    with redirect_stdout(out):
        generate.run(parse_args("", [*always, *words]), {})
    return out.getvalue()


def test_a_conversation_remembers_its_turns(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read at the second turn is the whole conversation, in which the model's own answer stands."""
    read: list[list[int]] = []
    encode = ChatPrompts.encode

    def noted(self: ChatPrompts, text: str) -> list[int]:
        read.append(encode(self, text))
        return read[-1]

    monkeypatch.setattr(ChatPrompts, "encode", noted)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"question 7\nand 8?\n")))
    answered: list[str] = []
    remember = ChatPrompts.remember

    def kept(self: ChatPrompts, text: str, answer: str) -> None:
        answered.append(answer)
        remember(self, text, answer)

    monkeypatch.setattr(ChatPrompts, "remember", kept)
    said = chat(whole / "run", "--max-new-tokens", "6")
    first = answered[0]
    assert said == "".join(f"{answer}\n" for answer in answered) and len(answered) == 2
    template = find_template(build("TokenizersJSON", tokenizer_path=whole / "run" / "hf" / "step-00000006"))
    assert read == [template.prompt_ids(turns("question 7")), template.prompt_ids(turns("question 7", first, "and 8?"))]
    assert chat(whole / "run", "--max-new-tokens", "6", "--prompt", "question 7") == f"{first}\n"
    assert ChatPrompts(template).eos_id == template.tokenizer.token_to_id("<|im_end|>")


@pytest.mark.slow
def test_an_export_that_fails_does_not_end_the_run(place: Path, tmp_path: Path) -> None:
    def plant(rank: int) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise OSError("No space left on device")

        hf_exporter.export = fail  # type: ignore[assignment]

    run, log = tmp_path / "run", tmp_path / "log"
    more = "--train-iters 2 --export-hf-interval 1 --eval-iters 0 --pipe-parallel-size 2"
    assert start_script(2, argv(place, run, more), log, plant) == [0, 0], log.read_text()
    text = log.read_text()
    assert text.count("NOT EXPORTED") == 2 and "No space left on device. The run continues" in text
    assert open_folder(run).step == 2


@pytest.mark.slow
def test_an_instruct_folder_reaches_its_exports_through_training_and_a_resume(tmp_path: Path) -> None:
    """Its control tokens, templates, generation settings and unknown keys, on two stages and then on one process.

    The siblings of the short run: tests/checkpoint/huggingface/test_origin.py, and a folder's start in test_pretrained.
    """
    source = write_folder(tmp_path / "source")
    wanted = {name: content for name, content in files_in(source).items() if name != "generation_config.json"}
    wanted["chat_template.jinja"] = CHATML.encode()
    data = write_conversations(tmp_path / "c.jsonl", [*SOME, *(turns(f"question {n}", f"yes {n}") for n in range(20))])
    (tmp_path / "chatml.jinja").write_text(CHATML)
    run, log = tmp_path / "run", tmp_path / "log"
    words = (
        f"--sft {data} --tokenizer-path {source} --chat-template {tmp_path / 'chatml.jinja'} --save {run} "
        "--seq-length 96 --batch-size 1 --gas 2 --lr 1e-3 --eval-iters 0 --device cpu --progress plain --split 1,0,0 "
        "--attention-dropout 0 --hidden-dropout 0"
    )
    first = f"{words} --load {source} --finetune --train-iters 1 --export-hf-interval 1 --pipe-parallel-size 2"
    assert start_script(2, first.split(), log) == [0, 0], log.read_text()
    assert start_script(1, f"{words} --load {run} --train-iters 2".split(), log) == [0], log.read_text()
    (tmp_path / "chatml.jinja").unlink()
    convert.export(open_folder(run), tmp_path / "by-hand")
    turn = transformers.AutoTokenizer.from_pretrained(source, local_files_only=True).convert_tokens_to_ids("<|im_end|>")
    generation = json.loads((source / "generation_config.json").read_text())
    for folder in (run / "hf" / "step-00000001", tmp_path / "by-hand"):
        found = files_in(folder)
        ended = json.loads(found.pop("generation_config.json"))
        assert ended == {**generation, "eos_token_id": [turn, *generation["eos_token_id"]]}
        assert found == wanted
