"""Sizes that nobody gave come from the Hugging Face folder or the run that --load or --resume names."""

from __future__ import annotations

import functools
import json
import os
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
from megatron.checkpoint.checkpoint_args import bring
from megatron.checkpoint.huggingface import folder
from megatron.checkpoint.huggingface.config import config_to_huggingface, families_with_format
from megatron.checkpoint.huggingface.weights import expected_weights, weights_to_huggingface
from megatron.checkpoint.huggingface_args import read_headers
from megatron.config import Config
from megatron.errors import CheckpointError, ConfigError
from megatron.models.registry import FAMILIES, is_common_decoder
from tests.helpers.huggingface_models import config_of, save_model, values_of

ROOT = Path(__file__).resolve().parents[2]
ODD = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "vocab_size": 37, "max_position_embeddings": 300}
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
MORE = {"gpt2": "--hidden-bias --seq-length 64", "t5": "--enc-seq-length 64 --dec-layers 4 --hidden-bias"}


def model(name: str) -> Config:
    family = name.split()[0]
    return config_of(family, **{**ODD, "make_vocab_size_divisible_by": 1, **MODELS[name]})


def write(place: Path, config: Config, **changed: Any) -> Path:
    """Write a Hugging Face folder of ``config`` in several files; ``changed`` keys of its config.json lie."""
    place.mkdir()
    weights = {name: values_of(name, tuple(tensor.shape)) for name, tensor in expected_weights(config).items()}
    theirs = {**config_to_huggingface(config, "float32"), **changed}
    folder.write_json(place / folder.CONFIG, {key: value for key, value in theirs.items() if value != "gone"})
    folder.write_tensors(place, weights_to_huggingface(weights, config), 6_000)
    return place


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what writes the Hugging Face folder of a model once, for tests that leave it as it is."""
    place = tmp_path_factory.mktemp("written")
    return functools.cache(lambda name: write(place / name, model(name)))


def read(source: Path | None, line: str = "", family: str = "gpt2", name: str = "x", **others: Any) -> Config:
    words = [*([] if source is None else ["--load", str(source)]), *line.split(), "--dry-run"]
    env = {"MEGATRON_DEFAULTS": f"{RECIPE} {MORE.get(family, '--max-position-embeddings 400')}"}
    bringing = partial(bring, name=name)
    return parse(words, world_size=1, env=env, family=family, checkpoint_args=bringing, **others)


def error_of(*args: Any, kind: type[Exception] = ConfigError, **others: Any) -> str:
    with pytest.raises(kind) as caught:
        read(*args, **others)
    return str(caught.value)


# Every family, from both kinds of folder.


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_brings_every_size_ahead_of_the_recipe(name: str, tmp_path: Path) -> None:
    wanted, family = model(name), name.split()[0]
    source = write(tmp_path / "hf", wanted)
    config = read(source, "--finetune", family)
    assert config.identity() == wanted.identity()
    for field in settings_source.OF_WEIGHTS:
        assert getattr(config.model, field) == getattr(wanted.model, field), field
    assert "num_layers" not in config.given and "vocab_size" not in config.given
    [note] = [note for note in config.notes if note.startswith("model settings of ")]
    assert str(source / "config.json") in note and "--hidden-size 24" in note


@pytest.mark.parametrize("name", MODELS)
def test_a_run_brings_every_size_to_all_ways_of_starting_from_it(name: str, tmp_path: Path) -> None:
    wanted, family = model(name), name.split()[0]
    checkpoint = save_model(tmp_path / "run", wanted)
    for line in ("", "--use-checkpoint-args", "--finetune", "--eval-only"):
        assert read(tmp_path / "run", line, family).identity() == wanted.identity()
    for source in (tmp_path / "run" / "checkpoints", checkpoint):
        assert read(source, "", family).identity() == wanted.identity()


def test_without_a_source_the_recipe_holds(tmp_path: Path) -> None:
    for source, line in ((None, ""), (tmp_path / "nowhere", ""), (tmp_path, "--load-if-exists")):
        config = read(source, line)
        assert (config.model.num_layers, config.model.hidden_size) == (4, 128)
        noted = [note for note in config.notes if "contains no model yet" in note]
        assert len(noted) == (source is not None)


def test_dropout_and_initial_weights_are_the_run_s_own(tmp_path: Path) -> None:
    wanted = model("gpt2")
    source = write(tmp_path / "hf", wanted, resid_pdrop=0.3, attn_pdrop=0.3, initializer_range=0.5)
    config = read(source, "--finetune --hidden-dropout 0.2")
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0.2, 0.1)
    assert config.model.init_method_std == 0.02


def test_resume_takes_the_newest_run_of_its_name_or_what_this_job_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read(None, "--resume").model.num_layers == 4
    for layers in (2, 3, 5):
        made = save_model(tmp_path / "runs" / f"x-{layers}", config_of("gpt2", num_layers=layers))
        os.utime(made, (layers, layers))
    save_model(tmp_path / "runs" / "y-1", config_of("gpt2", num_layers=7))
    assert read(None, "--resume --seq-length 8").model.num_layers == 5
    assert read(None, "--resume --seq-length 8 --save runs/x-3").model.num_layers == 3
    assert read(None, "--resume --save runs/none --load-if-exists").model.num_layers == 4
    monkeypatch.setenv("MEGATRON_RUN_ID", "job")
    note = tmp_path / "runs" / ".by-launch" / "job"
    note.parent.mkdir()
    note.write_text(f"runs/new\n{tmp_path / 'runs' / 'x-2'}")
    assert read(None, "--resume --seq-length 8").model.num_layers == 2
    note.write_text("runs/new")
    assert read(None, "--resume").model.num_layers == 4


def test_of_several_checkpoints_the_last_saved_one_counts_and_a_broken_one_does_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_model(run, config_of("gpt2", num_layers=2))
    save_model(run, config_of("gpt2", num_layers=3))
    assert read(run, "--seq-length 8").model.num_layers == 3
    newest = max((run / "checkpoints").glob("step-*"))
    text = (newest / "manifest.json").read_bytes()
    (newest / "manifest.json").write_bytes(text.replace(b'"num_layers": 3', b'"num_layers": 9'))
    assert read(run, "--seq-length 8").model.num_layers == 2


# What was given, too.


@pytest.mark.parametrize(
    ("line", "said"),
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
def test_a_given_size_that_differs_is_an_error_that_names_both_and_both_places(
    line: str, said: str, tmp_path: Path, written: Callable[[str], Path]
) -> None:
    source = written("gpt2")
    message = error_of(source, f"--finetune {line}", kind=CheckpointError)
    assert message.startswith(f"the model settings must match the checkpoint, 1 differ from {source / 'config.json'}:")
    assert said in message and "Omit these flags" in message
    run = save_model(tmp_path / "run", model("gpt2"))
    assert said in (message := error_of(run, line, kind=CheckpointError)) and "manifest.json" in message


def test_every_size_that_differs_is_listed(tmp_path: Path) -> None:
    run = save_model(tmp_path / "run", model("gpt2"))
    message = error_of(run, "--num-layers 4 --hidden-size 32", kind=CheckpointError)
    assert "2 differ" in message and "num_layers: saved 3" in message and "hidden_size: saved 24" in message


def test_given_sizes_that_agree_and_what_is_no_size_are_taken(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", model("gpt2"))
    config = read(source, "--finetune --num-layers 3 --hidden-size 24 --layernorm-epsilon 1e-3 --seq-length 16")
    assert config.model.layernorm_epsilon == 1e-3 and config.batch.seq_length == 16


def test_a_size_of_a_config_file_is_given_and_told_with_its_line(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", model("gpt2"))
    (tmp_path / "a.yaml").write_text("\nnum-layers: 4\n")
    message = error_of(source, f"--finetune --config {tmp_path / 'a.yaml'}", kind=CheckpointError)
    assert f"num_layers: saved 3, now 4 ({tmp_path / 'a.yaml'}:2: num-layers 4)" in message


def test_layers_of_both_sides_are_those_of_the_folder(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", model("t5"))
    message = error_of(source, "--finetune --num-layers 3", "t5", kind=CheckpointError)
    assert "num_layers: saved 2 of dec_layers, now 3 (--num-layers 3)" in message
    assert read(source, "--finetune --num-layers 3 --dec-layers 2", "t5").own.dec_layers == 2


def test_a_fresh_start_may_change_what_fits_the_weights(tmp_path: Path) -> None:
    source, run = write(tmp_path / "hf", model("llama")), save_model(tmp_path / "run", model("llama"))
    for place in (source, run):
        assert read(place, "--finetune --rotary-base 1e6", "llama").model.rotary_base == 1e6
        assert (
            read(place, "--finetune --max-position-embeddings 64 --seq-length 8", "llama").model.max_position_embeddings
            == 64
        )
    assert "or add --finetune" in error_of(run, "--rotary-base 1e6", "llama", kind=CheckpointError)


def test_another_vocabulary_is_taken_with_resize_vocab(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", model("gpt2"))
    assert "or add --resize-vocab" in error_of(source, "--finetune --vocab-size 50", kind=CheckpointError)
    assert read(source, "--finetune --resize-vocab --vocab-size 50").model.vocab_size == 50
    assert read(source, "--finetune --resize-vocab").model.vocab_size is None
    brought = read(source, "--finetune")
    assert brought.with_vocab(30).model.vocab_size == 37
    with pytest.raises(ConfigError, match="must not have more tokens than the model of --load .*, got 40 and 37"):
        brought.with_vocab(40)


# Another family, an unknown one, and damage: named with file and key, before anything is written.


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_another_family_names_the_program_to_use(family: str, tmp_path: Path) -> None:
    for name in ("llama", "gpt2"):
        source, run = write(tmp_path / f"{name}-hf", model(name)), save_model(tmp_path / f"{name}-run", model(name))
        if is_common_decoder(family):  # any of its programs trains the other's models
            assert read(source, "--finetune", family).model.num_layers == model(name).model.num_layers
            continue
        for place, said in ((source, f"config.json: model_type {name}"), (run, f"manifest.json: family {name}")):
            message = error_of(place, "--finetune", family, kind=CheckpointError)
            assert said in message and f"Use {FAMILIES[name].program}" in message


@pytest.mark.parametrize("kind", ["qwen9", None, "gone"])
def test_an_unknown_model_type_is_named_with_file_and_key(kind: str | None, tmp_path: Path) -> None:
    source = write(tmp_path / "hf", model("gpt2"), model_type=kind)
    message = error_of(source, "--finetune", kind=CheckpointError)
    got = None if kind == "gone" else kind
    assert message.startswith(f"{source / 'config.json'}: model_type must be one of gpt2") and f"got {got!r}" in message


LIES = {
    "gpt2": ("n_layer", "n_embd", "n_inner", "vocab_size", "n_positions"),
    "llama": ("num_hidden_layers", "hidden_size", "intermediate_size", "num_key_value_heads", "head_dim", "vocab_size"),
    "mpt": ("n_layers", "vocab_size"),
    "t5": ("num_layers", "num_decoder_layers", "d_model", "d_ff", "d_kv", "vocab_size"),
    "bert": ("num_hidden_layers", "intermediate_size", "vocab_size", "max_position_embeddings"),
}
QUICK_LIES = {
    ("gpt2", "n_layer"), ("gpt2", "n_inner"), ("llama", "head_dim"), ("llama", "num_key_value_heads"),
    ("mpt", "vocab_size"), ("t5", "num_decoder_layers"), ("t5", "d_kv"), ("bert", "intermediate_size"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "key", "factor"),
    [
        pytest.param(name, key, factor, marks=() if factor == 2 and (name, key) in QUICK_LIES else pytest.mark.slow)
        for name, keys in LIES.items()
        for key in keys
        for factor in (2, 1)
    ],
)
def test_a_size_that_contradicts_the_tensors_is_named_with_its_file_and_key(
    name: str, key: str, factor: int, tmp_path: Path, written: Callable[[str], Path]
) -> None:
    source = shutil.copytree(written(name), tmp_path / "hf")
    theirs = json.loads((source / folder.CONFIG).read_text())
    true = theirs[key]
    folder.write_json(source / folder.CONFIG, theirs | {key: true * 2 if factor == 2 else true - 1})
    message = error_of(source, "--finetune", name, kind=CheckpointError)
    assert message.startswith(f"{source / 'config.json'}"), message
    assert f"{key} {true}" in message or "does not match" in message, message
    assert factor == 1 or f"{key} {true}" in message, message


def test_missing_cut_off_and_foreign_files_are_named(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", model("gpt2"))
    first = sorted(source.glob("*.safetensors"))[0]
    whole = first.read_bytes()

    def noted() -> str:
        return error_of(source, "--finetune", kind=CheckpointError)

    first.write_bytes(whole[:-4])
    assert noted().startswith(f"{first} is not a readable safetensors file: it has {len(whole) - 4} bytes")
    first.write_bytes(whole[:6])
    assert "shorter than its header" in noted()
    first.write_bytes(b"\x08\0\0\0\0\0\0\0{not it}")
    assert str(first) in noted()
    first.unlink()
    assert noted() == f"{source} must contain {first.name}, which is missing."
    first.write_bytes(whole)
    index = source / folder.INDEX
    text = index.read_text()
    index.write_text(text.replace("transformer.wte.weight", "transformer.other.weight"))
    assert "the files lack tensors that the index lists: transformer.other.weight" in noted()
    index.write_text('{"weight_map": {"a": "../b"}}')
    assert noted().startswith(f"{index} is not a safetensors index")
    index.write_text(text)
    (source / "config.json").write_text("{")
    assert f"{source / 'config.json'} is not JSON" in noted()


def test_a_tensor_that_is_not_of_the_model_is_named(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    write(source, model("gpt2"))
    for name in source.glob("model*"):
        name.unlink()
    weights = {name: values_of(name, tuple(t.shape)) for name, t in expected_weights(model("gpt2")).items()}
    theirs = weights_to_huggingface(weights, model("gpt2"))
    theirs["transformer.h.0.extra.weight"] = theirs.pop("transformer.h.0.ln_1.weight")
    folder.write_tensors(source, theirs, 10**9)
    message = error_of(source, "--finetune", kind=CheckpointError)
    assert "transformer.h.0.ln_1.weight: missing" in message
    assert "transformer.h.0.extra.weight: no such tensor in this model" in message


def test_biases_that_config_json_denies_count_where_they_are_not_zero(tmp_path: Path) -> None:
    bare, full = model("gpt2 without biases and untied"), config_of("gpt2", **ODD, untie_embeddings=True)
    assert read(write(tmp_path / "zero", bare), "--finetune").model.hidden_bias is False
    with_biases = write(tmp_path / "set", config_of("gpt2", **ODD, hidden_bias=True), hidden_bias=False)
    assert read(with_biases, "--finetune").model.hidden_bias is True
    assert full.model.hidden_bias is False


def test_headers_are_those_that_the_library_reads(tmp_path: Path) -> None:
    from safetensors import safe_open

    source = write(tmp_path / "hf", model("llama"))
    for name, header in read_headers(source).items():
        with safe_open(header.file, framework="pt") as file:
            part = file.get_slice(name)
            assert (header.shape, header.dtype) == (tuple(part.get_shape()), part.get_dtype())
            assert header.file.read_bytes()[header.start : header.stop] == file.get_tensor(name).numpy().tobytes()


# The programs.


def start(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def test_a_dry_run_and_the_planner_see_the_folder(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", model("llama"))
    program = str(ROOT / FAMILIES["llama"].program)
    done = start(program, "--load", str(source), "--finetune", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0 and "3 layers, hidden 24, 4 heads" in done.stdout, done.stderr
    assert f"model settings of {source / 'config.json'}: --num-layers 3" in done.stderr
    planned = start(str(ROOT / "tools" / "plan.py"), "--load", str(source), "--gpus", "2", cwd=tmp_path)
    assert planned.returncode == 0 and planned.stdout.startswith("llama of"), planned.stderr
    assert f"the sizes of {source / 'config.json'}" in planned.stdout
    assert "NLAYERS=3 NHIDDEN=24 NHEADS=4" in planned.stdout and f"--load {source} --finetune" in planned.stdout
    other = start(str(ROOT / "tools" / "plan.py"), "--load", str(source), "--num-layers", "5", cwd=tmp_path)
    assert other.returncode == 2 and "num_layers: saved 3, now 5 (--num-layers 5)" in other.stderr
    missing = start(str(ROOT / "tools" / "plan.py"), "--load", "nowhere", "--gpus", "2", cwd=tmp_path)
    assert missing.returncode == 2 and "got nowhere, which contains no supported model" in missing.stderr


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"num_hidden_layers": 2}, 3),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (({"model_type": "qwen9"}, 3), ({}, 3))),
    ],
)
def test_bad_input_ends_a_run_before_anything_is_written(change: dict[str, Any], code: int, tmp_path: Path) -> None:
    source = write(tmp_path / "hf", model("llama"), **change)
    more = ["--num-layers", "9"] if not change else []
    words = [str(ROOT / FAMILIES["llama"].program), "--load", str(source), "--finetune", "--device", "cpu", *more]
    done = start(*words, "--save", "run", cwd=tmp_path)
    assert done.returncode == code and str(source / "config.json") in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_no_torch_is_imported_for_any_family(tmp_path: Path) -> None:
    families = families_with_format()
    for family in families:
        write(tmp_path / family, model(family))
        save_model(tmp_path / f"{family}-run", model(family))
    code = (
        "import sys, json\nfrom megatron.arguments import parse\n"
        "from megatron.checkpoint.checkpoint_args import bring\n"
        "for family in json.loads(sys.argv[1]):\n"
        "    for end in ('', '-run'):\n"
        "        words = ['--load', family + end, '--finetune', '--dry-run']\n"
        "        config = parse(words, world_size=1, env={}, family=family, checkpoint_args=bring)\n"
        "        assert config.model.hidden_size == 24, family\n"
        "assert not {'torch', 'numpy', 'deepspeed', 'tokenizers'} & set(sys.modules)\n"
    )
    done = start("-c", code, json.dumps(families), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
