"""Pretrain LLaMA. ``bash examples/llama/run_llama.sh`` starts it on all devices; ``--help`` shows the flags."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import data, models, mpu  # noqa: E402
from megatron.models import registry
from megatron.training import (  # noqa: E402
    get_args,
    get_chat_template,
    get_config,
    get_data_paths,
    get_streams,
    get_tokenizer,
    pretrain,
)

if TYPE_CHECKING:
    import torch

EOD_FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def train_valid_test_datasets_provider(train_val_test_num_samples: list[int]) -> tuple[Any, Any, Any]:
    """Return the samples of the three splits; a split that nobody will ask for is None."""
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
        eod_id=tokenizer.eod_id,
        flags_needing_eod=["--" + flag.replace("_", "-") for flag in EOD_FLAGS if getattr(args, flag)],
        packing=args.packing,
        fim=data.fim_from(tokenizer, args.fim_rate, args.fim_spm_rate),
    )


def get_batch(batch: dict[str, torch.Tensor] | None) -> dict[str, Any]:
    """Return tokens, labels, loss mask, documents and positions of a micro-batch on every rank of the tensor group.

    With context parallelism those of this rank's pieces of the sequences.
    """
    args, config = get_args(), get_config()
    text = mpu.broadcast_data(["text"], batch, "int64")["text"]  # [b, s+1]
    keys = config.data.packed_keys  # segments of packed documents, and the loss mask of conversations
    packed = mpu.broadcast_data(keys, batch, "int32") if keys else {}
    flags = {name: getattr(args, name) for name in EOD_FLAGS}
    fields = data.gpt2_fields(text, **packed, eod_id=get_tokenizer().eod_id, **flags)
    if not config.model.has_learned_positions and not args.reset_position_ids:
        fields["position_ids"] = None  # 0 ... s-1, which each stage counts itself
    return mpu.get_batch_on_this_cp_rank(fields) if args.context_parallel_size > 1 else fields


def get_batch_pipe(batch: dict[str, torch.Tensor] | None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what the first stage takes, and what the loss on the last stage takes."""
    fields = get_batch(batch)
    beside = (fields[name] for name in get_config().model.entering if fields[name] is not None)
    return (fields["tokens"], *beside), (fields["labels"], fields["loss_mask"])


def forward_step(data_iterator: Any, llama: Any) -> tuple[Any, dict[str, Any]]:
    """Return the loss of one micro-batch as the pair (sum, count)."""
    fields = get_batch(None if data_iterator is None else next(data_iterator))
    loss = llama(**fields)
    return loss, {"lm loss": loss}


def model_provider() -> torch.nn.Module:
    """Return this rank's part of the model: its tensor slice and, with a pipeline, its stage."""
    config, grid = get_config(), mpu.get_grid()
    parallel, streams = config.parallel, get_streams()
    how = {"context": grid.context, "cp_comm_type": parallel.cp_comm_type}
    how |= {"expert": grid.expert, "cuts_experts": parallel.cuts_experts}
    place = models.ParallelContext(grid.tensor, streams, parallel.sequence_parallel, **how)
    return registry.build_model(config, place, grid.topology, get_batch_pipe)


if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, forward_step, family="llama")
