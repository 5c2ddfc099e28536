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
from tests.helpers.bert_samples import bert_model_args
from tests.helpers.llama_samples import llama_model_args
from tests.helpers.model_samples import fill_weights, make_batch, small_model_args
from tests.helpers.mpt_samples import mpt_model_args

DROPOUT = {"attention_dropout": 0.1}
CASES: dict[str, tuple[ModuleType, ModuleType, ModelArgs, str]] = {
    "gpt2": (common_pipeline, common_masks, small_model_args(), "document_starts"),
    "window": (common_pipeline, common_masks, small_model_args(window_size=4), "document_starts"),
    "mpt": (common_pipeline, common_masks, mpt_model_args(), "document_starts"),
    "llama with dropout": (common_pipeline, common_masks, llama_model_args(**DROPOUT), "document_mask"),
    "window with dropout": (common_pipeline, common_masks, small_model_args(window_size=4, **DROPOUT), "document_mask"),
    "bert": (bert_pipeline, bert_pipeline, bert_model_args(hidden_size=16, kv_hidden_size=4), "padding_mask"),
}


@pytest.mark.parametrize("family", CASES)
def test_stage_builds_document_mask_once_per_micro_batch(family: str) -> None:
    pipeline_module, mask_module, args, name = CASES[family]
    with patch.object(mask_module, name, wraps=getattr(mask_module, name)) as mask_fn:
        specs = pipeline_module.layer_specs(args, ParallelContext())
        layers = torch.nn.Sequential(*[fill_weights(spec.build()).double() for spec in specs[1 : 1 + args.num_layers]])
        first, second = (make_batch(with_documents=True, seed=seed).segment_ids for seed in (0, 1))
        x = torch.randn(12, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        outputs = [layers.eval()((x, ids))[0] for ids in (first, second, first)]
    assert len(layers) > 1 and mask_fn.call_count == 3
    assert outputs[0].equal(outputs[2]) and not outputs[0].equal(outputs[1])


def test_full_document_mask_is_built_only_with_dropout() -> None:
    x, ids = torch.zeros(12, 3, 16), make_batch(with_documents=True).segment_ids
    for args in (small_model_args(window_size=4), mpt_model_args(), llama_model_args(attn_logit_softcapping=3.0)):
        starts = Masks(args, ParallelContext()).get_mask(x, ids, has_window=True)
        assert starts is not None and starts.dtype == torch.int32 and starts.shape == (3, 12)
    for args, dtype in ((small_model_args(**DROPOUT), torch.bool), (mpt_model_args(**DROPOUT), torch.float32)):
        mask = Masks(args, ParallelContext()).get_mask(x, ids)
        assert mask is not None and mask.dtype == dtype and mask.shape[2:] == (12, 12)
