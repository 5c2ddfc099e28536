"""Which weights of a decoder have products in FP8."""

from __future__ import annotations

import pytest

from megatron.config import parse
from megatron.models.common.decoder import DecoderModel, model_args
from tds.param_info import info_of

FLAGS = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 64 --data-path none --fp8-format e4m3"
LATENT = (
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 16 --position-embedding-type rope"
)


def fp8_weights(extra: str) -> set[str]:
    """Return the names of the weights with products in FP8."""
    config = parse(f"{FLAGS} {extra}".split(), world_size=1, env={}).with_vocab(64)
    model = DecoderModel(model_args(config, for_training=True))
    return {name for name, parameter in model.named_parameters() if info_of(parameter).products is not None}


def layer_names(names: set[str], layer: int) -> set[str]:
    prefix = f"layers.{layer}."
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("", {"attention.query_key_value.weight", "attention.dense.weight", "mlp.up.weight", "mlp.down.weight"}),
        (
            f"{LATENT} --num-experts 2 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32 "
            "--moe-shared-expert-gate --attention-output-gate",
            {
                "attention.query_down.weight", "attention.query.weight", "attention.key_value_down.weight",
                "attention.dense.weight", "mlp.shared_expert.up.weight", "mlp.shared_expert.down.weight",
                *(f"mlp.experts.{expert}.{name}.weight" for expert in (0, 1) for name in ("up", "down")),
            },
        ),
    ],
)  # fmt: skip
def test_projections_and_experts_are_in_fp8(extra: str, expected: set[str]) -> None:
    names = fp8_weights(extra)
    assert layer_names(names, 1) == expected
    assert all(name.startswith("layers.") for name in names), "not embeddings, heads and final norms"


def test_first_and_last_layers_are_in_bf16() -> None:
    names = fp8_weights("--first-last-layers-bf16 --num-layers-at-start-in-bf16 2 --mtp-num-layers 1")
    assert {int(name.split(".")[1]) for name in names if name.startswith("layers.")} == {2}
    assert not any("mtp" in name for name in names), "an MTP layer has the number format of the last layer"


def test_recurrent_mixers_are_in_bf16() -> None:
    names = fp8_weights("--experimental-attention-variant gdn --linear-attention-freq 2")
    assert layer_names(names, 0) == {"mlp.up.weight", "mlp.down.weight"}


def test_models_are_in_bf16_outside_of_training() -> None:
    config = parse(FLAGS.split(), world_size=1, env={}).with_vocab(64)
    assert not model_args(config).fp8_recipe
