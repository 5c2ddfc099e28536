"""docs/after_pretraining.md runs as it stands: its commands, with a tiny Qwen3 of random weights in the folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tokenizers

from megatron.data.conversations import parse_record
from megatron.data.sft_dataset import ConversationFile
from megatron.tokenizer import build
from megatron.tokenizer.chat import find_template
from tests.docs.test_tutorial import ROOT, ClonedFolder
from tests.helpers.chats import CONVERSATIONS, write_tokenizer
from tests.helpers.huggingface_models import save_small_qwen3

PAGES = [ROOT / "docs" / "after_pretraining.md", ROOT / "docs" / "zh" / "after_pretraining.md"]
EXAMPLE = ROOT / "examples" / "sft"


def read_commands(page: Path) -> list[str]:
    return [line for line in re.findall(r"^    (\S.*)$", page.read_text(encoding="utf-8"), re.M) if ".venv" not in line]


def test_example_conversations_load_with_template(tmp_path: Path) -> None:
    tokenizer = build("TokenizersJSON", tokenizer_path=write_tokenizer(tmp_path))
    template = find_template(tokenizer, EXAMPLE / "chatml.jinja")
    assert "{%- generation %}" in template.text and template.stop_id == tokenizer.token_to_id("<|im_end|>")
    file = ConversationFile(EXAMPLE / "conversations.jsonl", template, capacity=2049)
    assert (file.num_documents, file.num_truncated, file.num_dropped) == (12, 0, 0)
    for messages in CONVERSATIONS:
        encoded = template.encode(messages)
        ends = [
            token == template.stop_id and has_loss
            for token, has_loss in zip(encoded.ids, encoded.has_loss, strict=True)
        ]
        assert sum(ends) == sum(message["role"] == "assistant" for message in messages)


@pytest.mark.parametrize("page", PAGES, ids=("english", "chinese"))
def test_documented_line_and_error_match_parser(page: Path) -> None:
    (line,) = re.findall(r"^```json\n(.*)\n```$", page.read_text(encoding="utf-8"), re.M)
    assert len(parse_record(line.encode()).messages) == 3
    (error,) = re.findall(r"^error: chats.jsonl:17: (.*)$", page.read_text(encoding="utf-8"), re.M)
    bad = {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}
    with pytest.raises(ValueError, match=re.escape(error)):
        parse_record(json.dumps(bad).encode())


@pytest.mark.slow
def test_commands_fine_tune_export_and_chat(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")

    clone = ClonedFolder(tmp_path)
    model_dir = write_tokenizer(tmp_path / "models" / "Qwen3-0.6B")
    vocab_size = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json")).get_vocab_size()
    save_small_qwen3(model_dir, vocab_size + 24)  # the published tables have more rows than tokens, too
    train_command, chat_command, prompt_command, average_command, export_command = read_commands(PAGES[0])
    shorter = train_command.replace("SEQLEN=2048", "SEQLEN=192 GAS=1").replace("--train-iters 100", "--train-iters 4")
    shorter = re.sub(r"(--(?:eval|save|export-hf)-interval) 50", r"\1 2", shorter)
    trained = clone.run(shorter)
    assert "loss only on the assistant" in " ".join(trained.replace("│", " ").split())
    assert trained.count("| exported ") == 2 and "test loss" in trained
    assert clone.run(f"{chat_command} --max-new-tokens 3 < /dev/null") == ""
    assert clone.run(f"{prompt_command} --max-new-tokens 3")
    clone.run(average_command)
    clone.run(export_command)
    for folder in ("my-chat", "runs/my-sft/hf/step-00000004"):
        exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert exported.config.model_type == "qwen3"
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        ids = tokenizer.apply_chat_template(CONVERSATIONS[0], return_assistant_tokens_mask=True)
        assert any(ids["assistant_masks"])
