"""Pretrain BERT. ``bash examples/bert/run_bert.sh`` starts it on all devices; ``--help`` shows the flags."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import models, mpu, tokenizer  # noqa: E402
from megatron.models import registry
from megatron.training import (  # noqa: E402
    get_args,
    get_config,
    get_data_paths,
    get_streams,
    get_tokenizer,
    pretrain,
)

if TYPE_CHECKING:
    import torch


def train_valid_test_datasets_provider(train_val_test_num_samples: list[int]) -> tuple[Any, Any, Any]:
    """Return the samples of the three splits; a split that nobody will ask for is None."""
    from megatron.models.bert.data import bert_tokens, build_bert_train_valid_test

    args, vocabulary = get_args(), get_tokenizer()
    return build_bert_train_valid_test(
        get_data_paths(),
        seq_length=args.seq_length,
        tokens=bert_tokens(vocabulary),
        seed=args.seed,
        has_pairs=args.binary_head,
        mask_prob=args.mask_prob,
        short_seq_prob=args.short_seq_prob,
        word_starts=tokenizer.word_starts(vocabulary) if args.whole_word_masking else None,
        needed=tuple(count > 0 for count in train_val_test_num_samples),
        tokenizer_identity=vocabulary.identity,
    )


def get_batch(batch: dict[str, torch.Tensor] | None) -> dict[str, Any]:
    """Return tokens, token types, padding and what is to be predicted, on all ranks of the tensor group."""
    from megatron.models.bert.model import bert_fields

    names = ["text", "labels", *(("is_random", "step_predictions") if get_args().binary_head else ())]
    sample = mpu.broadcast_data(names, batch, "int64")  # [b, s], [b, s], [b], [2]
    sample |= mpu.broadcast_data(["parts"], batch, "int32")
    told = {name: sample.pop(name) for name in names[3:]}
    return mpu.get_batch_on_this_cp_rank(bert_fields(**sample, has_segments=is_padded())) | told


def get_batch_pipe(batch: dict[str, torch.Tensor] | None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what the first stage takes, and what the losses on the last stage take."""
    fields = get_batch(batch)
    inputs = [fields.pop(name) for name in ("tokens", "token_types", "segments")]
    return tuple(inputs[: 3 if is_padded() else 2]), tuple(fields.values())


def forward_step(data_iterator: Any, bert: Any) -> tuple[Any, dict[str, Any]]:
    """Return the losses of one micro-batch by name, each as the pair (sum, count); with one head that pair."""
    fields = get_batch(None if data_iterator is None else next(data_iterator))
    return bert(**fields), {}


def is_padded() -> bool:
    """Whether samples may be shorter than others, so that their segments travel with the hidden states."""
    return bool(get_args().short_seq_prob > 0)


def model_provider() -> torch.nn.Module:
    """Return this rank's part of the model: its tensor slice and, with a pipeline, its stage."""
    config, grid = get_config(), mpu.get_grid()
    parallel, streams = config.parallel, get_streams()
    how = {"context": grid.context, "cp_comm_type": parallel.cp_comm_type}
    place = models.ParallelContext(grid.tensor, streams, parallel.sequence_parallel, **how)
    return registry.build_model(config, place, grid.topology, get_batch_pipe)


if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, forward_step, family="bert")
