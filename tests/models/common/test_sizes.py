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
from tests.helpers.model_samples import SEQ, fill_weights, make_batch, make_parallel_context

BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 12 --vocab-size 101 "
    "--data-path none --device cpu --attention-dropout 0 --hidden-dropout 0 --train-iters 1"
)


def make_model(flags="", group=None):
    config = parse(f"{BASE} {flags}".split(), world_size=group.size if group else 1)
    args = model_args_from(config.model, **recompute_switches(config))
    return fill_weights(DecoderModel(args, make_parallel_context(group or Group((0,), 0))))


def read_shape(name):
    return lambda model: tuple(dict(model.named_parameters())[name].shape)


def parameter_names(model):
    return {name for name, _ in model.named_parameters()}


def read_chunk_size(model):
    """Return the tokens of a chunk of [4, 3] tokens' logits, None where they are made together."""
    logits = head_output(torch.zeros(4, 3, 16), model.embedding.word.weight, model.model_args, model.parallel)
    return None if isinstance(logits, torch.Tensor) else logits.chunk_tokens


QKV, UP, DENSE = (
    f"layers.0.{module_name}.weight" for module_name in ("attention.query_key_value", "mlp.up", "attention.dense")
)
CASES = [
    ("", lambda model: len(model.layers), 2),
    ("--num-layers 5", lambda model: len(model.layers), 5),
    ("", read_shape("embedding.word.weight"), (101, 16)),
    ("--hidden-size 24", read_shape("embedding.word.weight"), (101, 24)),
    ("--vocab-size 77", read_shape("embedding.word.weight"), (77, 16)),
    ("--make-vocab-size-divisible-by 16", read_shape("embedding.word.weight"), (112, 16)),
    ("", read_shape("embedding.position.weight"), (SEQ, 16)),
    ("--max-position-embeddings 40", read_shape("embedding.position.weight"), (40, 16)),
    ("", read_shape(QKV), (3 * 16, 16)),
    ("--kv-hidden-size 6", read_shape(QKV), (3 * 4 * 6, 16)),
    ("--kv-hidden-size 6", read_shape(DENSE), (16, 4 * 6)),
    ("--num-attention-heads 8 --kv-hidden-size 6", read_shape(QKV), (3 * 8 * 6, 16)),
    ("--num-attention-heads 8", lambda model: model.layers[0].attention.num_heads, 8),
    ("", read_shape(UP), (64, 16)),
    ("--ff-hidden-size 20", read_shape(UP), (20, 16)),
    ("", lambda model: read_chunk_size(model), None),
    ("--loss-chunk-tokens 0", lambda model: read_chunk_size(model), None),
    ("--loss-chunk-tokens 6", lambda model: read_chunk_size(model), 6),
    ("--untie-embeddings-and-output-weights", read_shape("head.weight"), (101, 16)),
    ("", lambda model: "head.weight" in parameter_names(model), False),
    ("", lambda model: sorted(n for n in parameter_names(model) if "bias" in n and "norm" not in n), []),
    ("--hidden-bias", lambda model: len([n for n in parameter_names(model) if "bias" in n and "norm" not in n]), 2 * 4),
]


@pytest.mark.parametrize(("flags", "read", "expected"), CASES, ids=[f"{flags} -> {e}" for flags, _, e in CASES])
def test_size_flag_changes_its_tensor(flags, read, expected):
    assert read(make_model(flags)) == expected


OUTPUT_FLAGS = [
    "--layernorm-epsilon 0.1", "--activation gelu-tanh", "--openai-gelu", "--num-attention-heads 2",
    "--activation relu", "--apply-residual-connection-post-layernorm",
]  # fmt: skip


@pytest.mark.parametrize("flags", OUTPUT_FLAGS)
def test_flag_without_tensor_changes_output(flags):
    batch = make_batch()
    inputs = (batch.tokens, batch.position_ids)
    assert not torch.allclose(make_model(flags)(*inputs), make_model()(*inputs), atol=1e-4)


def test_post_norm_residual_is_normalized_input():
    layer = make_model("--apply-residual-connection-post-layernorm").layers[0]
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
def test_checkpoint_flags_save_only_input_of_each_run(flags, runs, monkeypatch):
    run_lengths = []
    original_call = Recompute.__call__
    monkeypatch.setattr(
        Recompute,
        "__call__",
        lambda self, run, *extra: run_lengths.append(len(run.args[0])) or original_call(self, run, *extra),
    )
    batch = make_batch()
    model = make_model(f"--num-layers 5 {flags}")
    saved_numels = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved_numels.append(x.numel()) or x, lambda x: x):
        model(batch.tokens, batch.position_ids)
    assert run_lengths == runs
    has_inner_activations = (
        sum(saved_numels) > 5 * 3 * SEQ * 64 * 2
    )  # two tensors of the feed-forward size for each layer
    assert has_inner_activations == (not runs)
    run_lengths.clear()
    with torch.no_grad():
        model(batch.tokens, batch.position_ids)
    assert run_lengths == [], "nothing is kept in evaluation, so nothing is run again"


def test_tensor_ranks_pad_vocabulary():
    groups = [Group((0, 1, 2, 3), rank) for rank in range(4)]
    flags = "--model-parallel-size 4 --make-vocab-size-divisible-by 8"
    assert [read_shape("embedding.word.weight")(make_model(flags, group)) for group in groups] == [(32, 16)] * 4


def test_cases_cover_every_model_config_field():
    """A new size must be tried here; dropout, initial weights and losses have files of their own."""
    tested_elsewhere = {
        "attention_dropout",
        "hidden_dropout",
        "layout_independent_dropout",
        "init_method_std",
        "z_loss",
    }
    tested_elsewhere |= {"loss_average", "architecture"}
    flag_names = {"untie_embeddings": "untie-embeddings-and-output-weights"}
    tested_flags = " ".join([flags for flags, _, _ in CASES] + OUTPUT_FLAGS)
    for field in set(ModelConfig.__dataclass_fields__) - tested_elsewhere - set(DecoderFeatures.__dataclass_fields__):
        assert flag_names.get(field, field.replace("_", "-")) in tested_flags, field
    fp8_config = parse([*BASE.split(), "--bf16", "--fp8-format", "e4m3"], world_size=1)
    extra_fields = {"family", *recompute_switches(fp8_config), *fp8_config.precision.fp8_layers()}
    assert set(ModelArgs.__dataclass_fields__) - extra_fields <= set(ModelConfig.__dataclass_fields__)
