"""BERT pretraining: data sets, batches, model and forward step, for ``pretrain_bert.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron import mpu
from megatron.training import (
    get_args,
    get_data_paths,
    get_tokenizer,
    pretrain,
)
from megatron.training.programs.model import build_model

if TYPE_CHECKING:
    import torch


def train_valid_test_datasets_provider(train_val_test_num_samples: list[int]) -> tuple[Any, Any, Any]:
    """Build data sets for the three splits; None for a split without samples."""
    from megatron import tokenizer  # imports numpy, which --help does not need
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
        tokenizer_probe=vocabulary.probe,
    )


def get_batch(batch: dict[str, torch.Tensor] | None) -> dict[str, Any]:
    """Return a micro-batch's tokens, token types, padding and labels, the same on all ranks of the tensor group."""
    from megatron.models.bert.model import bert_fields

    names = ["text", "labels", *(("is_random", "step_predictions") if get_args().binary_head else ())]
    sample = mpu.broadcast_data(names, batch, "int64")  # [b, s], [b, s], [b], [2]
    sample |= mpu.broadcast_data(["parts"], batch, "int32")
    predictions = {name: sample.pop(name) for name in names[3:]}
    return mpu.get_batch_on_this_cp_rank(bert_fields(**sample, has_segments=is_padded())) | predictions


def get_batch_pipe(batch: dict[str, torch.Tensor] | None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the first stage's inputs and the loss arguments for the last stage."""
    fields = get_batch(batch)
    inputs = [fields.pop(name) for name in ("tokens", "token_types", "segments")]
    return tuple(inputs[: 3 if is_padded() else 2]), tuple(fields.values())


def forward_step(data_iterator: Any, bert: Any) -> tuple[Any, dict[str, Any]]:
    """Compute one micro-batch's losses: pairs (sum, count) by name, or a single pair if the model has one head."""
    fields = get_batch(None if data_iterator is None else next(data_iterator))
    return bert(**fields), {}


def is_padded() -> bool:
    """Return True if samples may be padded, so that segment ids are sent along with the hidden states."""
    return bool(get_args().short_seq_prob > 0)


def model_provider() -> torch.nn.Module:
    """Build this rank's model shard: a tensor slice and, with a pipeline, a stage."""
    return build_model(get_batch_pipe)


def main(*, args_defaults: Mapping[str, Any] | None = None) -> None:
    """Pretrain BERT with this process's command line.

    Args:
        args_defaults: as in ``pretrain``.
    """
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        forward_step,
        args_defaults=args_defaults,
        family="bert",
        name="bert",
    )
