"""T5 pretraining: data sets, batches, model and forward step, for ``pretrain_t5.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron import mpu
from megatron.training import get_args, get_config, get_data_paths, get_tokenizer, pretrain
from megatron.training.programs.model import build_model

if TYPE_CHECKING:
    import torch

    from megatron.models.t5.data import T5Tokens

DEFAULTS = {"activation": "relu", "layernorm_epsilon": 1e-6}


def train_valid_test_datasets_provider(train_val_test_num_samples: list[int]) -> tuple[Any, Any, Any]:
    """Build data sets for the three splits; None for a split without samples."""
    from megatron.models.t5.span_files import build_t5_train_valid_test

    args, settings = get_args(), get_config().family_config
    return build_t5_train_valid_test(
        get_data_paths(),
        enc_seq_length=settings.enc_seq_length,
        dec_seq_length=settings.dec_seq_length,
        denoisers=settings.parsed_denoisers,
        tokens=t5_tokens(),
        seed=args.seed,
        reset_attention_mask=args.reset_attention_mask,
        needed=tuple(count > 0 for count in train_val_test_num_samples),
        tokenizer_identity=get_tokenizer().identity,
        tokenizer_probe=get_tokenizer().probe,
    )


def t5_tokens() -> T5Tokens:
    """Return the token ids for sentinels, end of sequence, decoder start and padding."""
    from megatron.models.t5 import data

    settings = get_config().family_config
    return data.t5_tokens(get_tokenizer(), settings.vocab_extra_ids, settings.parsed_denoisers)


def get_batch(batch: dict[str, torch.Tensor] | None) -> dict[str, Any]:
    """Return a micro-batch's inputs, decoder inputs, labels, loss mask and segments on all ranks of the group."""
    from megatron.models.t5 import data

    fields = mpu.broadcast_data(["inputs", "targets"], batch, "int64")  # [b, s_e], [b, s_d]
    fields |= mpu.broadcast_data(["enc_segments", "dec_segments"], batch, "int32")  # -1 marks padding
    return data.t5_fields(**fields, tokens=t5_tokens(), has_segments=has_documents())


def get_batch_pipe(batch: dict[str, torch.Tensor] | None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the first stage's inputs and the loss arguments for the last stage."""
    fields = get_batch(batch)
    names = ("enc_tokens", "dec_tokens", "enc_segments", "dec_segments")[: 4 if has_documents() else 2]
    return tuple(fields[name] for name in names), (fields["labels"], fields["loss_mask"])


def forward_step(data_iterator: Any, t5: Any) -> tuple[Any, dict[str, Any]]:
    """Compute one micro-batch's loss as the pair (sum, count), and the same by name."""
    fields = get_batch(None if data_iterator is None else next(data_iterator))
    loss = t5(**fields)
    return loss, {"lm loss": loss}


def has_documents() -> bool:
    """Return True if segment ids are sent along with the hidden states: for separate documents or padded inputs."""
    config = get_config()
    return config.family_config.has_segments(config.data.reset_attention_mask)


def model_provider() -> torch.nn.Module:
    """Build this rank's model shard: a tensor slice and, with a pipeline, a stage."""
    return build_model(get_batch_pipe)


def main() -> None:
    """Pretrain T5 with this process's command line."""
    pretrain(
        train_valid_test_datasets_provider, model_provider, forward_step, args_defaults=DEFAULTS, family="t5", name="t5"
    )
