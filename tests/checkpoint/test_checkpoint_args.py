"""Sizes that nobody gave come from the Hugging Face folder or the run that --load or --resume names."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import parse
from megatron.checkpoint import settings_source
from megatron.checkpoint.checkpoint_args import load_checkpoint_args
from megatron.checkpoint.huggingface import folder
from megatron.checkpoint.huggingface.config import config_to_huggingface, families_with_format
from megatron.checkpoint.huggingface.weights import expected_weights, weights_to_huggingface
from megatron.checkpoint.huggingface_args import read_headers
from megatron.config import Config
from megatron.errors import CheckpointError, ConfigError
from megatron.models.registry import FAMILIES, is_common_decoder
from tests.helpers.huggingface_models import make_family_config, random_values, save_model

ROOT = Path(__file__).resolve().parents[2]
ODD_SIZES = {
    "num_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "vocab_size": 37,
    "max_position_embeddings": 300,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"hidden_bias": True, "ff_hidden_size": 40, "activation": "gelu-tanh"},
    "gpt2 without biases and untied": {"untie_embeddings": True},
    "t5": {"max_position_embeddings": 0, "dec_layers": 2, "kv_hidden_size": 10, "layernorm_epsilon": 1e-6},
    "t5 gated and untied": {"max_position_embeddings": 0, "activation": "gated-gelu", "untie_embeddings": True},
    "llama": {"num_query_groups": 2, "activation": "gated-silu", "rotary_base": 5e5, "layernorm_epsilon": 1e-6},
    "llama untied": {"num_query_groups": 1, "activation": "gated-silu", "untie_embeddings": True, "hidden_bias": True},
    "mpt": {"clip_qkv": 6.0},
    "bert": {"hidden_bias": True, "max_position_embeddings": 512},
}
RECIPE = "--num-layers 4 --hidden-size 128 --num-attention-heads 4"
EXTRA_RECIPE = {"gpt2": "--hidden-bias --seq-length 64", "t5": "--enc-seq-length 64 --dec-layers 4 --hidden-bias"}


def model_config(name: str) -> Config:
    family = name.split()[0]
    return make_family_config(family, **{**ODD_SIZES, "make_vocab_size_divisible_by": 1, **MODELS[name]})


def write_folder(path: Path, config: Config, **overrides: Any) -> Path:
    """Write a Hugging Face folder of ``config`` in several files; ``overrides`` keys of its config.json lie."""
    path.mkdir()
    weights = {name: random_values(name, tuple(tensor.shape)) for name, tensor in expected_weights(config).items()}
    hf_config = {**config_to_huggingface(config, "float32"), **overrides}
    folder.write_json(path / folder.CONFIG, {key: value for key, value in hf_config.items() if value != "gone"})
    folder.write_tensors(path, weights_to_huggingface(weights, config), 6_000)
    return path


@pytest.fixture(scope="module")
def write_cached(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what writes the Hugging Face folder of a model once, for tests that leave it as it is."""
    root = tmp_path_factory.mktemp("written")
    return functools.cache(lambda name: write_folder(root / name, model_config(name)))


def parse_args(source: Path | None, line: str = "", family: str = "gpt2", name: str = "x", **options: Any) -> Config:
    argv = [*([] if source is None else ["--load", str(source)]), *line.split(), "--dry-run"]
    env = {"MEGATRON_DEFAULTS": f"{RECIPE} {EXTRA_RECIPE.get(family, '--max-position-embeddings 400')}"}
    load_args = partial(load_checkpoint_args, name=name)
    return parse(argv, world_size=1, env=env, family=family, checkpoint_args=load_args, **options)


def parse_error(*args: Any, error_type: type[Exception] = ConfigError, **options: Any) -> str:
    with pytest.raises(error_type) as caught:
        parse_args(*args, **options)
    return str(caught.value)


# Every family, from both kinds of folder.


@pytest.mark.parametrize("name", MODELS)
def test_folder_settings_override_recipe(name: str, tmp_path: Path) -> None:
    expected, family = model_config(name), name.split()[0]
    source = write_folder(tmp_path / "hf", expected)
    config = parse_args(source, "--finetune", family)
    assert config.identity() == expected.identity()
    for field in settings_source.INHERITED_FIELDS:
        assert getattr(config.model, field) == getattr(expected.model, field), field
    assert "num_layers" not in config.explicit_fields and "vocab_size" not in config.explicit_fields
    [note] = [note for note in config.notes if note.startswith("model settings of ")]
    assert str(source / "config.json") in note and "--hidden-size 24" in note


@pytest.mark.parametrize("name", MODELS)
def test_run_settings_apply_to_every_start_mode(name: str, tmp_path: Path) -> None:
    expected, family = model_config(name), name.split()[0]
    checkpoint = save_model(tmp_path / "run", expected)
    for line in ("", "--use-checkpoint-args", "--finetune", "--eval-only"):
        assert parse_args(tmp_path / "run", line, family).identity() == expected.identity()
    for source in (tmp_path / "run" / "checkpoints", checkpoint):
        assert parse_args(source, "", family).identity() == expected.identity()


def test_recipe_applies_without_checkpoint(tmp_path: Path) -> None:
    for source, line in ((None, ""), (tmp_path / "nowhere", ""), (tmp_path, "--load-if-exists")):
        config = parse_args(source, line)
        assert (config.model.num_layers, config.model.hidden_size) == (4, 128)
        matching_notes = [note for note in config.notes if "contains no model yet" in note]
        assert len(matching_notes) == (source is not None)


def test_dropout_and_init_std_are_not_taken_from_checkpoint(tmp_path: Path) -> None:
    saved_config = model_config("gpt2")
    source = write_folder(tmp_path / "hf", saved_config, resid_pdrop=0.3, attn_pdrop=0.3, initializer_range=0.5)
    config = parse_args(source, "--finetune --hidden-dropout 0.2")
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0.2, 0.1)
    assert config.model.init_method_std == 0.02


def test_resume_selects_newest_run_or_run_of_this_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_args(None, "--resume").model.num_layers == 4
    for num_layers in (2, 3, 5):
        checkpoint_path = save_model(
            tmp_path / "runs" / f"x-{num_layers}", make_family_config("gpt2", num_layers=num_layers)
        )
        os.utime(checkpoint_path, (num_layers, num_layers))
    save_model(tmp_path / "runs" / "y-1", make_family_config("gpt2", num_layers=7))
    assert parse_args(None, "--resume --seq-length 8").model.num_layers == 5
    assert parse_args(None, "--resume --seq-length 8 --save runs/x-3").model.num_layers == 3
    assert parse_args(None, "--resume --save runs/none --load-if-exists").model.num_layers == 4
    monkeypatch.setenv("MEGATRON_RUN_ID", "job")
    choice_file = tmp_path / "runs" / ".by-launch" / "job"
    choice_file.parent.mkdir()
    choice_file.write_text(f"runs/new\n{tmp_path / 'runs' / 'x-2'}")
    assert parse_args(None, "--resume --seq-length 8").model.num_layers == 2
    choice_file.write_text("runs/new")
    assert parse_args(None, "--resume").model.num_layers == 4


def test_last_saved_intact_checkpoint_is_used(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    save_model(run_dir, make_family_config("gpt2", num_layers=2))
    save_model(run_dir, make_family_config("gpt2", num_layers=3))
    assert parse_args(run_dir, "--seq-length 8").model.num_layers == 3
    newest = max((run_dir / "checkpoints").glob("step-*"))
    manifest = (newest / "manifest.json").read_bytes()
    (newest / "manifest.json").write_bytes(manifest.replace(b'"num_layers": 3', b'"num_layers": 9'))
    assert parse_args(run_dir, "--seq-length 8").model.num_layers == 2


# What was given, too.


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--num-layers 4", "num_layers: saved 3, now 4 (--num-layers 4)"),
        ("--hidden-size 32 --num-attention-heads 4", "hidden_size: saved 24, now 32 (--hidden-size 32)"),
        ("--ffn-hidden-size 32", "ff_hidden_size: saved 40, now 32 (--ffn-hidden-size 32)"),
        ("--vocab-size 38", "vocab_size: saved 37, now 38 (--vocab-size 38)"),
        ("--activation relu", "activation: saved gelu-tanh, now relu (--activation relu)"),
        ("--untie-embeddings-and-output-weights", "untie_embeddings: saved False, now True (--untie-embeddings-and-ou"),
        (
            "--max-position-embeddings 128",
            "max_position_embeddings: saved 300, now 128 (--max-position-emb",
        ),
    ],
)
def test_conflicting_flag_error_names_both_values_and_sources(
    line: str, expected: str, tmp_path: Path, write_cached: Callable[[str], Path]
) -> None:
    source = write_cached("gpt2")
    message = parse_error(source, f"--finetune {line}", error_type=CheckpointError)
    assert message.startswith(f"the model settings must match the checkpoint, 1 differ from {source / 'config.json'}:")
    assert expected in message and "Omit these flags" in message
    checkpoint_path = save_model(tmp_path / "run", model_config("gpt2"))
    assert (
        expected in (message := parse_error(checkpoint_path, line, error_type=CheckpointError))
        and "manifest.json" in message
    )


def test_all_conflicting_flags_are_listed(tmp_path: Path) -> None:
    checkpoint_path = save_model(tmp_path / "run", model_config("gpt2"))
    message = parse_error(checkpoint_path, "--num-layers 4 --hidden-size 32", error_type=CheckpointError)
    assert "2 differ" in message and "num_layers: saved 3" in message and "hidden_size: saved 24" in message


def test_matching_and_non_size_flags_are_accepted(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", model_config("gpt2"))
    config = parse_args(source, "--finetune --num-layers 3 --hidden-size 24 --layernorm-epsilon 1e-3 --seq-length 16")
    assert config.model.layernorm_epsilon == 1e-3 and config.batch.seq_length == 16


def test_config_file_conflict_error_names_file_and_line(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", model_config("gpt2"))
    (tmp_path / "a.yaml").write_text("\nnum-layers: 4\n")
    message = parse_error(source, f"--finetune --config {tmp_path / 'a.yaml'}", error_type=CheckpointError)
    assert f"num_layers: saved 3, now 4 ({tmp_path / 'a.yaml'}:2: num-layers 4)" in message


def test_t5_layers_of_both_stacks_come_from_folder(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", model_config("t5"))
    message = parse_error(source, "--finetune --num-layers 3", "t5", error_type=CheckpointError)
    assert "num_layers: saved 2 of dec_layers, now 3 (--num-layers 3)" in message
    assert parse_args(source, "--finetune --num-layers 3 --dec-layers 2", "t5").family_config.dec_layers == 2


def test_finetune_may_change_settings_that_fit_weights(tmp_path: Path) -> None:
    source, checkpoint_path = (
        write_folder(tmp_path / "hf", model_config("llama")),
        save_model(tmp_path / "run", model_config("llama")),
    )
    for path in (source, checkpoint_path):
        assert parse_args(path, "--finetune --rotary-base 1e6", "llama").model.rotary_base == 1e6
        assert (
            parse_args(
                path, "--finetune --max-position-embeddings 64 --seq-length 8", "llama"
            ).model.max_position_embeddings
            == 64
        )
    assert "or add --finetune" in parse_error(checkpoint_path, "--rotary-base 1e6", "llama", error_type=CheckpointError)


def test_resize_vocab_accepts_other_vocab_size(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", model_config("gpt2"))
    assert "or add --resize-vocab" in parse_error(source, "--finetune --vocab-size 50", error_type=CheckpointError)
    assert parse_args(source, "--finetune --resize-vocab --vocab-size 50").model.vocab_size == 50
    assert parse_args(source, "--finetune --resize-vocab").model.vocab_size is None
    config = parse_args(source, "--finetune")
    assert config.with_vocab(30).model.vocab_size == 37
    with pytest.raises(ConfigError, match="must not have more tokens than the model of --load .*, got 40 and 37"):
        config.with_vocab(40)


# Another family, an unknown one, and damage: named with file and key, before anything is written.


@pytest.mark.parametrize("family", FAMILIES)
def test_other_family_error_names_program(family: str, tmp_path: Path) -> None:
    for name in ("llama", "gpt2"):
        source, checkpoint_path = (
            write_folder(tmp_path / f"{name}-hf", model_config(name)),
            save_model(tmp_path / f"{name}-run", model_config(name)),
        )
        if is_common_decoder(family):  # any of its programs trains the other's models
            assert parse_args(source, "--finetune", family).model.num_layers == model_config(name).model.num_layers
            continue
        for path, expected in (
            (source, f"config.json: model_type {name}"),
            (checkpoint_path, f"manifest.json: family {name}"),
        ):
            message = parse_error(path, "--finetune", family, error_type=CheckpointError)
            assert expected in message and f"Use {FAMILIES[name].program}" in message


@pytest.mark.parametrize("model_type", ["qwen9", None, "gone"])
def test_unknown_model_type_error_names_file_and_key(model_type: str | None, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", model_config("gpt2"), model_type=model_type)
    message = parse_error(source, "--finetune", error_type=CheckpointError)
    got = None if model_type == "gone" else model_type
    assert message.startswith(f"{source / 'config.json'}: model_type must be one of gpt2") and f"got {got!r}" in message


CONTRADICTIONS = {
    "gpt2": ("n_layer", "n_embd", "n_inner", "vocab_size", "n_positions"),
    "llama": ("num_hidden_layers", "hidden_size", "intermediate_size", "num_key_value_heads", "head_dim", "vocab_size"),
    "mpt": ("n_layers", "vocab_size"),
    "t5": ("num_layers", "num_decoder_layers", "d_model", "d_ff", "d_kv", "vocab_size"),
    "bert": ("num_hidden_layers", "intermediate_size", "vocab_size", "max_position_embeddings"),
}
QUICK_CONTRADICTIONS = {
    ("gpt2", "n_layer"), ("gpt2", "n_inner"), ("llama", "head_dim"), ("llama", "num_key_value_heads"),
    ("mpt", "vocab_size"), ("t5", "num_decoder_layers"), ("t5", "d_kv"), ("bert", "intermediate_size"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "key", "factor"),
    [
        pytest.param(
            name, key, factor, marks=() if factor == 2 and (name, key) in QUICK_CONTRADICTIONS else pytest.mark.slow
        )
        for name, keys in CONTRADICTIONS.items()
        for key in keys
        for factor in (2, 1)
    ],
)
def test_config_contradicting_tensors_error_names_file_and_key(
    name: str, key: str, factor: int, tmp_path: Path, write_cached: Callable[[str], Path]
) -> None:
    source = shutil.copytree(write_cached(name), tmp_path / "hf")
    hf_config = json.loads((source / folder.CONFIG).read_text())
    true_value = hf_config[key]
    folder.write_json(source / folder.CONFIG, hf_config | {key: true_value * 2 if factor == 2 else true_value - 1})
    message = parse_error(source, "--finetune", name, error_type=CheckpointError)
    assert message.startswith(f"{source / 'config.json'}"), message
    assert f"{key} {true_value}" in message or re.search("does not (match|describe)", message), message
    assert factor == 1 or f"{key} {true_value}" in message, message


def test_missing_truncated_and_invalid_files_are_reported(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", model_config("gpt2"))
    first_file = sorted(source.glob("*.safetensors"))[0]
    content = first_file.read_bytes()

    def get_error() -> str:
        return parse_error(source, "--finetune", error_type=CheckpointError)

    first_file.write_bytes(content[:-4])
    assert get_error().startswith(f"{first_file} is not a readable safetensors file: it has {len(content) - 4} bytes")
    first_file.write_bytes(content[:6])
    assert "shorter than its header" in get_error()
    first_file.write_bytes(b"\x08\0\0\0\0\0\0\0{not it}")
    assert str(first_file) in get_error()
    first_file.unlink()
    assert get_error() == f"{source} must contain {first_file.name}, which is missing."
    first_file.write_bytes(content)
    index = source / folder.INDEX
    text = index.read_text()
    index.write_text(text.replace("transformer.wte.weight", "transformer.other.weight"))
    assert "the files lack tensors that the index lists: transformer.other.weight" in get_error()
    index.write_text('{"weight_map": {"a": "../b"}}')
    assert get_error().startswith(f"{index} is not a safetensors index")
    index.write_text(text)
    (source / "config.json").write_text("{")
    assert f"{source / 'config.json'} is not JSON" in get_error()


def test_unexpected_tensor_is_reported(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    write_folder(source, model_config("gpt2"))
    for name in source.glob("model*"):
        name.unlink()
    weights = {name: random_values(name, tuple(t.shape)) for name, t in expected_weights(model_config("gpt2")).items()}
    hf_weights = weights_to_huggingface(weights, model_config("gpt2"))
    hf_weights["transformer.h.0.extra.weight"] = hf_weights.pop("transformer.h.0.ln_1.weight")
    folder.write_tensors(source, hf_weights, 10**9)
    message = parse_error(source, "--finetune", error_type=CheckpointError)
    assert "transformer.h.0.ln_1.weight: missing" in message
    assert "transformer.h.0.extra.weight: no such tensor in this model" in message


def test_nonzero_biases_override_config(tmp_path: Path) -> None:
    untied_config, default_config = (
        model_config("gpt2 without biases and untied"),
        make_family_config("gpt2", **ODD_SIZES, untie_embeddings=True),
    )
    assert parse_args(write_folder(tmp_path / "zero", untied_config), "--finetune").model.hidden_bias is False
    with_biases = write_folder(
        tmp_path / "set", make_family_config("gpt2", **ODD_SIZES, hidden_bias=True), hidden_bias=False
    )
    assert parse_args(with_biases, "--finetune").model.hidden_bias is True
    assert default_config.model.hidden_bias is False


def test_headers_match_safetensors(tmp_path: Path) -> None:
    from safetensors import safe_open

    source = write_folder(tmp_path / "hf", model_config("llama"))
    for name, header in read_headers(source).items():
        with safe_open(header.file, framework="pt") as file:
            tensor_slice = file.get_slice(name)
            assert (header.shape, header.dtype) == (tuple(tensor_slice.get_shape()), tensor_slice.get_dtype())
            assert header.file.read_bytes()[header.start : header.stop] == file.get_tensor(name).numpy().tobytes()


# The programs.


def run_program(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def test_dry_run_and_planner_read_folder(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", model_config("llama"))
    program = str(ROOT / FAMILIES["llama"].program)
    dry_run = run_program(program, "--load", str(source), "--finetune", "--dry-run", cwd=tmp_path)
    assert dry_run.returncode == 0 and "3 layers, hidden 24, 4 heads" in dry_run.stdout, dry_run.stderr
    assert f"model settings of {source / 'config.json'}: --num-layers 3" in dry_run.stderr
    plan = run_program(str(ROOT / "tools" / "plan.py"), "--load", str(source), "--gpus", "2", cwd=tmp_path)
    assert plan.returncode == 0 and plan.stdout.startswith("llama of"), plan.stderr
    assert f"the sizes of {source / 'config.json'}" in plan.stdout
    assert "NLAYERS=3 NHIDDEN=24 NHEADS=4" in plan.stdout and f"--load {source} --finetune" in plan.stdout
    conflicting = run_program(str(ROOT / "tools" / "plan.py"), "--load", str(source), "--num-layers", "5", cwd=tmp_path)
    assert conflicting.returncode == 2 and "num_layers: saved 3, now 5 (--num-layers 5)" in conflicting.stderr
    missing = run_program(str(ROOT / "tools" / "plan.py"), "--load", "nowhere", "--gpus", "2", cwd=tmp_path)
    assert missing.returncode == 2 and "got nowhere, which contains no supported model" in missing.stderr


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"num_hidden_layers": 2}, 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (({"model_type": "qwen9"}, 3), ({}, 3))),
    ],
)
def test_bad_input_exits_before_writing(change: dict[str, Any], code: int, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", model_config("llama"), **change)
    extra_flags = ["--num-layers", "9"] if not change else []
    argv = [str(ROOT / FAMILIES["llama"].program), "--load", str(source), "--finetune", "--device", "cpu", *extra_flags]
    result = run_program(*argv, "--save", "run", cwd=tmp_path)
    assert result.returncode == code and str(source / "config.json") in result.stderr, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_parsing_imports_no_torch_for_any_family(tmp_path: Path) -> None:
    families = families_with_format()
    for family in families:
        write_folder(tmp_path / family, model_config(family))
        save_model(tmp_path / f"{family}-run", model_config(family))
    code = (
        "import sys, json\nfrom megatron.arguments import parse\n"
        "from megatron.checkpoint.checkpoint_args import load_checkpoint_args\n"
        "for family in json.loads(sys.argv[1]):\n"
        "    for end in ('', '-run'):\n"
        "        words = ['--load', family + end, '--finetune', '--dry-run']\n"
        "        config = parse(\n"
        "            words, world_size=1, env={}, family=family, checkpoint_args=load_checkpoint_args\n"
        "        )\n"
        "        assert config.model.hidden_size == 24, family\n"
        "assert not {'torch', 'numpy', 'deepspeed', 'tokenizers'} & set(sys.modules)\n"
    )
    result = run_program("-c", code, json.dumps(families), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
