"""Decoder pretraining: data sets, batches, model and forward step, for ``pretrain_gpt2.py`` and others.

``--model`` selects the decoder. ``examples/own_model.py`` has the same functions for a model of your own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron import data, mpu
from megatron.training import (
    get_args,
    get_chat_template,
    get_config,
    get_data_paths,
    get_tokenizer,
    pretrain,
)
from megatron.training.programs.model import build_model

if TYPE_CHECKING:
    import torch

EOD_FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def train_valid_test_datasets_provider(train_val_test_num_samples: list[int]) -> tuple[Any, Any, Any]:
    """Build data sets for the three splits; None for a split without samples."""
    args, tokenizer = get_args(), get_tokenizer()
    needed = tuple(count > 0 for count in train_val_test_num_samples)
    if args.sft is not None:
        return data.build_sft_train_valid_test(
            get_data_paths(),
            seq_length=args.seq_length,
            seed=args.seed,
            template=get_chat_template(),
            overlong=args.sft_overlong,
            needed=needed,
        )
    return data.build_train_valid_test(
        get_data_paths(),
        seq_length=args.seq_length,
        seed=args.seed,
        vocab_size=args.vocab_size,
        needed=needed,
        tokenizer_identity=tokenizer.identity,
        tokenizer_probe=tokenizer.probe,
        eod_id=tokenizer.eod_id,
        flags_needing_eod=["--" + flag.replace("_", "-") for flag in EOD_FLAGS if getattr(args, flag)],
        packing=args.packing,
        fim=data.fim_from(tokenizer, args.fim_rate, args.fim_spm_rate),
        num_samples=train_val_test_num_samples,
        has_extra_token=not args.no_extra_token,
    )


def get_batch(batch: dict[str, torch.Tensor] | None) -> dict[str, Any]:
    """Return a micro-batch's tokens, labels, loss mask, segment ids and position ids.

    The tensors are the same on all ranks of a tensor group. With context parallelism, each tensor holds this rank's
    sequence chunks.

    Args:
        batch: micro-batch on the tensor rank that reads data; None on the others.
    """
    args, config = get_args(), get_config()
    text = mpu.broadcast_data(["text"], batch, "int64")["text"]  # [b, s+1]
    keys = config.data.packed_keys  # segments of packed documents, and the loss mask of conversations
    packed = mpu.broadcast_data(keys, batch, "int32") if keys else {}
    flags = {name: getattr(args, name) for name in EOD_FLAGS}
    fields = data.gpt2_fields(text, **packed, eod_id=get_tokenizer().eod_id, **flags)
    if not config.model.has_learned_positions and not args.reset_position_ids:
        fields["position_ids"] = None  # 0 ... s-1, computed on each stage
    return mpu.get_batch_on_this_cp_rank(fields) if args.context_parallel_size > 1 else fields


def get_batch_pipe(batch: dict[str, torch.Tensor] | None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the first stage's inputs and the loss arguments for the last stage."""
    fields = get_batch(batch)
    further_inputs = (fields[name] for name in get_config().model.stage_input_fields if fields[name] is not None)
    return (fields["tokens"], *further_inputs), (fields["labels"], fields["loss_mask"])


def forward_step(data_iterator: Any, model: Any) -> tuple[Any, dict[str, Any]]:
    """Compute one micro-batch's loss as the pair (sum, count), and the same by name."""
    fields = get_batch(None if data_iterator is None else next(data_iterator))
    loss = model(**fields)
    return loss, {"lm loss": loss}


def model_provider() -> torch.nn.Module:
    """Build this rank's model shard: a tensor slice and, with a pipeline, a stage."""
    return build_model(get_batch_pipe)


def main(family: str = "gpt2", *, args_defaults: Mapping[str, Any] | None = None, name: str | None = None) -> None:
    """Pretrain a decoder with this process's command line.

    Args:
        family: model family if there is no ``--model``.
        args_defaults: as in ``pretrain``.
        name: as in ``pretrain``.
    """
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        forward_step,
        args_defaults=args_defaults,
        name=name,
        family=family,
        accepts_model=True,
    )
