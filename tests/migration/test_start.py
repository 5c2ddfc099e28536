"""Every recorded script and JSON starts, with Megatron's own numbers, or names exactly what cannot be done."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers

import pretrain_t5
from megatron.arguments.other_programs import PROGRAMS
from megatron.arguments.parser import parse
from megatron.config import Config
from megatron.errors import ConfigError
from megatron.training.dry_run import dry_run
from tests.helpers.rows import check_rows
from tests.migration.test_files import JSON, LAYOUT_FLAGS, SCRIPTS

FAMILY_AND_DEFAULTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **PROGRAMS,
    "pretrain_gpt2.py": ("gpt2", {}),
    "pretrain_t5.py": ("t5", pretrain_t5.DEFAULTS),
}
"""Their program -> our family, and the defaults of the program of that name."""
SPLIT_PATHS = '"all: 0.3 0:1 {data}, 0.7 0:1 {data2}"'


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Placeholder -> a small file that is what it stands for."""
    folder = tmp_path_factory.mktemp("files")
    words = {"<|endoftext|>": 0, "<unk>": 1, **{character: 2 + idx for idx, character in enumerate("abcdefgh ")}}
    library = tokenizers.Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    (folder / "hf").mkdir()
    library.save(str(folder / "tokenizer.json"))
    shutil.copy(folder / "tokenizer.json", folder / "hf")
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "bert.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]))
    text = iter(["a b c d e f g h"] * 20)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=text, model_prefix=str(folder / "sp"), vocab_size=16, minloglevel=2, hard_vocab_limit=False
    )
    paths = {name: str(folder / name) for name in ("data", "data2", "data3", "out", "hf")}
    paths |= {
        "vocab": str(folder / "vocab.json"),
        "merges": str(folder / "merges.txt"),
        "spm": str(folder / "sp.model"),
    }
    paths |= {"tokenizer": str(folder / "tokenizer.json"), "bert_vocab": str(folder / "bert.txt")}
    paths |= {"json": str(folder / "ds.json"), "split_paths": str(folder / "paths.txt")}
    Path(paths["split_paths"]).write_text(fill_placeholders(SPLIT_PATHS, paths))
    return paths


def fill_placeholders(text: str, files: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: files[match.group(1)], text)


def without_keys(table: dict[str, Any], refused: list[str]) -> dict[str, Any]:
    """Return the JSON without the keys of ``refused``; an optimizer goes with the settings that are of its type."""
    table = copy.deepcopy(table)
    for dotted in refused:
        *path, last = ["optimizer"] if dotted == "optimizer.type" else dotted.split(".")
        inner = table
        for key in path:
            inner = inner[key]
        del inner[last]
    return table


def script_world_size(script: dict[str, Any], refused: list[str]) -> int:
    """Return the ranks of a script: a layout that is refused leaves as many replicas on fewer of them."""
    sizes = [int(words[1]) for words in script["flags"] if words[0] in refused and words[0] in LAYOUT_FLAGS]
    return int(script["world_size"]) // math.prod(sizes)


def parse_script(script: dict[str, Any], files: Mapping[str, str], refused: list[str]) -> Config:
    """Return the configuration of a script without what is ``refused``, by the program of the same name."""
    flags = [words for words in script["flags"] if words[0].partition("=")[0] not in refused]
    content = without_keys(script.get("deepspeed_config", {}), [name for name in refused if not name.startswith("--")])
    Path(files["json"]).write_text(json.dumps(content))
    world_size = script_world_size(script, refused)
    family, defaults = FAMILY_AND_DEFAULTS[script["program"]]
    words = [fill_placeholders(word, files) for flag in flags for word in flag]
    return parse([*words, "--dry-run"], world_size=world_size, env={}, family=family, defaults=defaults)


def run_lengths(config: Config, world_size: int) -> dict[str, Any]:
    """Return what ``expected`` has, as the run would have it."""
    batch, optimizer, lengths = config.batch, config.optimizer, config.batch.seq_lengths
    replicas = config.parallel.data_parallel_size(world_size)
    batch_sizes = batch.batch_sizes(replicas)
    values: dict[str, Any] = {
        "global_batch_size": batch_sizes.full,
        "num_micro_batches": batch.gas,
        "train_iters": batch.train_iters,
        "train_samples": batch_sizes.consumed_after(batch.train_iters),
        "decay_iters": optimizer.lr_decay_iters,
    }
    if optimizer.lr_decay_samples is not None:
        decay, warmup = optimizer.lr_decay_samples, optimizer.lr_warmup_samples
        warmup = optimizer.warmup * decay if warmup is None else warmup
        steps = batch_sizes.steps_until(warmup)
        if lengths.truncates:  # samples of the full length, counted in tokens
            steps = lengths.steps_until(round(warmup * lengths.full), batch_sizes)
        values |= {"decay_samples": decay, "warmup_samples": warmup, "warmup_iters": steps}
    else:
        steps = optimizer.lr_warmup_iters
        steps = round(optimizer.warmup * optimizer.lr_decay_iters, 9) if steps is None else steps
        values |= {
            "decay_samples": optimizer.lr_decay_iters * batch_sizes.full,
            "warmup_samples": steps * batch_sizes.full,
        }
        values["warmup_iters"] = math.ceil(steps)
    if batch.rampup_batch_size is not None:
        steps = batch_sizes.steps_until(batch_sizes.samples + 1)
    elif batch.step_batch_size_schedule is not None:
        steps = batch_sizes.steps_until(batch_sizes.samples)
    if batch.has_growing_batch:
        values |= {"rampup_iters": steps, "rampup_samples": batch_sizes.consumed_after(steps)}
    return values


def collect_problems(build: Callable[[], object]) -> list[str]:
    """Return the problems that ``build`` raises, each on its own."""
    try:
        build()
    except ConfigError as error:
        lines = str(error).splitlines()
        return [line.partition(". ")[2] for line in lines[1:]] if len(lines) > 1 else lines
    return []


def find_names(problem: str, refused: list[str]) -> Iterator[str]:
    for name in refused:
        if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", problem) or (
            "." in name and re.search(rf"key {re.escape(name.split('.')[-1])}\b", problem)
        ):
            yield name


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_has_megatron_batch_sizes_and_lengths(
    name: str, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    script = SCRIPTS[name]
    refused, expected = script["refused"], script["expected"]
    problems = collect_problems(lambda: parse_script(script, files, []))
    if set(LAYOUT_FLAGS) & set(refused):  # then there are other replicas, and batches that do not fit them
        problems = [problem for problem in problems if not problem.startswith("train_batch_size must be")]
    named = [set(find_names(problem, refused)) for problem in problems]
    assert all(named), f"refused beside what is listed: {problems}"
    assert set().union(*named) == set(refused)
    config = parse_script(script, files, refused)
    world_size = script_world_size(script, refused)
    lengths = run_lengths(config, world_size)
    assert lengths == pytest.approx({name: expected[name] for name in lengths}, rel=1e-12)
    assert set(expected) - set(lengths) == {"ends_by", "not_whole"}
    dry_run(config, world_size)
    table = capsys.readouterr().out
    assert ("have no effect: " in table or "has no effect: " in table) == bool(config.ignored)
    assert not [note for note in config.notes if "unknown" in note]


def test_json_file_has_expected_batch_sizes(files: dict[str, str]) -> None:
    def check(name: str) -> None:
        entry = JSON[name]
        refused, expected = entry["refused"], entry["expected"]

        def parse_content(content: dict[str, Any]) -> Config:
            Path(files["json"]).write_text(json.dumps(content))
            words = ["--deepspeed_config", files["json"], "--vocab-size", "100", "--dry-run"]
            curriculum = content.get("curriculum_learning", {})
            words += ["--seq-length", str(curriculum["max_difficulty"])] if curriculum.get("enabled") else []
            return parse(words, world_size=entry["world_size"], env={})

        problems = collect_problems(lambda: parse_content(entry["config"]))
        named = [set(find_names(problem, refused)) for problem in problems]
        assert all(named), f"refused beside what is listed: {problems}"
        assert set().union(*named) == set(refused)
        batch = parse_content(without_keys(entry["config"], refused)).batch
        batch_sizes = {
            "global_batch_size": batch.global_batch_size(entry["world_size"]),
            "micro_batch_size": batch.batch_size,
            "num_micro_batches": batch.gas,
        }
        assert {name: batch_sizes[name] for name in expected} == expected

    check_rows(JSON, check)
