"""Layers of a stage share one mask of a micro-batch's documents, and the next micro-batch has its own."""

from __future__ import annotations

from types import ModuleType
from unittest.mock import patch

import pytest
import torch

from megatron.models.bert import pipeline as bert_pipeline
from megatron.models.common import masks as common_masks
from megatron.models.common import pipeline as common_pipeline
from megatron.models.common.masks import Masks
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from tests.helpers.bert_samples import bert_sizes
from tests.helpers.llama_samples import llama_sizes
from tests.helpers.model_samples import batch_of, filled, small_sizes
from tests.helpers.mpt_samples import mpt_sizes

DROPS = {"attention_dropout": 0.1}
CASES: dict[str, tuple[ModuleType, ModuleType, ModelArgs, str]] = {
    "gpt2": (common_pipeline, common_masks, small_sizes(), "document_starts"),
    "window": (common_pipeline, common_masks, small_sizes(window_size=4), "document_starts"),
    "mpt": (common_pipeline, common_masks, mpt_sizes(), "document_starts"),
    "llama with dropout": (common_pipeline, common_masks, llama_sizes(**DROPS), "document_mask"),
    "window with dropout": (common_pipeline, common_masks, small_sizes(window_size=4, **DROPS), "document_mask"),
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
        found = [layers.eval()((x, ids))[0] for ids in (first, second, first)]
    assert len(layers) > 1 and making.call_count == 3
    assert found[0].equal(found[2]) and not found[0].equal(found[1])


def test_nothing_of_s_x_s_is_made_of_documents_but_where_attention_drops() -> None:
    x, ids = torch.zeros(12, 3, 16), batch_of(with_documents=True).segment_ids
    for sizes in (small_sizes(window_size=4), mpt_sizes(), llama_sizes(attn_logit_softcapping=3.0)):
        starts = Masks(sizes, ParallelContext()).of(x, ids, has_window=True)
        assert starts is not None and starts.dtype == torch.int32 and starts.shape == (3, 12)
    for sizes, dtype in ((small_sizes(**DROPS), torch.bool), (mpt_sizes(**DROPS), torch.float32)):
        mask = Masks(sizes, ParallelContext()).of(x, ids)
        assert mask is not None and mask.dtype == dtype and mask.shape[2:] == (12, 12)
