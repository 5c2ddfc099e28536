"""The sample data: made once, of stories that are the same for a seed, in two languages, of few words."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megatron.data import IndexedDataset
from tools import make_sample_data
from tools.make_sample_data import PEOPLE, ZH_PEOPLE, separate_words, stories

ROOT = Path(__file__).resolve().parents[2]
STORIES = list(stories(2000))
SHA256 = "b19cc29fab736b0a"
"""Of the first hundred, its beginning."""
ANIMALS = {animal.split()[0] for animal in PEOPLE.values()}


def test_stories_depend_only_on_seed() -> None:
    digest = hashlib.sha256("\n".join(STORIES[:100]).encode()).hexdigest()
    assert digest.startswith(SHA256)
    assert list(stories(3, seed=1)) == list(stories(3, seed=1)) != list(stories(3, seed=2))


def test_languages_alternate_and_stories_are_unique() -> None:
    is_chinese = [bool(re.search("[一-鿿]", story)) for story in STORIES]
    assert is_chinese == [False, True] * 1000
    assert not any(re.search("[A-Za-z]", story) for story in STORIES[1::2])
    assert max(Counter(STORIES).values()) == 1


def test_stories_fill_all_slots_with_at_most_two_people() -> None:
    for story, names in zip(STORIES, (PEOPLE, ZH_PEOPLE) * 1000, strict=True):
        assert not re.search(r"[{}]", story)
        assert 1 <= len({name for name in names if re.search(rf"{name}(?![a-z])", story)}) <= 2, story


def test_stories_use_small_vocabulary() -> None:
    words = Counter(word for story in STORIES[::2] for word in re.findall(r"[A-Za-z]+", story))
    characters = Counter(character for story in STORIES[1::2] for character in story)
    assert 300 < len(words) < 700 and 300 < len(characters) < 700


def test_each_name_has_one_species_and_pronoun() -> None:
    for story in STORIES[::2]:
        pairs = re.findall(r"(\w+) (?:was a little|the) (\w+)", story)
        assert all(
            PEOPLE[name].split()[0] == animal for name, animal in pairs if name in PEOPLE and animal in ANIMALS
        ), story
        hero = next(name for name in re.findall(r"[A-Z]\w+", story) if name in PEOPLE)
        wrong_pronoun = {"she": "he", "he": "she"}[PEOPLE[hero].split()[1]]
        assert not re.search(rf"\b{wrong_pronoun}\b", story, re.IGNORECASE), story


def test_print_writes_text_or_json_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert make_sample_data.main(["--number", "3", "--print", "json"]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == STORIES[:3]
    make_sample_data.main(["--number", "3", "--print", "text"])
    assert capsys.readouterr().out == "\n\n".join(STORIES[:3]) + "\n"


@pytest.mark.parametrize(
    "script", ["run_gpt2.sh", "run_t5.sh", "examples/llama/run_llama.sh", "examples/mpt/run_mpt.sh"]
)
def test_run_script_prompts_are_story_sentences(script: str) -> None:
    (flags,) = re.findall(r'^stories="(.*?[^\\])"$', (ROOT / script).read_text(), re.MULTILINE | re.DOTALL)
    prompts = shlex.split(shlex.split(f'"{flags}"')[0].partition("--sample-prompts")[2])
    corpus = "\n".join(stories(10_000))
    for prompt in prompts:
        assert "t5" not in script or prompt.count("<extra_id_0>") == 1, "a gap to fill"
        for sentence in re.findall(r"[^.。]+[.。][”\"]?", re.sub(r"<extra_id_\d>", "", prompt)) or [prompt]:
            assert sentence.strip() in corpus, sentence
    assert [bool(re.search("[一-鿿]", prompt)) for prompt in prompts] == [False, True]


def run_tool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tool as a user does, from another folder."""
    command = [sys.executable, str(ROOT / "tools" / "make_sample_data.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, env={**os.environ})


def test_sample_data_is_rebuilt_only_if_stories_change(tmp_path: Path) -> None:
    arguments = ["--output", "out", "--vocab-size", "400", "--workers", "1", "--number"]
    first = run_tool(tmp_path, *arguments, "20")
    assert first.returncode == 0 and "20 documents" in first.stderr, first.stderr
    tokens = (tmp_path / "out/gpt2_text_document.bin").read_bytes()
    assert "up to date" in run_tool(tmp_path, *arguments, "20").stderr
    assert "22 documents" in run_tool(tmp_path, *arguments, "22").stderr
    assert IndexedDataset(tmp_path / "out/gpt2_text_document").num_documents == 22
    assert "20 documents" in run_tool(tmp_path, *arguments, "20").stderr
    assert (tmp_path / "out/gpt2_text_document.bin").read_bytes() == tokens


def test_chinese_names_are_separate_words() -> None:
    assert separate_words("旺旺有一个红色的球。") == "\n旺旺\n有一个\n红色的球\n。"
    assert separate_words("Max had a red ball.") == "Max had a red ball."
