"""Tokenizer files of a Hugging Face folder: chat templates by name."""

from __future__ import annotations

import json
from pathlib import Path

import transformers

from megatron.checkpoint.huggingface.tokenizer import Vocabulary, write_tokenizer
from megatron.tokenizer import build
from megatron.tokenizer.chat import find_template
from tests.helpers import chats


def test_transformers_reads_exported_named_templates(tmp_path: Path) -> None:
    source, target = chats.write_tokenizer(tmp_path / "source"), tmp_path / "target"
    texts = {"default": chats.CHATML, "tool_use": chats.MARKED, "rag": "r", "../../outside": "x"}
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": name, "template": text} for name, text in texts.items()]
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = build("TokenizersJSON", tokenizer_path=source)
    target.mkdir()
    assert write_tokenizer(target, Vocabulary(tokenizer, None, find_template(tokenizer))) is None
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(target, local_files_only=True)
    del texts["../../outside"]
    assert hf_tokenizer.chat_template == texts
    template = find_template(build("TokenizersJSON", tokenizer_path=target))
    assert {"default": template.text, **template.named} == texts
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
