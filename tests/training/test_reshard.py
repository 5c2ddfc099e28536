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
from tests.training.resharded import Layout, assert_equals_state, load_in_layout, save_in_layout

SAVED_LAYOUTS = (
    Layout(1, 1, 1), Layout(2, 1, 1, dtype="bf16"), Layout(1, 2, 1, dtype="fp16"), Layout(1, 1, 2, 1, "bf16"),
    Layout(4, 1, 1), Layout(1, 4, 1, dtype="bf16"), Layout(1, 1, 4, 3, "bf16"), Layout(2, 2, 1, dtype="fp16"),
    Layout(2, 1, 2, 2, "bf16"), Layout(1, 2, 2, 2, "fp32", "--offload-optimizer"),
)  # fmt: skip
"""All layouts of 1, 2 and 4 ranks, as they save."""
LOADED_LAYOUTS = (
    Layout(1, 1, 1, dtype="bf16"), Layout(2, 1, 1), Layout(1, 2, 1, dtype="bf16"), Layout(1, 1, 2, 0, "fp16"),
    Layout(4, 1, 1, dtype="fp16"), Layout(1, 4, 1), Layout(1, 1, 4, 2, "bf16"), Layout(2, 2, 1, dtype="bf16"),
    Layout(2, 1, 2, 3, "fp32", "--offload-optimizer --offload-parameters"), Layout(1, 2, 2, 3, "bf16"),
)  # fmt: skip
"""The same, as they load: each with another precision, those with replicas with another stage of ZeRO."""


def check_layout_pairs(
    script: ModuleType, saved_layouts: Sequence[Layout], loaded_layouts: Sequence[Layout], root: Path
) -> None:
    folders = [save_in_layout(layout, script, root, seed) for seed, layout in enumerate(saved_layouts, start=1)]
    names = None
    for layout in loaded_layouts:
        for seed, tensors in enumerate(load_in_layout(layout, script, folders), start=1):
            names = names or set(tensors)
            assert set(tensors) == names
            assert_equals_state(tensors, seed, layout.dtype)
    assert names is not None and {name.split("/")[0] for name in names} == {"weights", "model", "optimizer"}
    moments = {name.split("/")[1] for name in names if name.startswith("optimizer/")}
    assert moments == {"exp_avg", "exp_avg_sq"} and len(names) == 4 * len([n for n in names if n.startswith("model/")])


def test_gpt2_reshards_between_selected_layouts(tmp_path: Path) -> None:
    check_layout_pairs(
        pretrain_gpt2, (SAVED_LAYOUTS[7], SAVED_LAYOUTS[3]), (LOADED_LAYOUTS[0], LOADED_LAYOUTS[9]), tmp_path
    )


@pytest.mark.slow  # as those of LLaMA below
def test_mpt_reshards_from_pipeline_to_replicas(tmp_path: Path) -> None:
    check_layout_pairs(pretrain_mpt, (SAVED_LAYOUTS[7],), (LOADED_LAYOUTS[3],), tmp_path)


@pytest.mark.slow  # the quick one is that of context ranks, which are LLaMA's
def test_llama_reshards_from_tensor_parallel_to_pipeline(tmp_path: Path) -> None:
    check_layout_pairs(pretrain_llama, (SAVED_LAYOUTS[4],), (LOADED_LAYOUTS[7],), tmp_path)


@pytest.mark.slow
def test_bert_reshards_from_tensor_parallel_to_pipeline(tmp_path: Path) -> None:
    """Its bias of each word is cut with the vocabulary."""
    check_layout_pairs(pretrain_bert, (SAVED_LAYOUTS[1],), (LOADED_LAYOUTS[2],), tmp_path)


@pytest.mark.slow  # context ranks load with dropout in test_dropout_resume.py
def test_context_parallel_reshards_from_and_to_other_layouts(tmp_path: Path) -> None:
    """ZeRO cuts states over them, too."""
    context_layout = Layout(1, 1, 1, 2, context=2)
    check_layout_pairs(pretrain_llama, (context_layout, Layout(2, 1, 1)), (Layout(1, 2, 1), context_layout), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("script", [pretrain_gpt2, pretrain_bert])
def test_all_context_sizes_reshard_to_each_other(script: ModuleType, tmp_path: Path) -> None:
    layouts = (
        Layout(1, 1, 1), Layout(1, 1, 1, context=2), Layout(1, 1, 1, 3, context=4), Layout(2, 1, 1, 1, context=2),
        Layout(1, 2, 1, context=2), Layout(1, 1, 2, 2, context=2), Layout(2, 2, 1),
    )  # fmt: skip
    check_layout_pairs(script, layouts, layouts, tmp_path)


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
def test_all_layout_pairs_reshard(script: ModuleType, tmp_path: Path) -> None:
    grid_sizes = [(layout.tensor, layout.pipe, layout.data) for layout in SAVED_LAYOUTS]
    assert len(set(grid_sizes)) == 10 and grid_sizes == [
        (layout.tensor, layout.pipe, layout.data) for layout in LOADED_LAYOUTS
    ]
    check_layout_pairs(script, SAVED_LAYOUTS, LOADED_LAYOUTS, tmp_path)
