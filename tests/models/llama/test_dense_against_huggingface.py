"""Dense types of Hugging Face, one row each: logits, loss, every gradient, generation, and folders in both directions.

The references are random models of ``transformers``' own classes with every feature of the class and odd sizes, which
compute in fp64 by their own code.
"""

from __future__ import annotations

import json
import shlex
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.huggingface.config import config_from_huggingface, config_to_huggingface
from megatron.checkpoint.huggingface.weights import open_pretrained, weights_from_huggingface
from megatron.checkpoint.huggingface_args import read_huggingface
from megatron.config import Config, parse
from megatron.errors import CheckpointError
from megatron.generate import generate_gpt2
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.llama.huggingface_dense import XIELU_CONSTANTS
from megatron.models.llama.huggingface_dense_types import DENSE_TYPES, shortest_decimal
from megatron.models.registry import build_model
from megatron.mpu.shard import Shard
from megatron.ops import xielu
from tests.helpers.decoder_against_huggingface import HuggingFaceComparison
from tests.helpers.dense_decoders import DENSE_CASES, VARIANT_CASES, format_of_case, fp64_model, random_dense_case
from tests.helpers.huggingface_models import make_family_config
from tests.helpers.modern_decoders import FLAGS, FULL, SEQ_LENGTH, VOCAB
from tests.helpers.upcasts import fp64_instead_of_fp32
from tests.tools.test_convert_hf import ConvertCommand, are_equal, convert, read_tensors

__all__ = ["convert"]  # the fixture

RANDOM_CASES = {f"random {seed}": random_dense_case(seed) for seed in range(26)}
CASES = {**DENSE_CASES, **VARIANT_CASES, **RANDOM_CASES}
TOLERANCES = {1: (1e-12, 1e-13, 1e-12, None), 2: (1e-12, 1e-12, 1e-11, None), 3: (1e-12, 1e-12, 1e-11, None)}
"""Number of tensor ranks -> bounds for (logits, loss, gradients, weights)."""


def slow_except(names: Any, quick_names: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick_names else pytest.mark.slow) for name in names]


def make_reference(name: str) -> tuple[Any, Config]:
    """Return Hugging Face's model and our configuration for it."""
    return fp64_model(CASES[name]), CASES[name].our_config()


def make_comparison(name: str, num_ranks: int = 1) -> HuggingFaceComparison:
    return HuggingFaceComparison(
        format_of_case(CASES[name]),
        {name: "fp64"},
        make_reference,
        fp64_instead_of_fp32,
        {"fp64": TOLERANCES[num_ranks]},
    )


def test_every_type_has_a_case() -> None:
    assert list(DENSE_CASES) != [] and {dense_type.model_type for dense_type in DENSE_TYPES} == set(DENSE_CASES)
    assert {case.huggingface_config().model_type for case in DENSE_CASES.values()} == set(DENSE_CASES)


@pytest.mark.parametrize("name", slow_except(CASES, DENSE_CASES))
def test_logits_loss_and_gradients_match_hugging_face(name: str) -> None:
    comparison = make_comparison(name)
    comparison.check(name, 1)
    comparison.check_round_trip(name, (1, CASES[name].num_kv_heads))


@pytest.mark.parametrize("name", slow_except({**DENSE_CASES, **VARIANT_CASES}, ("apertus", "stablelm")))
def test_tensor_ranks_match_hugging_face(name: str) -> None:
    num_ranks = CASES[name].num_kv_heads
    make_comparison(name, num_ranks).check(name, num_ranks)


@pytest.mark.parametrize("name", DENSE_CASES)
def test_flags_match_hugging_face_settings(name: str) -> None:
    config = CASES[name].our_config()
    flags = f"{FLAGS} {CASES[name].flags} --seq-length {SEQ_LENGTH} --data-path none --device cpu".split()
    parsed = parse(flags, world_size=1, family="llama")
    assert parsed.identity() == config.identity() and parsed.model == config.model


@pytest.mark.parametrize("name", slow_except({**DENSE_CASES, **VARIANT_CASES}, ("cohere2", "ministral3", "phi3")))
@torch.no_grad()
def test_greedy_generation_with_cache_matches_hugging_face(name: str) -> None:
    """LongRoPE selects its factors by the longest row, where transformers restarts its cache, so its rows are long."""
    hf_model = fp64_model(CASES[name], tie_word_embeddings=False).eval()
    config = config_from_huggingface(hf_model.config.to_dict())
    our_model = build_model(config, ParallelContext()).double().eval()
    our_model.load_state_dict(format_of_case(CASES[name]).to_ours(hf_model.state_dict(), config))
    prompts = [[5, 17, 3, 60, 2], [42, 1, 3, 8, 9, 77, 5, 6, 2, 20, 21, 22], [7, 9]]
    prompts = prompts[:2] if name == "phi3, long" else prompts
    with fp64_instead_of_fp32():
        expected = [
            hf_model.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    assert len({token for row in expected for token in row}) > 5
    assert generate_gpt2(our_model, prompts, max_new_tokens=12) == expected
    assert all(token < VOCAB for row in expected for token in row)


@pytest.mark.parametrize("name", slow_except({**DENSE_CASES, **VARIANT_CASES}, DENSE_CASES))
def test_folder_round_trip_is_bitwise(name: str, convert: ConvertCommand, tmp_path: Path) -> None:
    """Weights, settings, tokens and keys that we do not know; the export is verified with the class of transformers."""
    model = CASES[name].huggingface_model(torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "an_unknown_key": [1], "eos_token_id": [3, 4]}))
    code, output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")
    assert code == 0, output
    flags = shlex.split(output.split("pretrain_gpt2.py ")[1])
    parsed = parse([*flags, "--data-path", "none", "--seq-length", "12"], world_size=1, accepts_model=True)
    assert parsed.identity() == CASES[name].our_config().identity()
    code, output = convert("export", "--load", tmp_path / "run", "--output", tmp_path / "back", "--verify")
    assert code == 0 and "verified: the logits of a random batch differ by" in output, output
    assert are_equal(read_tensors(tmp_path / "back"), read_tensors(tmp_path / "theirs"))
    assert (tmp_path / "back" / "config.json").read_text() == path.read_text()


@pytest.mark.parametrize("name", slow_except(DENSE_CASES, ("apertus", "glm4", "phi3", "stablelm")))
def test_ranks_read_slices_of_a_folder(name: str, tmp_path: Path) -> None:
    """The settings come from config.json and the headers; rows may start within a head."""
    CASES[name].huggingface_model(torch.float32).save_pretrained(tmp_path)
    assert read_huggingface(tmp_path, "llama", name).config.identity() == CASES[name].our_config().identity()
    with ExitStack() as stack:
        pretrained = open_pretrained(tmp_path, stack)
        weights = weights_from_huggingface(read_tensors(tmp_path), pretrained.config, name)
        assert weights.keys() == pretrained.recipes.keys()
        for weight_name, weight in weights.items():
            start = len(weight) // 3
            shard = Shard(tuple(weight.shape), 0, start, len(weight) - start)
            assert pretrained.read(weight_name, shard).equal(weight[start:]), weight_name


@pytest.mark.parametrize("name", slow_except(CASES, {**DENSE_CASES, **VARIANT_CASES}))
def test_config_round_trips_through_transformers(name: str) -> None:
    """A config.json that we write has the meaning for transformers that it has for us, without the folder's own."""
    hf_config, config = CASES[name].huggingface_config(), CASES[name].our_config()
    written = json.loads(json.dumps(config_to_huggingface(config, "float32", hf_config.model_type)))
    assert config_from_huggingface(written).model == config.model
    restored = type(hf_config).from_dict(written)
    assert config_from_huggingface(restored.to_dict()).model == config.model


def test_minicpm_is_exported_as_granite() -> None:
    minicpm = make_family_config(
        "llama", position_embedding_type="rope", normalization="RMSNorm", activation="gated-silu",
        embedding_multiplier=12.0, residual_scale=1.4, dim_model_base=4, hidden_size=36, num_layers=40,
    )  # fmt: skip
    exported = config_to_huggingface(minicpm, "float32")
    assert exported["model_type"] == "granite" and exported["embedding_multiplier"] == 12.0
    assert exported["logits_scaling"] == 9.0 and exported["residual_multiplier"] == 1.4 / 40**0.5
    imported = config_from_huggingface(exported).model
    assert (imported.residual_scale, imported.dim_model_base) == (1.4, 4)
    assert imported.logit_multiplier == minicpm.model.logit_multiplier


def test_shortest_decimal_is_exact() -> None:
    root = 40**0.5
    assert shortest_decimal(1.4 / root * root, lambda x: x / root == 1.4 / root) == 1.4
    assert shortest_decimal(1 / (1 / 49.0), lambda x: 1.0 / x == 1 / 49.0) == 49.0
    assert shortest_decimal(0.1 + 0.2, lambda x: False) == 0.1 + 0.2


def test_constants_of_xielu_match_class() -> None:
    from transformers.activations import XIELUActivation

    assert {"beta": xielu.BETA, "eps": xielu.EPS} == XIELU_CONSTANTS
    activation = XIELUActivation(dtype=torch.float64)
    assert {"beta": activation.beta.item(), "eps": activation.eps.item()} == XIELU_CONSTANTS
    assert activation.alpha_p.item() == pytest.approx(xielu.inverse_softplus(xielu.INITIAL_SCALE), abs=1e-15)
    assert activation.alpha_n.item() == pytest.approx(
        xielu.inverse_softplus(xielu.INITIAL_SCALE - xielu.BETA), abs=1e-15
    )


def test_other_constants_of_xielu_are_rejected(convert: ConvertCommand, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    DENSE_CASES["apertus"].huggingface_model(torch.float32).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.act_fn.beta"].fill_(0.25)
    save_file(tensors, path, {"format": "pt"})
    code, output = convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")
    assert code == 3 and "model.layers.1.mlp.act_fn.beta must be 0.5, got 0.25" in output
    for name in [name for name in tensors if name.endswith(("act_fn.beta", "act_fn.eps"))]:
        del tensors[name]
    save_file(tensors, path, {"format": "pt"})
    assert convert("import", "--input", tmp_path / "theirs", "--output", tmp_path / "run")[0] == 0


@pytest.mark.parametrize(
    ("model_type", "overrides", "expected_messages"),
    [
        ("olmo3", {"layer_types": ["chunked_attention", FULL, FULL]}, ["layer_types with chunked_attention"]),
        ("olmo3", {"rope_parameters": {"rope_type": "default"}}, ["rope_parameters with rope_type (supported: "]),
        ("seed_oss", {"attention_out_bias": True}, ["attention_bias True, attention_out_bias True, mlp_bias False"]),
        (
            "ernie4_5",
            {"hidden_act": "gelu", "rope_parameters": {"rope_type": "mrope"}, "quantization_config": {"bits": 4}},
            ["hidden_act 'gelu'", "rope_type 'mrope'", "quantization_config {'bits': 4}"],
        ),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, ["without llama_4_scaling_beta"]),
        ("granite", {"residual_multiplier": 0}, ["residual_multiplier 0 (supported: above 0)"]),
        ("phi3", {"rope_parameters": {"rope_type": "llama3"}}, ["rope_type 'llama3' (supported: default, longrope)"]),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": 2.0}},
            ["short_factor 2.0 (supported: a list of numbers)", "rope_type 'longrope' without long_factor"],
        ),
        ("stablelm", {"hidden_size": 61}, ["hidden_size 61 with num_attention_heads 6 (supported: a multiple)"]),
        ("cohere2", {"layer_types": [FULL] * 3}, ["layers without a window only, which have no positions"]),
        ("apertus", {"hidden_act": "silu", "attention_bias": True}, ["hidden_act 'silu'", "attention_bias True"]),
        ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_type 'dynamic'"]),
    ],
)
def test_unsupported_settings_are_listed(
    model_type: str, overrides: dict[str, Any], expected_messages: list[str]
) -> None:
    hf_config = {**DENSE_CASES[model_type].huggingface_config().to_dict(), **overrides}
    with pytest.raises(CheckpointError, match=f"do not support these settings of {model_type}") as excinfo:
        config_from_huggingface(hf_config)
    assert all(message in str(excinfo.value) for message in expected_messages), excinfo.value


@pytest.mark.parametrize(
    ("model_type", "overrides", "expected_message"),
    [
        ("cohere2", {"no_rope_freq": "3"}, "layers must have rotary positions exactly if they have a window"),
        ("ministral3", {"attention_temperature_floor": 4}, "--attention-temperature-floor must equal"),
        ("phi3", {"rotary_scaling": "linear"}, "--rotary-scaling must be none or longrope, got linear"),
        ("stablelm", {"parallel_residual": "separate-norms"}, "--parallel-residual must be none or shared-norm"),
        ("glm4", {"hidden_bias": True, "add_qkv_bias": False}, "--hidden-bias is not supported by glm4"),
        ("apertus", {"activation": "gated-silu"}, "--activation must be xielu, got gated-silu"),
        ("arcee", {"logit_scale": 2.0}, "--logit-scale must be 1.0, got 2.0"),
        ("nemotron", {"layernorm_1p": False}, "--apply-layernorm-1p must be True, got False"),
    ],
)
def test_export_rejects_other_settings(model_type: str, overrides: dict[str, Any], expected_message: str) -> None:
    config = DENSE_CASES[model_type].our_config()
    with pytest.raises(CheckpointError) as excinfo:
        config_to_huggingface(replace(config, model=replace(config.model, **overrides)), "float32", model_type)
    assert expected_message in str(excinfo.value)
