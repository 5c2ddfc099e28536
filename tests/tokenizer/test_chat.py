"""Chat templates: ids and masks are those of `transformers`, prefixes where nothing is marked, errors that help."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from megatron.errors import DataError
from megatron.tokenizer import build
from megatron.tokenizer.chat import ChatTemplate, TemplateError, find_template
from tests.helpers.chats import (
    ALTERNATING,
    CHATML,
    CONVERSATIONS,
    LLAMA3,
    MARKED,
    TEMPLATES,
    UNMARKED,
    make_messages,
    write_tokenizer,
)

TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & 'c' é"}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def hf_tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def make_template(folder: Path, text: str) -> ChatTemplate:
    template = find_template(build("TokenizersJSON", tokenizer_path=folder), _file(folder, text))
    assert template.text == text
    return template


def _file(folder: Path, text: str) -> Path:
    path = folder / "given.jinja"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_equal_transformers(folder: Path, hf_tokenizer: Any, name: str) -> None:
    template = make_template(folder, TEMPLATES[name])
    for messages in CONVERSATIONS:
        expected = hf_tokenizer.apply_chat_template(messages, chat_template=TEMPLATES[name])["input_ids"]
        assert template.encode(messages).ids == expected
        expected_prompt = hf_tokenizer.apply_chat_template(
            messages[:-1], chat_template=TEMPLATES[name], add_generation_prompt=True
        )
        assert template.prompt_ids(messages[:-1]) == expected_prompt["input_ids"]


def test_loss_mask_of_marked_template_equals_transformers(folder: Path, hf_tokenizer: Any) -> None:
    template = make_template(folder, MARKED)
    reasoning_messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "so", "reasoning": "as I see"},
    ]
    for messages, options in [
        *((conversation, {}) for conversation in CONVERSATIONS),
        (CONVERSATIONS[0], {"tools": TOOLS}),
        (reasoning_messages, {}),
    ]:
        expected = hf_tokenizer.apply_chat_template(
            messages, chat_template=MARKED, return_assistant_tokens_mask=True, **options
        )
        encoded = template.encode(messages, **options)
        assert encoded.ids == expected["input_ids"]
        assert [int(has_loss) for has_loss in encoded.has_loss] == expected["assistant_masks"]
        assert any(encoded.has_loss)


def test_unmarked_template_has_same_mask_as_marked(folder: Path) -> None:
    marked_template, unmarked_template = make_template(folder, MARKED), make_template(folder, CHATML)
    for messages in CONVERSATIONS:
        assert unmarked_template.encode(messages) == marked_template.encode(messages)


@pytest.mark.parametrize(
    ("text", "end"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (ALTERNATING, "<|endoftext|>")]
)
def test_loss_covers_answer_and_end_of_turn(folder: Path, text: str, end: str) -> None:
    template = make_template(folder, text)
    encoded = template.encode(make_messages("Sing", "la", "again", "la la"))
    runs, previous_has_loss = [list[int]()], False
    for token, has_loss in zip(encoded.ids, encoded.has_loss, strict=True):
        if has_loss:
            runs[-1].append(token)
        elif previous_has_loss:
            runs.append([])
        previous_has_loss = has_loss
    texts = [template.tokenizer.decode(run) for run in runs if run]
    assert texts == [f"la{end}", f"la la{end}"]
    assert template.stop_id == template.tokenizer.token_to_id(end)


def test_non_prefix_rendering_is_rejected_with_remedy(folder: Path) -> None:
    messages = make_messages("a", "b", "c", "d")
    for message in messages[1::2]:
        message["reasoning_content"] = "well"
    with pytest.raises(TemplateError, match=r"up to message 2 .* \{% generation %\} .* --chat-template FILE") as error:
        make_template(folder, UNMARKED).encode(messages)
    difference = r"from character 51 on, 'b<|im_end|>\n<|im_sta' instead of '<think>\nwell\n</think'"
    assert difference in str(error.value)
    assert make_template(folder, UNMARKED).encode(make_messages("a", "b")) == make_template(folder, CHATML).encode(
        make_messages("a", "b")
    )


def test_template_rejection_is_reported_in_template_words(folder: Path) -> None:
    with pytest.raises(
        TemplateError, match="given.jinja.*rejects the conversation: roles must alternate user and assistant"
    ):
        make_template(folder, ALTERNATING).encode(make_messages("a", "b", system="s"))
    with pytest.raises(TemplateError, match="rejects the conversation"):
        make_template(folder, "{{ messages[0].content.missing.more }}").encode(make_messages("a", "b"))
    with pytest.raises(TemplateError, match="U\\+FDD0"):
        make_template(folder, CHATML).encode(make_messages("a\ufdd0", "b"))


def test_template_cannot_leave_sandbox(folder: Path) -> None:
    for text in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ (messages.append).__self__ }}"):
        with pytest.raises(TemplateError, match="rejects the conversation|unsafe"):
            make_template(folder, text + CHATML).encode(make_messages("a", "b"))


def test_invalid_jinja_is_named_with_line(folder: Path) -> None:
    with pytest.raises(DataError, match=r"given.jinja, line 2: .*--chat-template"):
        make_template(folder, "\n{% for %}")


def test_template_lines_are_stripped_of_whitespace(folder: Path, hf_tokenizer: Any) -> None:
    text = "{% for m in messages %}\n    {% if true %}\n  {{ m.content }}\n    {% endif %}\n{% break %}{% endfor %}\n"
    rendered = hf_tokenizer.apply_chat_template(make_messages("a", "b"), chat_template=text, tokenize=False)
    assert make_template(folder, text).render(make_messages("a", "b")) == rendered == "  a\n"


def test_training_data_has_no_date_and_prompt_has_one(folder: Path) -> None:
    text = "{{ strftime_now('%Y') if strftime_now is defined else 'long ago' }}" + CHATML
    template = make_template(folder, text)
    assert template.render(make_messages("a")).startswith("long ago")
    assert template.tokenizer.decode(template.prompt_ids(make_messages("a"))[:4]).isdigit()


def test_templates_are_searched_in_three_locations(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t", "from settings")
    tokenizer = build("TokenizersJSON", tokenizer_path=folder / "tokenizer.json")
    assert find_template(tokenizer).text == "from settings"
    named_templates = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": "by name"}]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": named_templates}))
    assert find_template(tokenizer).text == "by name"
    (folder / "chat_template.jinja").write_text("of its own")
    assert find_template(tokenizer).text == "of its own"
    assert find_template(tokenizer, _file(tmp_path, "given")).text == "given"
    with pytest.raises(DataError, match="--chat-template .*nowhere"):
        find_template(tokenizer, tmp_path / "nowhere")
    bare_folder = write_tokenizer(tmp_path / "bare")
    with pytest.raises(DataError, match="requires a chat template, got none next to the tokenizer.*--chat-template"):
        find_template(build("TokenizersJSON", tokenizer_path=bare_folder))


def write_named_templates(folder: Path, *, as_files: bool, default: str | None = CHATML) -> Path:
    """Write a tokenizer with the templates "default", "tool_use" and "rag", as lists or as files."""
    write_tokenizer(folder)
    texts = {"default": default, "tool_use": MARKED, "rag": "unused {% for %}"}
    texts = {name: text for name, text in texts.items() if text is not None}
    if as_files:
        (folder / "additional_chat_templates").mkdir()
        for name, text in texts.items():
            is_default = name == "default"
            path = folder / "chat_template.jinja" if is_default else folder / f"additional_chat_templates/{name}.jinja"
            path.write_text(text)
    else:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["chat_template"] = [{"name": name, "template": text} for name, text in texts.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("as_files", [False, True])
def test_named_templates_are_selected_like_transformers(tmp_path: Path, as_files: bool) -> None:
    folder = write_named_templates(tmp_path / "t", as_files=as_files)
    template = find_template(build("TokenizersJSON", tokenizer_path=folder))
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert hf_tokenizer.chat_template == {"default": template.text, **template.named}
    for options in ({}, {"tools": TOOLS}, {"tools": []}, {"tools": None}):
        expected = hf_tokenizer.apply_chat_template(CONVERSATIONS[2], **options)["input_ids"]
        assert template.encode(CONVERSATIONS[2], **options).ids == expected
    with_tools = hf_tokenizer.apply_chat_template(CONVERSATIONS[2], tools=TOOLS, return_assistant_tokens_mask=True)
    assert [int(has_loss) for has_loss in template.encode(CONVERSATIONS[2], tools=TOOLS).has_loss] == with_tools[
        "assistant_masks"
    ]
    assert template.key == make_template(folder, CHATML).key  # a run without tools resumes
    assert template.tools_key and not make_template(folder, CHATML).tools_key
    broken_template = ChatTemplate(CHATML, template.tokenizer, source="x", special={}, named={"tool_use": "{% for %}"})
    assert broken_template.encode(CONVERSATIONS[2]).ids == template.encode(CONVERSATIONS[2]).ids
    with pytest.raises(DataError, match="the chat template x, tool_use, line 1"):
        broken_template.encode(CONVERSATIONS[2], tools=TOOLS)


@pytest.mark.parametrize("as_files", [False, True])
def test_folder_with_only_tools_template_is_rejected_with_names(tmp_path: Path, as_files: bool) -> None:
    """transformers refuses conversations without tools, and renders those with tools."""
    folder = write_named_templates(tmp_path / "t", as_files=as_files, default=None)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with pytest.raises(ValueError, match="no default"):
        hf_tokenizer.apply_chat_template(CONVERSATIONS[2])
    tokenizer = build("TokenizersJSON", tokenizer_path=folder)
    with pytest.raises(DataError, match="the name \"default\" .there are 'rag', 'tool_use'... Name a file with --chat"):
        find_template(tokenizer)
    explicit_template = find_template(tokenizer, _file(tmp_path, MARKED))
    assert (
        explicit_template.encode(CONVERSATIONS[2], tools=TOOLS).ids
        == hf_tokenizer.apply_chat_template(CONVERSATIONS[2], tools=TOOLS)["input_ids"]
    )


def test_content_lists_render_like_transformers(folder: Path, hf_tokenizer: Any) -> None:
    parts_template = (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>{% endfor %}"
    )
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    expected = hf_tokenizer.apply_chat_template(messages, chat_template=parts_template)["input_ids"]
    assert make_template(folder, parts_template).prompt_ids(messages) == expected
    as_text = hf_tokenizer.apply_chat_template(messages, chat_template=LLAMA3, add_generation_prompt=True)["input_ids"]
    assert make_template(folder, LLAMA3).prompt_ids(messages) == as_text  # the list as Python prints it
    with pytest.raises(TypeError, match="concatenate"):
        hf_tokenizer.apply_chat_template(messages, chat_template=MARKED)
    with pytest.raises(TemplateError, match="rejects the conversation: .*concatenate"):
        make_template(folder, MARKED).prompt_ids(messages)


def test_template_files_take_precedence_over_settings(tmp_path: Path) -> None:
    folder = write_named_templates(tmp_path / "t", as_files=False)
    (folder / "chat_template.jinja").write_text(LLAMA3)
    tokenizer = build("TokenizersJSON", tokenizer_path=folder)
    assert find_template(tokenizer).text == LLAMA3 and find_template(tokenizer).named == {}
    (folder / "chat_template.jinja").unlink()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(MARKED)
    with pytest.raises(DataError, match="with the name \"default\" .there are 'tool_use'... Name a file"):
        find_template(tokenizer)


@pytest.mark.parametrize("text", [CHATML, LLAMA3, MARKED])
def test_zero_loss_turn_is_rendered_without_loss(folder: Path, text: str) -> None:
    template, messages = make_template(folder, text), make_messages("a", "one", "b", "two", "c", "three")
    masked = template.encode(messages, without_loss={3})
    unmasked = template.encode(messages)
    assert masked.ids == unmasked.ids
    loss_text = template.tokenizer.decode(
        [token for token, has_loss in zip(*vars(masked).values(), strict=True) if has_loss]
    )
    assert "one" in loss_text and "three" in loss_text and "two" not in loss_text
    assert sum(unmasked.has_loss) > sum(masked.has_loss) > 0
    assert not any(template.encode(messages, without_loss={1, 3, 5}).has_loss)


def test_message_of_generation_block_is_found_in_macro(folder: Path) -> None:
    macro = (
        "{% macro say(x) %}{% generation %}{{ x.content }}<|im_end|>{% endgeneration %}{% endmacro %}"
        "{% set last = messages[-1].content %}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{{ say(m) }}{% endif %}{% endfor %}"
    )
    messages = make_messages("a", "b", "c", "d")
    encoded = make_template(folder, macro).encode(messages, without_loss={1})
    assert [token for token, has_loss in zip(encoded.ids, encoded.has_loss, strict=True) if has_loss] == (
        make_template(folder, macro).tokenizer.encode_rendered("d<|im_end|>")[0]
    )
    untraceable = macro.replace("say(m)", "say({'content': m.content})")
    assert any(make_template(folder, untraceable).encode(messages).has_loss)
    with pytest.raises(TemplateError, match="weight 0, .*requires a template in which exactly one"):
        make_template(folder, untraceable).encode(messages, without_loss={1})


def test_newline_ending_turn_without_control_tokens_has_loss(folder: Path) -> None:
    template = make_template(folder, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    encoded = template.encode(make_messages("a", "b", "c", "d"))
    loss_ids = [token for token, has_loss in zip(encoded.ids, encoded.has_loss, strict=True) if has_loss]
    assert template.tokenizer.decode(loss_ids) == "assistant: b\nassistant: d\n"  # there is no generation prompt
    prompted_template = make_template(folder, template.text + "{% if add_generation_prompt %}assistant:{% endif %}")
    encoded = prompted_template.encode(make_messages("a", "b", "c", "d"))
    loss_ids = [token for token, has_loss in zip(encoded.ids, encoded.has_loss, strict=True) if has_loss]
    assert prompted_template.tokenizer.decode(loss_ids) == " b\n d\n"


@pytest.mark.parametrize("is_complete", [False, True])
def test_special_tokens_map_is_read_like_transformers(tmp_path: Path, is_complete: bool) -> None:
    folder = write_tokenizer(tmp_path / "t", "{{ bos_token }} {{ eos_token }} {{ pad_token }}")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if is_complete:
        settings["added_tokens_decoder"] = {"256": {"content": "<|endoftext|>", "special": True}}
    del settings["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    special_tokens = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": "<|eot_id|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special_tokens))
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    expected = hf_tokenizer.apply_chat_template(make_messages("a"), tokenize=False)
    assert find_template(build("TokenizersJSON", tokenizer_path=folder)).render(make_messages("a")) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (CHATML, None),
        (ALTERNATING, None),
        (CHATML.replace("im_", "turn_"), r"'<\|turn_end\|>', which is 12 ordinary tokens .*--special-tokens"
         r" '<\|turn_start\|>' '<\|turn_end\|>'$"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }} END{% endfor %}", "'END', .*--special-tokens END$"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "renders no token after .*eos_token"),
        ("{{ raise_exception('no') }}", None),
    ],
)  # fmt: skip
def test_turn_without_control_token_end_is_problem(folder: Path, text: str, problem: str | None) -> None:
    reported_problem = make_template(folder, text).end_of_turn_problem
    assert (reported_problem is None) if problem is None else re.search(problem, str(reported_problem)), (
        reported_problem
    )


def test_lone_surrogates_and_deep_nesting_raise(folder: Path) -> None:
    template = make_template(folder, CHATML)
    with pytest.raises(TemplateError, match="must not contain U\\+D83D"):
        template.encode(make_messages("a", "\ud83d"))
    with pytest.raises(TemplateError, match="must not contain U\\+DC00"):
        template.encode(make_messages("a", "b"), tools=[{"\udc00": 1}])
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateError, match="nested"):
        template.encode([{"role": "user", "content": "a", "x": deep}, make_messages("a", "b")[1]])


def test_control_token_names_come_from_folder_or_vocabulary(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t", "x")
    tokenizer = build("TokenizersJSON", tokenizer_path=folder)
    assert find_template(tokenizer).special["bos_token"] == "<|begin_of_text|>"
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    (tmp_path / "alone").mkdir()
    library.save(str(tmp_path / "alone" / "tokenizer.json"))
    bare_tokenizer = build("TokenizersJSON", tokenizer_path=tmp_path / "alone")
    special_tokens = find_template(bare_tokenizer, _file(tmp_path, "x")).special
    assert special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<pad>"}


def test_template_key_depends_on_text_and_special_tokens(folder: Path, tmp_path: Path) -> None:
    other_folder = write_tokenizer(tmp_path / "other")
    (other_folder / "tokenizer_config.json").write_text('{"bos_token": "<|im_start|>"}')
    keys = {
        make_template(folder, CHATML).key,
        make_template(folder, MARKED).key,
        make_template(other_folder, CHATML).key,
    }
    assert len(keys) == 3
    assert make_template(folder, CHATML).key == "29a7d7956a6e8e7c"  # in checkpoints


def test_unsupported_tokenizers_are_rejected() -> None:
    with pytest.raises(DataError, match="tokenizers.*library.*--tokenizer-path"):
        ChatTemplate("x", build("NullTokenizer", vocab_size=9), source="x", special={})
