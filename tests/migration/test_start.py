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
from tests.migration.test_files import JSON, LAYOUT, SCRIPTS

OURS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
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
    words = {"<|endoftext|>": 0, "<unk>": 1, **{character: 2 + at for at, character in enumerate("abcdefgh ")}}
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
    found = {name: str(folder / name) for name in ("data", "data2", "data3", "out", "hf")}
    found |= {
        "vocab": str(folder / "vocab.json"),
        "merges": str(folder / "merges.txt"),
        "spm": str(folder / "sp.model"),
    }
    found |= {"tokenizer": str(folder / "tokenizer.json"), "bert_vocab": str(folder / "bert.txt")}
    found |= {"json": str(folder / "ds.json"), "split_paths": str(folder / "paths.txt")}
    Path(found["split_paths"]).write_text(filled(SPLIT_PATHS, found))
    return found


def filled(text: str, files: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: files[match.group(1)], text)


def without(table: dict[str, Any], refused: list[str]) -> dict[str, Any]:
    """Return the JSON without the keys of ``refused``; an optimizer goes with the settings that are of its type."""
    table = copy.deepcopy(table)
    for dotted in refused:
        *path, last = ["optimizer"] if dotted == "optimizer.type" else dotted.split(".")
        inner = table
        for key in path:
            inner = inner[key]
        del inner[last]
    return table


def ranks(script: dict[str, Any], refused: list[str]) -> int:
    """Return the ranks of a script: a layout that is refused leaves as many replicas on fewer of them."""
    sizes = [int(words[1]) for words in script["flags"] if words[0] in refused and words[0] in LAYOUT]
    return int(script["world_size"]) // math.prod(sizes)


def started(script: dict[str, Any], files: Mapping[str, str], refused: list[str]) -> Config:
    """Return the configuration of a script without what is ``refused``, by the program of the same name."""
    given = [words for words in script["flags"] if words[0].partition("=")[0] not in refused]
    content = without(script.get("deepspeed_config", {}), [name for name in refused if not name.startswith("--")])
    Path(files["json"]).write_text(json.dumps(content))
    world_size = ranks(script, refused)
    family, defaults = OURS[script["program"]]
    words = [filled(word, files) for flag in given for word in flag]
    return parse([*words, "--dry-run"], world_size=world_size, env={}, family=family, defaults=defaults)


def numbers(config: Config, world_size: int) -> dict[str, Any]:
    """Return what ``expected`` has, as the run would have it."""
    batch, optimizer = config.batch, config.optimizer
    replicas = config.parallel.data_parallel_size(world_size)
    sizes = batch.sizes(replicas)
    found: dict[str, Any] = {
        "global_batch_size": sizes.full,
        "num_micro_batches": batch.gas,
        "train_iters": batch.train_iters,
        "train_samples": sizes.consumed_after(batch.train_iters),
        "decay_iters": optimizer.lr_decay_iters,
    }
    if optimizer.lr_decay_samples is not None:
        decay, warmup = optimizer.lr_decay_samples, optimizer.lr_warmup_samples
        warmup = optimizer.warmup * decay if warmup is None else warmup
        found |= {"decay_samples": decay, "warmup_samples": warmup, "warmup_iters": sizes.steps_until(warmup)}
    else:
        steps = optimizer.lr_warmup_iters
        steps = round(optimizer.warmup * optimizer.lr_decay_iters, 9) if steps is None else steps
        found |= {"decay_samples": optimizer.lr_decay_iters * sizes.full, "warmup_samples": steps * sizes.full}
        found["warmup_iters"] = math.ceil(steps)
    if batch.rampup_batch_size is not None:
        steps = sizes.steps_until(sizes.samples + 1)
        found |= {"rampup_iters": steps, "rampup_samples": sizes.consumed_after(steps)}
    return found


def problems_of(build: Callable[[], object]) -> list[str]:
    """Return the problems that ``build`` raises, each on its own."""
    try:
        build()
    except ConfigError as error:
        lines = str(error).splitlines()
        return [line.partition(". ")[2] for line in lines[1:]] if len(lines) > 1 else lines
    return []


def named_in(problem: str, refused: list[str]) -> Iterator[str]:
    for name in refused:
        if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", problem) or (
            "." in name and re.search(rf"key {re.escape(name.split('.')[-1])}\b", problem)
        ):
            yield name


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts_with_megatrons_own_numbers(
    name: str, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    script = SCRIPTS[name]
    refused, expected = script["refused"], script["expected"]
    problems = problems_of(lambda: started(script, files, []))
    if set(LAYOUT) & set(refused):  # then there are other replicas, and batches that do not fit them
        problems = [problem for problem in problems if not problem.startswith("train_batch_size must be")]
    found = [set(named_in(problem, refused)) for problem in problems]
    assert all(found), f"refused beside what is listed: {problems}"
    assert set().union(*found) == set(refused)
    config = started(script, files, refused)
    world_size = ranks(script, refused)
    got = numbers(config, world_size)
    assert got == pytest.approx({name: expected[name] for name in got}, rel=1e-12)
    assert set(expected) - set(got) == {"ends_by", "not_whole"}
    dry_run(config, world_size)
    table = capsys.readouterr().out
    assert ("have no effect: " in table or "has no effect: " in table) == bool(config.ignored)
    assert not [note for note in config.notes if "unknown" in note]


def test_a_json_file_starts_with_its_batch_sizes(files: dict[str, str]) -> None:
    def check(name: str) -> None:
        recorded = JSON[name]
        refused, expected = recorded["refused"], recorded["expected"]

        def start(content: dict[str, Any]) -> Config:
            Path(files["json"]).write_text(json.dumps(content))
            words = ["--deepspeed_config", files["json"], "--vocab-size", "100", "--dry-run"]
            return parse(words, world_size=recorded["world_size"], env={})

        problems = problems_of(lambda: start(recorded["config"]))
        found = [set(named_in(problem, refused)) for problem in problems]
        assert all(found), f"refused beside what is listed: {problems}"
        assert set().union(*found) == set(refused)
        batch = start(without(recorded["config"], refused)).batch
        sizes = {
            "global_batch_size": batch.global_batch_size(recorded["world_size"]),
            "micro_batch_size": batch.batch_size,
            "num_micro_batches": batch.gas,
        }
        assert {name: sizes[name] for name in expected} == expected

    check_rows(JSON, check)
