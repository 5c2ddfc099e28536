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
from tests.helpers.chats import ALTERNATING, CHATML, FORGETTING, LLAMA3, MARKED, SOME, TEMPLATES, turns, write_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & 'c' é"}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def chat(folder: Path, text: str) -> ChatTemplate:
    found = find_template(build("TokenizersJSON", tokenizer_path=folder), _file(folder, text))
    assert found.text == text
    return found


def _file(folder: Path, text: str) -> Path:
    path = folder / "given.jinja"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_ids_are_those_of_transformers(folder: Path, theirs: Any, name: str) -> None:
    template = chat(folder, TEMPLATES[name])
    for messages in SOME:
        expected = theirs.apply_chat_template(messages, chat_template=TEMPLATES[name])["input_ids"]
        assert template.encode(messages).ids == expected
        begun = theirs.apply_chat_template(messages[:-1], chat_template=TEMPLATES[name], add_generation_prompt=True)
        assert template.prompt_ids(messages[:-1]) == begun["input_ids"]


def test_the_loss_mask_of_a_marked_template_is_that_of_transformers(folder: Path, theirs: Any) -> None:
    template = chat(folder, MARKED)
    thinking = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "so", "reasoning": "as I see"}]
    for messages, more in [*((one, {}) for one in SOME), (SOME[0], {"tools": TOOLS}), (thinking, {})]:
        wanted = theirs.apply_chat_template(messages, chat_template=MARKED, return_assistant_tokens_mask=True, **more)
        found = template.encode(messages, **more)
        assert found.ids == wanted["input_ids"]
        assert [int(said) for said in found.is_said] == wanted["assistant_masks"]
        assert any(found.is_said)


def test_a_template_without_marks_has_the_mask_of_the_one_with_marks(folder: Path) -> None:
    marked, plain = chat(folder, MARKED), chat(folder, CHATML)
    for messages in SOME:
        assert plain.encode(messages) == marked.encode(messages)


@pytest.mark.parametrize(
    ("text", "end"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (ALTERNATING, "<|endoftext|>")]
)
def test_what_is_said_is_the_answer_and_its_end(folder: Path, text: str, end: str) -> None:
    template = chat(folder, text)
    found = template.encode(turns("Sing", "la", "again", "la la"))
    runs, before = [list[int]()], False
    for token, said in zip(found.ids, found.is_said, strict=True):
        if said:
            runs[-1].append(token)
        elif before:
            runs.append([])
        before = said
    texts = [template.tokenizer.decode(run) for run in runs if run]
    assert texts == [f"la{end}", f"la la{end}"]
    assert template.stop_id == template.tokenizer.token_to_id(end)


def test_prefixes_that_are_none_are_refused_with_the_way_out(folder: Path) -> None:
    messages = turns("a", "b", "c", "d")
    for message in messages[1::2]:
        message["reasoning_content"] = "well"
    with pytest.raises(TemplateError, match=r"up to message 2 .* \{% generation %\} .* --chat-template FILE"):
        chat(folder, FORGETTING).encode(messages)
    assert chat(folder, FORGETTING).encode(turns("a", "b")) == chat(folder, CHATML).encode(turns("a", "b"))


def test_what_a_template_refuses_is_told_in_its_words(folder: Path) -> None:
    with pytest.raises(TemplateError, match="given.jinja.*rejects the conversation: roles must alternate user and assistant"):
        chat(folder, ALTERNATING).encode(turns("a", "b", system="s"))
    with pytest.raises(TemplateError, match="rejects the conversation"):
        chat(folder, "{{ messages[0].content.missing.more }}").encode(turns("a", "b"))
    with pytest.raises(TemplateError, match="U\\+FDD0"):
        chat(folder, CHATML).encode(turns("a\ufdd0", "b"))


def test_a_template_cannot_leave_its_sandbox(folder: Path) -> None:
    for text in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ (messages.append).__self__ }}"):
        with pytest.raises(TemplateError, match="rejects the conversation|unsafe"):
            chat(folder, text + CHATML).encode(turns("a", "b"))


def test_a_template_that_jinja_cannot_read_is_named_with_its_line(folder: Path) -> None:
    with pytest.raises(DataError, match=r"given.jinja, line 2: .*--chat-template"):
        chat(folder, "\n{% for %}")


def test_lines_of_a_template_lose_their_blanks(folder: Path, theirs: Any) -> None:
    text = "{% for m in messages %}\n    {% if true %}\n  {{ m.content }}\n    {% endif %}\n{% break %}{% endfor %}\n"
    rendered = theirs.apply_chat_template(turns("a", "b"), chat_template=text, tokenize=False)
    assert chat(folder, text).render(turns("a", "b")) == rendered == "  a\n"


def test_data_know_no_date_and_a_chat_does(folder: Path) -> None:
    text = "{{ strftime_now('%Y') if strftime_now is defined else 'long ago' }}" + CHATML
    template = chat(folder, text)
    assert template.render(turns("a")).startswith("long ago")
    assert template.tokenizer.decode(template.prompt_ids(turns("a"))[:4]).isdigit()


def test_templates_are_looked_for_in_three_places(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t", "from settings")
    tokenizer = build("TokenizersJSON", tokenizer_path=folder / "tokenizer.json")
    assert find_template(tokenizer).text == "from settings"
    named = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": "by name"}]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": named}))
    assert find_template(tokenizer).text == "by name"
    (folder / "chat_template.jinja").write_text("of its own")
    assert find_template(tokenizer).text == "of its own"
    assert find_template(tokenizer, _file(tmp_path, "given")).text == "given"
    with pytest.raises(DataError, match="--chat-template .*nowhere"):
        find_template(tokenizer, tmp_path / "nowhere")
    bare = write_tokenizer(tmp_path / "bare")
    with pytest.raises(DataError, match="requires a chat template, got none next to the tokenizer.*--chat-template"):
        find_template(build("TokenizersJSON", tokenizer_path=bare))


def named_folder(folder: Path, *, as_files: bool, default: str | None = CHATML) -> Path:
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
def test_named_templates_are_chosen_as_transformers_chooses(tmp_path: Path, as_files: bool) -> None:
    folder = named_folder(tmp_path / "t", as_files=as_files)
    template = find_template(build("TokenizersJSON", tokenizer_path=folder))
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert theirs.chat_template == {"default": template.text, **template.named}
    for more in ({}, {"tools": TOOLS}, {"tools": []}, {"tools": None}):
        expected = theirs.apply_chat_template(SOME[2], **more)["input_ids"]
        assert template.encode(SOME[2], **more).ids == expected
    with_tools = theirs.apply_chat_template(SOME[2], tools=TOOLS, return_assistant_tokens_mask=True)
    assert [int(said) for said in template.encode(SOME[2], tools=TOOLS).is_said] == with_tools["assistant_masks"]
    assert template.key == chat(folder, CHATML).key  # a run without tools resumes
    assert template.tools_key and not chat(folder, CHATML).tools_key
    broken = ChatTemplate(CHATML, template.tokenizer, source="x", special={}, named={"tool_use": "{% for %}"})
    assert broken.encode(SOME[2]).ids == template.encode(SOME[2]).ids
    with pytest.raises(DataError, match="got x, tool_use, line 1"):
        broken.encode(SOME[2], tools=TOOLS)


@pytest.mark.parametrize("as_files", [False, True])
def test_a_folder_with_a_template_for_tools_only_is_refused_with_the_names_that_it_has(
    tmp_path: Path, as_files: bool
) -> None:
    """transformers refuses conversations without tools, and renders those with tools."""
    folder = named_folder(tmp_path / "t", as_files=as_files, default=None)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with pytest.raises(ValueError, match="no default"):
        theirs.apply_chat_template(SOME[2])
    tokenizer = build("TokenizersJSON", tokenizer_path=folder)
    with pytest.raises(DataError, match="the name \"default\" .there are 'rag', 'tool_use'... Name a file with --chat"):
        find_template(tokenizer)
    given = find_template(tokenizer, _file(tmp_path, MARKED))
    assert given.encode(SOME[2], tools=TOOLS).ids == theirs.apply_chat_template(SOME[2], tools=TOOLS)["input_ids"]


def test_content_in_parts_is_rendered_as_transformers_renders_it(folder: Path, theirs: Any) -> None:
    parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>{% endfor %}"
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    expected = theirs.apply_chat_template(messages, chat_template=parts)["input_ids"]
    assert chat(folder, parts).prompt_ids(messages) == expected
    as_text = theirs.apply_chat_template(messages, chat_template=LLAMA3, add_generation_prompt=True)["input_ids"]
    assert chat(folder, LLAMA3).prompt_ids(messages) == as_text  # the list as Python prints it
    with pytest.raises(TypeError, match="concatenate"):
        theirs.apply_chat_template(messages, chat_template=MARKED)
    with pytest.raises(TemplateError, match="rejects the conversation: .*concatenate"):
        chat(folder, MARKED).prompt_ids(messages)


def test_files_of_templates_come_before_those_of_the_settings(tmp_path: Path) -> None:
    folder = named_folder(tmp_path / "t", as_files=False)
    (folder / "chat_template.jinja").write_text(LLAMA3)
    tokenizer = build("TokenizersJSON", tokenizer_path=folder)
    assert find_template(tokenizer).text == LLAMA3 and find_template(tokenizer).named == {}
    (folder / "chat_template.jinja").unlink()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(MARKED)
    with pytest.raises(DataError, match="with the name \"default\" .there are 'tool_use'... Name a file"):
        find_template(tokenizer)


@pytest.mark.parametrize("text", [CHATML, LLAMA3, MARKED])
def test_a_turn_without_loss_is_rendered_and_has_none(folder: Path, text: str) -> None:
    template, messages = chat(folder, text), turns("a", "one", "b", "two", "c", "three")
    found = template.encode(messages, without_loss={3})
    whole = template.encode(messages)
    assert found.ids == whole.ids
    said = template.tokenizer.decode([token for token, is_said in zip(*vars(found).values(), strict=True) if is_said])
    assert "one" in said and "three" in said and "two" not in said
    assert sum(whole.is_said) > sum(found.is_said) > 0
    assert not any(template.encode(messages, without_loss={1, 3, 5}).is_said)


def test_the_message_of_a_block_is_found_in_a_macro_too(folder: Path) -> None:
    macro = (
        "{% macro say(x) %}{% generation %}{{ x.content }}<|im_end|>{% endgeneration %}{% endmacro %}"
        "{% set last = messages[-1].content %}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{{ say(m) }}{% endif %}{% endfor %}"
    )
    messages = turns("a", "b", "c", "d")
    found = chat(folder, macro).encode(messages, without_loss={1})
    assert [token for token, said in zip(found.ids, found.is_said, strict=True) if said] == (
        chat(folder, macro).tokenizer.encode_rendered("d<|im_end|>")[0]
    )
    blind = macro.replace("say(m)", "say({'content': m.content})")
    assert any(chat(folder, blind).encode(messages).is_said)
    with pytest.raises(TemplateError, match="weight 0, .*requires a template in which exactly one"):
        chat(folder, blind).encode(messages, without_loss={1})


def test_a_line_break_that_ends_a_turn_without_control_tokens_has_a_loss(folder: Path) -> None:
    template = chat(folder, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    found = template.encode(turns("a", "b", "c", "d"))
    said = [token for token, is_said in zip(found.ids, found.is_said, strict=True) if is_said]
    assert template.tokenizer.decode(said) == "assistant: b\nassistant: d\n"  # there is no generation prompt
    prompted = chat(folder, template.text + "{% if add_generation_prompt %}assistant:{% endif %}")
    found = prompted.encode(turns("a", "b", "c", "d"))
    said = [token for token, is_said in zip(found.ids, found.is_said, strict=True) if is_said]
    assert prompted.tokenizer.decode(said) == " b\n d\n"


@pytest.mark.parametrize("is_complete", [False, True])
def test_special_tokens_map_counts_as_in_transformers(tmp_path: Path, is_complete: bool) -> None:
    folder = write_tokenizer(tmp_path / "t", "{{ bos_token }} {{ eos_token }} {{ pad_token }}")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if is_complete:
        settings["added_tokens_decoder"] = {"256": {"content": "<|endoftext|>", "special": True}}
    del settings["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    other = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": "<|eot_id|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(other))
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    expected = theirs.apply_chat_template(turns("a"), tokenize=False)
    assert find_template(build("TokenizersJSON", tokenizer_path=folder)).render(turns("a")) == expected


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
def test_a_turn_that_no_control_token_ends_is_a_problem(folder: Path, text: str, problem: str | None) -> None:
    found = chat(folder, text).end_of_turn_problem
    assert (found is None) if problem is None else re.search(problem, str(found)), found


def test_lone_surrogates_and_deep_nesting_are_errors(folder: Path) -> None:
    template = chat(folder, CHATML)
    with pytest.raises(TemplateError, match="must not contain U\\+D83D"):
        template.encode(turns("a", "\ud83d"))
    with pytest.raises(TemplateError, match="must not contain U\\+DC00"):
        template.encode(turns("a", "b"), tools=[{"\udc00": 1}])
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateError, match="nested"):
        template.encode([{"role": "user", "content": "a", "x": deep}, turns("a", "b")[1]])


def test_the_names_of_control_tokens_come_from_the_folder_or_the_vocabulary(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t", "x")
    tokenizer = build("TokenizersJSON", tokenizer_path=folder)
    assert find_template(tokenizer).special["bos_token"] == "<|begin_of_text|>"
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    (tmp_path / "alone").mkdir()
    library.save(str(tmp_path / "alone" / "tokenizer.json"))
    alone = build("TokenizersJSON", tokenizer_path=tmp_path / "alone")
    found = find_template(alone, _file(tmp_path, "x")).special
    assert found == {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<pad>"}


def test_a_key_follows_from_text_and_names(folder: Path, tmp_path: Path) -> None:
    other = write_tokenizer(tmp_path / "other")
    (other / "tokenizer_config.json").write_text('{"bos_token": "<|im_start|>"}')
    keys = {chat(folder, CHATML).key, chat(folder, MARKED).key, chat(other, CHATML).key}
    assert len(keys) == 3
    assert chat(folder, CHATML).key == "29a7d7956a6e8e7c"  # in checkpoints


def test_other_kinds_of_tokenizers_are_refused() -> None:
    with pytest.raises(DataError, match="tokenizers.*library.*--tokenizer-path"):
        ChatTemplate("x", build("NullTokenizer", vocab_size=9), source="x", special={})
