"""Mistakes in samples and their masks."""

from __future__ import annotations

from tests.mutants.mutant import LAYOUTS, Mutant

DATA = (
    Mutant(
        "replicas read the same samples",
        "megatron/training/data.py",
        "            data_rank=world.grid.data.rank,\n",
        "            data_rank=0,\n",
        (f"{LAYOUTS}::test_two_replicas_are_bitwise_the_sum_in_rank_order",),
    ),
    Mutant(
        "micro-batches are read in another order",
        "megatron/data/data_loader.py",
        "own + micro_batch * self.micro_batch_size\n",
        "own + (share.number - 1 - micro_batch) * self.micro_batch_size\n",
        ("tests/data/test_batches.py::test_global_batches_are_the_same_in_every_layout",),
    ),
    Mutant(
        "the last stage reads other labels than the first reads tokens",
        "megatron/training/data.py",
        "            samples_consumed=samples_consumed,\n",
        "            samples_consumed=samples_consumed + world.grid.pipe.rank,\n",
        (f"{LAYOUTS}::test_tied_pipeline_differs_in_the_tied_weight_alone",),
    ),
    Mutant(
        "labels are the tokens themselves",
        "megatron/data/gpt_dataset.py",
        "tokens[:, 1:].contiguous()",
        "tokens[:, :-1].contiguous()",
        ("tests/data/test_fields.py::test_documents_are_told_apart",),
    ),
    Mutant(
        "an end-of-document token belongs to the next document",
        "megatron/data/gpt_dataset.py",
        "    return ended.cumsum(dim=1, dtype=torch.int32) - ended\n",
        "    return ended.cumsum(dim=1, dtype=torch.int32)\n",
        ("tests/data/test_fields.py::test_documents_are_told_apart",),
    ),
    Mutant(
        "positions start anew one token late",
        "megatron/data/gpt_dataset.py",
        "torch.where(is_eod[:, :-1], positions[:, 1:], 0)",
        "torch.where(is_eod[:, :-1], positions[:, :-1], 0)",
        ("tests/data/test_fields.py::test_documents_are_told_apart",),
    ),
    Mutant(
        "the mask of documents shows the next token",
        "megatron/ops/attention.py",
        "    return same.tril().unsqueeze(1)\n",
        "    return same.tril(1).unsqueeze(1)\n",
        ("tests/ops/test_attention.py::test_a_document_mask_is_causal_within_documents",),
    ),
    Mutant(
        "attention without a mask sees all tokens",
        "megatron/ops/attention.py",
        "    is_causal = mask is None if is_causal is None else is_causal\n",
        "    is_causal = False if is_causal is None else is_causal\n",
        ("tests/ops/test_attention.py::test_no_position_sees_a_later_one",),
    ),
    Mutant(
        "every epoch has the same order",
        "megatron/data/sample_index.py",
        'Permutation(self.per_epoch, "samples", self.seed, number)',
        'Permutation(self.per_epoch, "samples", self.seed, 0)',
        ("tests/data/test_gpt2_samples.py::test_samples_equal_the_reference",),
    ),
)
