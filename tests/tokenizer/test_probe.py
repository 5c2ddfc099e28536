"""Ids of probe texts are stored with token files, checkpoints and exports, and compared at every load.

``probe_format_1`` has token files and a probe as they are written by the version that introduced probes.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megatron import tokenizer
from megatron.checkpoint.huggingface.tokenizer import check_probe
from megatron.data import IndexedDataset, dataset_checks, dataset_metadata
from megatron.errors import CheckpointError, DataError
from megatron.tokenizer import probe
from megatron.training.checkpoint_checks import check_tokenizer
from tests.helpers.trap import TOKENIZER_PATH

FORMAT_1 = Path(__file__).parent / "probe_format_1"


def saved_probe() -> dict[str, Any]:
    return json.loads((FORMAT_1 / probe.FILE_NAME).read_bytes())


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> tokenizer.Tokenizer:
    """Return the tokenizer of ``TOKENIZER_PATH`` after a change to its JSON."""
    fields = json.loads((TOKENIZER_PATH / "tokenizer.json").read_text())
    change(fields)
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    return tokenizer.build(tokenizer_path=folder)


def split_letters(fields: dict[str, Any]) -> None:
    """Use another pre-tokenizer, as in open-instruct #1896: every lower-case letter is a word."""
    letters = {"type": "Split", "pattern": {"Regex": "[a-z]"}, "behavior": "Isolated", "invert": False}
    fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [letters, fields["pre_tokenizer"]]}


def test_probe_equals_the_stored_one() -> None:
    """The probe texts and their ids never change; add a text under a new name instead."""
    current = tokenizer.build(tokenizer_path=TOKENIZER_PATH).probe
    assert current is not None and current["ids"] == saved_probe()["ids"]
    assert current["version"].startswith(f"tokenizers {tokenizers.__version__}, pre-tokenizer ")
    assert probe.difference(saved_probe(), current) is None


def test_post_processor_does_not_matter_and_pre_tokenizer_does(tmp_path: Path) -> None:
    def add_post_processor(fields: dict[str, Any]) -> None:
        fields["post_processor"] = {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": False,
            "use_regex": True,
        }

    original = tokenizer.build(tokenizer_path=TOKENIZER_PATH)
    same = changed(tmp_path, add_post_processor)
    assert same.identity.split(".")[0] == original.identity.split(".")[0]
    assert probe.difference(original.probe, same.probe) is None
    text = probe.difference(original.probe, changed(tmp_path, split_letters).probe)
    assert text is not None and "words" in text and "pre-tokenizer ByteLevel" in text
    assert "pre-tokenizer Split + ByteLevel" in text


def test_token_files_of_another_library_version_are_rejected(tmp_path: Path) -> None:
    """Equal tokenizer files, but other ids: only the probe detects it."""
    token_file = IndexedDataset(FORMAT_1 / "corpus")
    assert token_file.sidecar is not None and token_file.sidecar.probe == saved_probe()
    identity = token_file.sidecar.tokenizer
    dataset_checks.check_tokenizer(token_file, identity, saved_probe())
    other = copy.deepcopy(saved_probe())
    other["version"], other["ids"]["code"] = "tokenizers 9.9, pre-tokenizer Other", "1 2"
    with pytest.raises(
        DataError, match=r"tokenizers \d.*differ in code.*|differ in code.*tokenizers 9.9"
    ) as error_info:
        dataset_checks.check_tokenizer(token_file, identity, other)
    assert saved_probe()["version"] in str(error_info.value) and other["version"] in str(error_info.value)


def test_token_files_without_a_probe_are_accepted(tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(FORMAT_1 / f"corpus{suffix}", tmp_path / f"corpus{suffix}")
    fields = json.loads((FORMAT_1 / "corpus.meta.json").read_bytes())
    for name in ("probe", "crc32"):
        del fields[name]
    (tmp_path / "corpus.meta.json").write_text(json.dumps(fields))
    token_file = IndexedDataset(tmp_path / "corpus")
    dataset_checks.check_tokenizer(token_file, fields["tokenizer"], saved_probe())
    assert token_file.sidecar is not None
    assert {"probe", "source"}.isdisjoint(json.loads(token_file.sidecar.to_json()))
    assert dataset_metadata.parse(token_file.sidecar.to_json(), "") == token_file.sidecar


def test_checkpoint_of_another_library_version_is_rejected_unless_allowed() -> None:
    other = copy.deepcopy(saved_probe())
    other["ids"]["emoji"] = "0"
    saved = {"tokenizer": "a" * 64, "tokenizer_probe": other}
    check_tokenizer({"tokenizer": "a" * 64}, "a" * 64, saved_probe(), allow_change=False)
    check_tokenizer(saved, "a" * 64, other, allow_change=False)
    with pytest.raises(CheckpointError, match="differ in emoji.*previous version of the library"):
        check_tokenizer(saved, "a" * 64, saved_probe(), allow_change=False)
    check_tokenizer(saved, "a" * 64, saved_probe(), allow_change=True)


def test_exported_folder_with_another_tokenizer_is_rejected(tmp_path: Path) -> None:
    shutil.copy(TOKENIZER_PATH / "tokenizer.json", tmp_path / "tokenizer.json")
    shutil.copy(FORMAT_1 / probe.FILE_NAME, tmp_path / probe.FILE_NAME)
    check_probe(tmp_path)
    with pytest.raises(DataError, match="words.*Split"):
        changed(tmp_path, split_letters)
    with pytest.raises(DataError, match="tokenizer_probe.json"):
        check_probe(tmp_path)
    (tmp_path / probe.FILE_NAME).write_text("[")
    with pytest.raises(DataError, match="cannot be read"):
        check_probe(tmp_path)


def test_vocabulary_without_text_has_no_probe() -> None:
    assert tokenizer.build("NullTokenizer", vocab_size=9).probe is None
    assert probe.difference(None, saved_probe()) is None
