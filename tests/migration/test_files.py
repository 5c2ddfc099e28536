"""The recorded scripts and JSON files are well-formed: fields, placeholders, sources, and sums that must agree."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PLACEHOLDERS = {
    "data", "data2", "data3", "vocab", "merges", "bert_vocab", "tokenizer", "spm", "hf", "json", "split_paths", "out",
}  # fmt: skip
SOURCE = {"repository", "path", "commit"}
EXPECTED = {
    "train_iters", "train_samples", "ends_by", "global_batch_size", "num_micro_batches", "warmup_iters",
    "warmup_samples", "decay_iters", "decay_samples", "not_whole",
}  # fmt: skip
RAMP_UP = {"rampup_iters", "rampup_samples"}
SIZES = {"global_batch_size", "micro_batch_size", "num_micro_batches"}
LAYOUT = (
    "--tensor-model-parallel-size", "--model-parallel-size", "--pipeline-model-parallel-size", "--pipe-parallel-size",
    "--context-parallel-size", "--ds-sequence-parallel-size",
)  # fmt: skip
"""Flags that divide the ranks; what is left are replicas."""


def recorded(folder: str) -> dict[str, dict[str, Any]]:
    return {path.stem: tomllib.loads(path.read_text("utf-8")) for path in sorted((HERE / folder).glob("*.toml"))}


SCRIPTS, JSON = recorded("scripts"), recorded("json")


def values(script: dict[str, Any]) -> dict[str, list[str]]:
    """Return flag -> words behind it, of ``--flag word`` and ``--flag=word`` alike; the last one counts."""
    pairs = [(first.partition("="), rest) for first, *rest in script["flags"]]
    return {flag: [word, *rest] if is_joined else rest for (flag, is_joined, word), rest in pairs}


def texts(value: Any) -> list[str]:
    """Return every text in lists and tables."""
    if isinstance(value, dict):
        return [text for each in value.values() for text in texts(each)]
    if isinstance(value, list):
        return [text for each in value for text in texts(each)]
    return [value] if isinstance(value, str) else []


def has_key(table: Any, dotted: str) -> bool:
    for key in dotted.split("."):
        if not isinstance(table, dict) or key not in table:
            return False
        table = table[key]
    return True


def test_names_say_one_thing_each() -> None:
    assert [name for name in [*SCRIPTS, *JSON] if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name)] == []
    for table, held in ((SCRIPTS, "flags"), (JSON, "config")):
        same = Counter(
            repr((each["source"]["path"], each["source"]["repository"], each[held])) for each in table.values()
        )
        assert max(same.values()) == 1


def test_sources_name_repository_path_and_commit() -> None:
    for name, each in [*SCRIPTS.items(), *JSON.items()]:
        source = each["source"]
        assert set(source) == SOURCE, name
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", source["repository"]), name
        assert re.fullmatch(r"[0-9a-f]{40}", source["commit"]), name
        assert not source["path"].startswith("/"), name


def test_paths_are_placeholders() -> None:
    for name, each in [*SCRIPTS.items(), *JSON.items()]:
        words = texts([each.get("flags", []), each.get("deepspeed_config", {}), each.get("config", {})])
        assert [word for word in words if re.search(r"[/\\~$]", word)] == [], name
        used = {found for word in words for found in re.findall(r"\{(\w*)\}", word)}
        assert used <= PLACEHOLDERS, name


def test_scripts_have_their_fields() -> None:
    for name, script in SCRIPTS.items():
        given = {"source", "program", "world_size", "refused", "flags", "expected"}
        assert set(script) - {"deepspeed_config"} == given, name
        assert script["program"].startswith("pretrain_"), name
        assert all(words and all(isinstance(word, str) for word in words) for words in script["flags"]), name
        assert [words[0] for words in script["flags"] if not words[0].startswith("--")] == [], name
        assert set(script["expected"]) - RAMP_UP == EXPECTED, name
        assert ("rampup_iters" in script["expected"]) == ("--rampup-batch-size" in values(script)), name
        assert ("{json}" in texts(script["flags"]) or "--deepspeed_config={json}" in texts(script["flags"])) == (
            "deepspeed_config" in script
        ), name


def test_json_files_have_their_fields() -> None:
    for name, each in JSON.items():
        assert set(each) == {"source", "world_size", "refused", "expected", "config"}, name
        assert set(each["expected"]) in (SIZES, set()), name


def test_what_is_refused_is_there() -> None:
    for name, each in [*SCRIPTS.items(), *JSON.items()]:
        flags = values(each) if "flags" in each else {}
        config = each.get("config", each.get("deepspeed_config", {}))
        assert [key for key in each["refused"] if key not in flags and not has_key(config, key)] == [], name


def test_batch_sizes_multiply_to_the_global_batch() -> None:
    for name, script in SCRIPTS.items():
        given, expected = values(script), script["expected"]
        replicas = script["world_size"]
        for flag in LAYOUT:
            replicas //= int(given.get(flag, ["1"])[0])
        micro = int(given.get("--micro-batch-size", given.get("--batch-size", ["0"]))[0])
        assert micro * replicas * expected["num_micro_batches"] == expected["global_batch_size"], name
    for name, each in JSON.items():
        sizes = each["expected"]
        if sizes:
            product = each["world_size"] * sizes["micro_batch_size"] * sizes["num_micro_batches"]
            assert product == sizes["global_batch_size"], name


def test_samples_are_those_of_the_steps() -> None:
    """With a ramp-up its own steps and samples come first."""
    for name, script in SCRIPTS.items():
        expected = script["expected"]
        steps, before = expected.get("rampup_iters", 0), expected.get("rampup_samples", 0)
        samples = before + (expected["train_iters"] - steps) * expected["global_batch_size"]
        assert samples == expected["train_samples"], name
        for length in ("warmup", "decay"):
            if expected[f"{length}_iters"] >= steps:
                reached = before + (expected[f"{length}_iters"] - steps) * expected["global_batch_size"]
                short = reached - expected[f"{length}_samples"]
                assert 0 <= short < expected["global_batch_size"], name
                assert (short == 0) == (length not in expected["not_whole"]), name
