"""Any layout loads the bits that any other saved: weights, moments, and what the model computes with (K15, K18)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

import pretrain_gpt2
import pretrain_t5
from examples.bert import pretrain_bert
from examples.llama import pretrain_llama
from examples.mpt import pretrain_mpt
from tests.training.resharded import Layout, assert_is_state, load_by, save_by

SAVED = (
    Layout(1, 1, 1), Layout(2, 1, 1, dtype="bf16"), Layout(1, 2, 1, dtype="fp16"), Layout(1, 1, 2, 1, "bf16"),
    Layout(4, 1, 1), Layout(1, 4, 1, dtype="bf16"), Layout(1, 1, 4, 3, "bf16"), Layout(2, 2, 1, dtype="fp16"),
    Layout(2, 1, 2, 2, "bf16"), Layout(1, 2, 2, 1, "fp32", "--offload-optimizer"),
)  # fmt: skip
"""All layouts of 1, 2 and 4 ranks, as they save."""
LOADED = (
    Layout(1, 1, 1, dtype="bf16"), Layout(2, 1, 1), Layout(1, 2, 1, dtype="bf16"), Layout(1, 1, 2, 0, "fp16"),
    Layout(4, 1, 1, dtype="fp16"), Layout(1, 4, 1), Layout(1, 1, 4, 2, "bf16"), Layout(2, 2, 1, dtype="bf16"),
    Layout(2, 1, 2, 3, "fp32", "--offload-optimizer --offload-parameters"), Layout(1, 2, 2, 0, "bf16"),
)  # fmt: skip
"""The same, as they load: each with another precision, those with replicas with another stage of ZeRO."""


def check_pairs(script: ModuleType, saved: Sequence[Layout], loaded: Sequence[Layout], root: Path) -> None:
    folders = [save_by(layout, script, root, seed) for seed, layout in enumerate(saved, start=1)]
    names = None
    for layout in loaded:
        for seed, found in enumerate(load_by(layout, script, folders), start=1):
            names = names or set(found)
            assert set(found) == names
            assert_is_state(found, seed, layout.dtype)
    assert names is not None and {name.split("/")[0] for name in names} == {"weights", "model", "optimizer"}
    moments = {name.split("/")[1] for name in names if name.startswith("optimizer/")}
    assert moments == {"exp_avg", "exp_avg_sq"} and len(names) == 4 * len([n for n in names if n.startswith("model/")])


def test_some_layouts_load_what_others_saved(tmp_path: Path) -> None:
    check_pairs(pretrain_gpt2, (SAVED[7], SAVED[3]), (LOADED[0], LOADED[9]), tmp_path)


@pytest.mark.slow  # as those of LLaMA below
def test_a_pipeline_of_mpt_is_loaded_by_replicas(tmp_path: Path) -> None:
    check_pairs(pretrain_mpt, (SAVED[7],), (LOADED[3],), tmp_path)


@pytest.mark.slow  # the quick one is that of context ranks, which are LLaMA's
def test_tensor_ranks_of_llama_are_loaded_by_a_pipeline(tmp_path: Path) -> None:
    check_pairs(pretrain_llama, (SAVED[4],), (LOADED[7],), tmp_path)


@pytest.mark.slow
def test_tensor_ranks_of_bert_are_loaded_by_a_pipeline(tmp_path: Path) -> None:
    """Its bias of each word is cut with the vocabulary."""
    check_pairs(pretrain_bert, (SAVED[1],), (LOADED[2],), tmp_path)


@pytest.mark.slow  # context ranks load with dropout in test_dropout_resume.py
def test_context_ranks_load_and_save_what_other_layouts_do(tmp_path: Path) -> None:
    """ZeRO cuts states over them, too."""
    cut = Layout(1, 1, 1, 2, context=2)
    check_pairs(pretrain_llama, (cut, Layout(2, 1, 1)), (Layout(1, 2, 1), cut), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("script", [pretrain_gpt2, pretrain_bert])
def test_every_size_of_the_context_axis_loads_any_other(script: ModuleType, tmp_path: Path) -> None:
    every = (
        Layout(1, 1, 1), Layout(1, 1, 1, context=2), Layout(1, 1, 1, 3, context=4), Layout(2, 1, 1, 1, context=2),
        Layout(1, 2, 1, context=2), Layout(1, 1, 2, 2, context=2), Layout(2, 2, 1),
    )  # fmt: skip
    check_pairs(script, every, every, tmp_path)


SCRIPTS = {
    "gpt2": pretrain_gpt2,
    "t5": pretrain_t5,
    "mpt": pretrain_mpt,
    "llama": pretrain_llama,
    "bert": pretrain_bert,
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_every_ordered_pair_of_the_ten_layouts(script: ModuleType, tmp_path: Path) -> None:
    sizes = [(layout.tensor, layout.pipe, layout.data) for layout in SAVED]
    assert len(set(sizes)) == 10 and sizes == [(layout.tensor, layout.pipe, layout.data) for layout in LOADED]
    check_pairs(script, SAVED, LOADED, tmp_path)
