"""Layers of a stage share one mask of a micro-batch's documents, and the next micro-batch has its own."""

from __future__ import annotations

from types import ModuleType
from unittest.mock import patch

import pytest
import torch

from megatron.models.bert import pipeline as bert_pipeline
from megatron.models.common import masks as common_masks
from megatron.models.common import pipeline as common_pipeline
from megatron.models.common.model_args import ModelArgs, ParallelContext
from tests.helpers.bert_samples import bert_sizes
from tests.helpers.llama_samples import llama_sizes
from tests.helpers.model_samples import batch_of, filled, small_sizes

CASES: dict[str, tuple[ModuleType, ModuleType, ModelArgs, str]] = {
    "gpt2": (common_pipeline, common_masks, small_sizes(), "document_mask"),
    "llama": (common_pipeline, common_masks, llama_sizes(), "document_mask"),
    "window": (common_pipeline, common_masks, small_sizes(window_size=4), "document_mask"),
    "bert": (bert_pipeline, bert_pipeline, bert_sizes(hidden_size=16, kv_hidden_size=4), "padding_mask"),
}


@pytest.mark.parametrize("family", CASES)
def test_a_stage_makes_the_mask_of_a_micro_batch_once(family: str) -> None:
    home, maker, sizes, name = CASES[family]
    with patch.object(maker, name, wraps=getattr(maker, name)) as making:
        specs = home.layer_specs(sizes, ParallelContext())
        layers = torch.nn.Sequential(*[filled(spec.build()).double() for spec in specs[1 : 1 + sizes.num_layers]])
        first, second = (batch_of(with_documents=True, seed=seed).segment_ids for seed in (0, 1))
        x = torch.randn(12, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        found = [layers((x, ids))[0] for ids in (first, second, first)]
    assert len(layers) > 1 and making.call_count == 3
    assert found[0].equal(found[2]) and not found[0].equal(found[1])
