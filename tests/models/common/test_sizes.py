"""Every size flag changes what it says, from the command line to the tensor."""

from __future__ import annotations

import pytest
import torch

from megatron.config import ModelConfig, parse
from megatron.config.decoder import DecoderFeatures
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.language_model import head_output
from megatron.models.common.model_args import ModelArgs, model_args_from
from megatron.models.common.transformer import Recompute, recompute_switches
from megatron.mpu.groups import Group
from tests.helpers.model_samples import SEQ, batch_of, filled, place_of

BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 12 --vocab-size 101 "
    "--data-path none --device cpu --attention-dropout 0 --hidden-dropout 0 --train-iters 1"
)


def model_of(flags="", group=None):
    config = parse(f"{BASE} {flags}".split(), world_size=group.size if group else 1)
    sizes = model_args_from(config.model, **recompute_switches(config))
    return filled(DecoderModel(sizes, place_of(group or Group((0,), 0))))


def shape(name):
    return lambda model: tuple(dict(model.named_parameters())[name].shape)


def names(model):
    return {name for name, _ in model.named_parameters()}


def chunk_of(model):
    """Return the tokens of a chunk of [4, 3] tokens' logits, None where they are made together."""
    logits = head_output(torch.zeros(4, 3, 16), model.embedding.word.weight, model.sizes, model.place)
    return None if isinstance(logits, torch.Tensor) else logits.at_once


QKV, UP, DENSE = (f"layers.0.{part}.weight" for part in ("attention.query_key_value", "mlp.up", "attention.dense"))
CASES = [
    ("", lambda model: len(model.layers), 2),
    ("--num-layers 5", lambda model: len(model.layers), 5),
    ("", shape("embedding.word.weight"), (101, 16)),
    ("--hidden-size 24", shape("embedding.word.weight"), (101, 24)),
    ("--vocab-size 77", shape("embedding.word.weight"), (77, 16)),
    ("--make-vocab-size-divisible-by 16", shape("embedding.word.weight"), (112, 16)),
    ("", shape("embedding.position.weight"), (SEQ, 16)),
    ("--max-position-embeddings 40", shape("embedding.position.weight"), (40, 16)),
    ("", shape(QKV), (3 * 16, 16)),
    ("--kv-hidden-size 6", shape(QKV), (3 * 4 * 6, 16)),
    ("--kv-hidden-size 6", shape(DENSE), (16, 4 * 6)),
    ("--num-attention-heads 8 --kv-hidden-size 6", shape(QKV), (3 * 8 * 6, 16)),
    ("--num-attention-heads 8", lambda model: model.layers[0].attention.num_heads, 8),
    ("", shape(UP), (64, 16)),
    ("--ff-hidden-size 20", shape(UP), (20, 16)),
    ("", lambda model: chunk_of(model), None),
    ("--loss-chunk-tokens 0", lambda model: chunk_of(model), None),
    ("--loss-chunk-tokens 6", lambda model: chunk_of(model), 6),
    ("--untie-embeddings-and-output-weights", shape("head.weight"), (101, 16)),
    ("", lambda model: "head.weight" in names(model), False),
    ("", lambda model: sorted(n for n in names(model) if "bias" in n and "norm" not in n), []),
    ("--hidden-bias", lambda model: len([n for n in names(model) if "bias" in n and "norm" not in n]), 2 * 4),
]


@pytest.mark.parametrize(("flags", "read", "expected"), CASES, ids=[f"{flags} -> {e}" for flags, _, e in CASES])
def test_a_size_flag_changes_the_tensor_it_names(flags, read, expected):
    assert read(model_of(flags)) == expected


OUTPUT_FLAGS = [
    "--layernorm-epsilon 0.1", "--activation gelu-tanh", "--openai-gelu", "--num-attention-heads 2",
    "--activation relu", "--apply-residual-connection-post-layernorm",
]  # fmt: skip


@pytest.mark.parametrize("flags", OUTPUT_FLAGS)
def test_a_switch_without_a_tensor_changes_the_output(flags):
    batch = batch_of()
    inputs = (batch.tokens, batch.position_ids)
    assert not torch.allclose(model_of(flags)(*inputs), model_of()(*inputs), atol=1e-4)


def test_the_residual_after_the_norm_is_the_normalised_input():
    layer = model_of("--apply-residual-connection-post-layernorm").layers[0]
    x = torch.randn(SEQ, 2, 16, generator=torch.Generator().manual_seed(0))
    normed = layer.input_norm(x)
    x1 = normed + layer.attention(normed)
    normed = layer.post_attention_norm(x1)
    assert torch.equal(layer(x), normed + layer.mlp(normed))


@pytest.mark.parametrize(
    ("flags", "runs"),
    [
        ("", []),
        ("--checkpoint-activations", [1] * 5),
        ("--checkpoint-activations --checkpoint-num-layers 2", [2, 2, 1]),
    ],
)
def test_checkpoint_flags_keep_the_input_of_each_run_of_layers_only(flags, runs, monkeypatch):
    seen = []
    real = Recompute.__call__
    monkeypatch.setattr(
        Recompute, "__call__", lambda self, run, *rest: seen.append(len(run.args[0])) or real(self, run, *rest)
    )
    batch = batch_of()
    model = model_of(f"--num-layers 5 {flags}")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        model(batch.tokens, batch.position_ids)
    assert seen == runs
    inside = sum(kept) > 5 * 3 * SEQ * 64 * 2  # two tensors of the feed-forward size for each layer
    assert inside == (not runs)
    seen.clear()
    with torch.no_grad():
        model(batch.tokens, batch.position_ids)
    assert seen == [], "nothing is kept in evaluation, so nothing is run again"


def test_tensor_ranks_pad_the_vocabulary_for_each_of_them():
    groups = [Group((0, 1, 2, 3), rank) for rank in range(4)]
    flags = "--model-parallel-size 4 --make-vocab-size-divisible-by 8"
    assert [shape("embedding.word.weight")(model_of(flags, group)) for group in groups] == [(32, 16)] * 4


def test_the_cases_name_every_field_of_the_model_configuration():
    """A new size must be tried here; dropout, initial weights and losses have files of their own."""
    elsewhere = {"attention_dropout", "hidden_dropout", "layout_independent_dropout", "init_method_std", "z_loss"}
    elsewhere |= {"loss_average", "architecture"}
    flag_of = {"untie_embeddings": "untie-embeddings-and-output-weights"}
    tried = " ".join([flags for flags, _, _ in CASES] + OUTPUT_FLAGS)
    for field in set(ModelConfig.__dataclass_fields__) - elsewhere - set(DecoderFeatures.__dataclass_fields__):
        assert flag_of.get(field, field.replace("_", "-")) in tried, field
    own = {"family", *recompute_switches(parse(BASE.split(), world_size=1))}
    assert set(ModelArgs.__dataclass_fields__) - own <= set(ModelConfig.__dataclass_fields__)
