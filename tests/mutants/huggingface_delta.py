"""Mutants of Hugging Face types with delta-rule layers: the order of rows, stacked experts, gates by head."""

from __future__ import annotations

from typing import Any

from tests.mutants.mutant import mutant

LOGITS = "tests/models/llama/test_delta_against_huggingface.py::test_logits_loss_and_gradients_match_hugging_face"
STACKED = "tests/checkpoint/huggingface/test_qwen3_5_folders.py::test_stacked_experts_are_read"


@mutant("megatron.models.common.gated_query_rows:GatedQueryRows.to_ours", f"{LOGITS}[qwen3_5_text]")
def queries_and_gates_keep_the_order_of_the_file(original: Any) -> Any:
    return lambda self, rows: rows


@mutant("megatron.models.llama.huggingface_hybrid:row_mappings", f"{LOGITS}[qwen3_next]")
def beta_and_decay_are_exchanged(original: Any) -> Any:
    def exchange(names: list[str], *args: Any, **kwargs: Any) -> Any:
        return original(names[::-1] if names[0].endswith(".beta") else names, *args, **kwargs)

    return exchange


@mutant("megatron.models.common.latent_attention:LatentAttention._project_output", f"{LOGITS}[bailing_hybrid]")
def output_gates_of_latent_attention_are_skipped(original: Any) -> Any:
    return lambda self, x, context: self.dense(context)


@mutant("megatron.models.common.stacked_rows:StackedRows.of", STACKED)
def stacked_experts_are_read_from_the_first_expert(original: Any) -> Any:
    return lambda self, tensor: original(type(self)(0, self.start, self.stop), tensor)
