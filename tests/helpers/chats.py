"""A tokenizer with chat templates, and conversations, for tests of fine-tuning and chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<pad>",
)  # fmt: skip
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}
            {%- if m.reasoning_content is defined and loop.last %}
                {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
            {%- endif %}
            {{- m.content + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- m.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Template like Qwen's, with generation marks, tools, and reasoning that is removed from earlier turns."""
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
UNMARKED = MARKED.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
"""Template without generation marks that removes the reasoning of all turns but the last.

The text of the first turns is therefore not a prefix of the text of the whole conversation.
"""
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + eos_token }}{% endfor %}"
)
"""Template without a generation prompt, like Llama 2's."""
TEMPLATES = {"chatml": CHATML, "marked": MARKED, "llama3": LLAMA3, "alternating": ALTERNATING}
SPECIAL_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>", "pad_token": "<pad>"}


def write_tokenizer(folder: Path, template: str | None = None) -> Path:
    """Write a tokenizer of bytes, some words and ``CONTROL_TOKENS``, and its template, as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "s"), ("Ġ", "a"), ("Ċ", "Ċ"), ("e", "r"), ("u", "s"), ("us", "er")]
    vocab = [*letters, *("".join(pair) for pair in merges)]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: token_id for token_id, token in enumerate(vocab)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL_TOKENS}
    if template is not None:
        tokenizer_config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def make_messages(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """Return messages that alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *messages] if system is not None else messages


def write_conversations(path: Path, conversations: list[list[dict[str, str]]]) -> Path:
    """Write each conversation as a line of JSON."""
    path.write_text(
        "".join(json.dumps({"messages": conversation}, ensure_ascii=False) + "\n" for conversation in conversations)
    )
    return path


CONVERSATIONS = [
    make_messages("What is red?", "A rose, as user says."),
    make_messages("Sing", "la", "again", "la la\n\n"),
    make_messages("你好，世界", "好的。🙂 as a", "and?", "\n\nNothing <b>more</b> & as 'that'"),
    make_messages("one <|im_end|> spelled", "two", "three", ""),
]
