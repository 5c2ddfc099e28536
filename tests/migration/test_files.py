"""The recorded scripts and JSON files are well-formed: fields, placeholders, sources, and sums that must agree."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PLACEHOLDERS = {
    "data", "data2", "data3", "vocab", "merges", "bert_vocab", "tokenizer", "spm", "hf", "json", "split_paths", "out",
}  # fmt: skip
SOURCE_FIELDS = {"repository", "path", "commit"}
EXPECTED_FIELDS = {
    "train_iters", "train_samples", "ends_by", "global_batch_size", "num_micro_batches", "warmup_iters",
    "warmup_samples", "decay_iters", "decay_samples", "not_whole",
}  # fmt: skip
RAMPUP_FIELDS = {"rampup_iters", "rampup_samples"}
SIZE_FIELDS = {"global_batch_size", "micro_batch_size", "num_micro_batches"}
LAYOUT_FLAGS = (
    "--tensor-model-parallel-size", "--model-parallel-size", "--pipeline-model-parallel-size", "--pipe-parallel-size",
    "--context-parallel-size", "--ds-sequence-parallel-size",
)  # fmt: skip
"""Flags that divide the ranks; what is left are replicas."""


def load_recorded(folder: str) -> dict[str, dict[str, Any]]:
    return {path.stem: tomllib.loads(path.read_text("utf-8")) for path in sorted((FOLDER / folder).glob("*.toml"))}


SCRIPTS, JSON = load_recorded("scripts"), load_recorded("json")


def flag_values(script: dict[str, Any]) -> dict[str, list[str]]:
    """Return flag -> words behind it, of ``--flag word`` and ``--flag=word`` alike; the last one counts."""
    pairs = [(first.partition("="), extra_words) for first, *extra_words in script["flags"]]
    return {flag: [word, *extra_words] if is_joined else extra_words for (flag, is_joined, word), extra_words in pairs}


def collect_texts(value: Any) -> list[str]:
    """Return every text in lists and tables."""
    if isinstance(value, dict):
        return [text for entry in value.values() for text in collect_texts(entry)]
    if isinstance(value, list):
        return [text for entry in value for text in collect_texts(entry)]
    return [value] if isinstance(value, str) else []


def has_key(table: Any, dotted: str) -> bool:
    for key in dotted.split("."):
        if not isinstance(table, dict) or key not in table:
            return False
        table = table[key]
    return True


def test_recorded_files_are_unique() -> None:
    assert [name for name in [*SCRIPTS, *JSON] if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name)] == []
    for table, content_key in ((SCRIPTS, "flags"), (JSON, "config")):
        counts = Counter(
            repr((entry["source"]["path"], entry["source"]["repository"], entry[content_key]))
            for entry in table.values()
        )
        assert max(counts.values()) == 1


def test_sources_name_repository_path_and_commit() -> None:
    for name, entry in [*SCRIPTS.items(), *JSON.items()]:
        source = entry["source"]
        assert set(source) == SOURCE_FIELDS, name
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", source["repository"]), name
        assert re.fullmatch(r"[0-9a-f]{40}", source["commit"]), name
        assert not source["path"].startswith("/"), name


def test_paths_are_placeholders() -> None:
    for name, entry in [*SCRIPTS.items(), *JSON.items()]:
        words = collect_texts([entry.get("flags", []), entry.get("deepspeed_config", {}), entry.get("config", {})])
        assert [word for word in words if re.search(r"[/\\~$]", word)] == [], name
        used = {placeholder for word in words for placeholder in re.findall(r"\{(\w*)\}", word)}
        assert used <= PLACEHOLDERS, name


def test_scripts_have_expected_fields() -> None:
    for name, script in SCRIPTS.items():
        fields = {"source", "program", "world_size", "refused", "flags", "expected"}
        assert set(script) - {"deepspeed_config"} == fields, name
        assert script["program"].startswith("pretrain_"), name
        assert all(words and all(isinstance(word, str) for word in words) for words in script["flags"]), name
        assert [words[0] for words in script["flags"] if not words[0].startswith("--")] == [], name
        assert set(script["expected"]) - RAMPUP_FIELDS == EXPECTED_FIELDS, name
        grows = {"--rampup-batch-size", "--step-batch-size-schedule"} & set(flag_values(script))
        assert ("rampup_iters" in script["expected"]) == bool(grows), name
        assert (
            "{json}" in collect_texts(script["flags"]) or "--deepspeed_config={json}" in collect_texts(script["flags"])
        ) == ("deepspeed_config" in script), name


def test_json_files_have_expected_fields() -> None:
    for name, entry in JSON.items():
        assert set(entry) == {"source", "world_size", "refused", "expected", "config"}, name
        assert set(entry["expected"]) in (SIZE_FIELDS, set()), name


def test_refused_entries_exist() -> None:
    for name, entry in [*SCRIPTS.items(), *JSON.items()]:
        flags = flag_values(entry) if "flags" in entry else {}
        config = entry.get("config", entry.get("deepspeed_config", {}))
        assert [key for key in entry["refused"] if key not in flags and not has_key(config, key)] == [], name


def test_batch_sizes_multiply_to_global_batch() -> None:
    for name, script in SCRIPTS.items():
        flags, expected = flag_values(script), script["expected"]
        replicas = script["world_size"]
        for flag in LAYOUT_FLAGS:
            replicas //= int(flags.get(flag, ["1"])[0])
        micro_batch_size = int(flags.get("--micro-batch-size", flags.get("--batch-size", ["0"]))[0])
        assert micro_batch_size * replicas * expected["num_micro_batches"] == expected["global_batch_size"], name
    for name, entry in JSON.items():
        expected_sizes = entry["expected"]
        if expected_sizes:
            product = entry["world_size"] * expected_sizes["micro_batch_size"] * expected_sizes["num_micro_batches"]
            assert product == expected_sizes["global_batch_size"], name


def test_train_samples_match_steps() -> None:
    """With a ramp-up its own steps and samples come first."""
    for name, script in SCRIPTS.items():
        expected = script["expected"]
        rampup_steps, rampup_samples = expected.get("rampup_iters", 0), expected.get("rampup_samples", 0)
        samples = rampup_samples + (expected["train_iters"] - rampup_steps) * expected["global_batch_size"]
        assert samples == expected["train_samples"], name
        if "--step-batch-size-schedule" in flag_values(script):  # lengths in steps, which Megatron counts in samples
            continue
        if script.get("deepspeed_config", {}).get("curriculum_learning", {}).get("enabled"):  # tokens as samples
            continue
        for length in ("warmup", "decay"):
            if expected[f"{length}_iters"] >= rampup_steps:
                reached = rampup_samples + (expected[f"{length}_iters"] - rampup_steps) * expected["global_batch_size"]
                shortfall = reached - expected[f"{length}_samples"]
                assert 0 <= shortfall < expected["global_batch_size"], name
                assert (shortfall == 0) == (length not in expected["not_whole"]), name
