"""--config: flags from YAML, TOML and JSON, weaker than the command line alone; a run's config.json repeats it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron.arguments import parse
from megatron.arguments.flag_values import family_options
from megatron.config import Config
from megatron.errors import ConfigError
from megatron.models.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
YAML = """
# sizes
model: {num-layers: 2, hidden_size: 64}
num-attention-heads: 8
lr: 3e-4
min-lr: 0
bf16: true
hidden-bias: false
data-path: [0.7, data/a, 0.3, data/b c]
sample-prompts: [Once upon, a time]
pipeline-trace: true
log-document-losses: true
seed: 7
save:
"""
TOML = """
num-attention-heads = 8
lr = 3e-4
min-lr = 0
bf16 = true
hidden-bias = false
data-path = [0.7, "data/a", 0.3, "data/b c"]
sample-prompts = ["Once upon", "a time"]
pipeline-trace = true
log-document-losses = true
seed = 7
[model]
num-layers = 2
hidden_size = 64
"""
JSON = {
    "model": {"num-layers": 2, "hidden_size": 64},
    "num-attention-heads": 8,
    "lr": 3e-4,
    "min-lr": 0,
    "bf16": True,
    "hidden-bias": False,
    "data-path": [0.7, "data/a", 0.3, "data/b c"],
    "sample-prompts": ["Once upon", "a time"],
    "pipeline-trace": True,
    "log-document-losses": True,
    "seed": 7,
    "save": None,
}
EQUIVALENT_FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --lr 3e-4 --min-lr 0 --bf16 --seed 7 --pipeline-trace",
    "--data-path 0.7 data/a 0.3".split()
    + ["data/b c"]
    + ["--sample-prompts", "Once upon", "a time", "--log-document-losses"],
)
PIPELINE_FLAGS = "--pipe-parallel-size 2 --dry-run"


def parse_file(folder: Path, text: str, line: str = "", name: str = "run.yaml", **kwargs) -> Config:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    kwargs.setdefault("env", {})
    return parse([*line.split(), "--config", str(path)], world_size=kwargs.pop("world_size", 1), **kwargs)


def error_message(folder: Path, text: str, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as exc_info:
        parse_file(folder, text, *args, **kwargs)
    return str(exc_info.value).replace(f"{folder}/", "")


def config_sections(config: Config) -> dict:
    values = config.to_dict()
    del values["run"]["config"]
    return values


@pytest.mark.parametrize(("name", "text"), [("a.yaml", YAML), ("a.yml", YAML), ("a.toml", TOML), ("a.json", "")])
def test_file_equals_same_flags(tmp_path, name, text):
    words = [*EQUIVALENT_FLAGS[0].split(), *EQUIVALENT_FLAGS[1], *PIPELINE_FLAGS.split()]
    expected = parse(words, world_size=2, env={})
    config = parse_file(tmp_path, text or json.dumps(JSON), PIPELINE_FLAGS, name, world_size=2)
    assert config_sections(config) == config_sections(expected)
    assert {*config.explicit_fields} == {*expected.explicit_fields, "config", "hidden_bias"}


def test_every_option_key_is_unambiguous(tmp_path):
    for family in FAMILIES:
        names = {option.name: option for option in family_options(family)}
        for option in family_options(family):
            for flag in option.flags:
                other = names.get(flag.lstrip("-").replace("-", "_"), option)
                assert other.name == option.name, f"{flag} of {option.name} is the name of another field"


def test_precedence_is_command_line_file_json_recipe(tmp_path):
    ds_json = tmp_path / "ds.json"
    ds_json.write_text(json.dumps({"gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": 5}))
    env = {"MEGATRON_DEFAULTS": "--gas 4 --num-layers 9 --seq-length 77 --hidden-size 32"}
    text = f"deepspeed_config: {ds_json}\ngas: 2\nhidden-size: 128\nnum-layers: 3\n"
    config = parse_file(tmp_path, text, "--num-layers 6", env=env)
    assert (config.model.num_layers, config.model.hidden_size, config.batch.seq_length) == (6, 128, 77)
    assert (config.batch.gas, config.batch.batch_size) == (2, 5)
    override_notes = [note for note in config.notes if "gradient_accumulation_steps 3 of the JSON" in note]
    assert len(override_notes) == 1 and "run.yaml:2: gas 2 overrides" in override_notes[0]
    assert "MEGATRON_DEFAULTS" not in error_message(tmp_path, "lr: 0")
    with pytest.raises(ConfigError, match="--config is accepted on the command line only"):
        parse([], world_size=1, env={"MEGATRON_DEFAULTS": "--config a.yaml"})


def test_false_overrides_recipe(tmp_path):
    env = {"MEGATRON_DEFAULTS": "--hidden-bias --bf16"}
    config = parse_file(tmp_path, "hidden-bias: false\nfp16: false\n", env=env)
    assert (config.model.hidden_bias, config.precision.dtype) == (False, "bf16")


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("data-path: a\nsplit: 1,1,1", "--train-data-path b --eval-iters 0", {"data_path": None, "split": "949,50,1"}),
        ("vocab-file: FILE\nmerge-file: FILE", "--tokenizer-path FILE", {"vocab_file": None, "merge_file": None}),
        ("tokenizer-path: FILE", "--vocab-file FILE --merge-file FILE", {"tokenizer_path": None}),
        ("load: a\nfinetune: true", "--resume", {"load": None}),
    ],
)
def test_command_line_overrides_conflicting_file_keys(tmp_path, text, line, expected):
    (tmp_path / "file.json").write_text("{}")
    text, line = (template.replace("FILE", str(tmp_path / "file.json")) for template in (text, line))
    values = vars(parse_file(tmp_path, text, f"{line} --dry-run").namespace())
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("train-samples: 80", "--train-samples 40", {"train_iters": 10}),
        ("train-samples: 80", "--train-iters 40", {"train_iters": 40, "lr_decay_samples": None}),
        ("train-iters: 80", "--train-samples 40", {"train_iters": 10}),
        ("train-tokens: 80000", "--train-iters 40", {"train_iters": 40}),
        ("swiglu: true", "--activation gelu", {"activation": "gelu", "ff_hidden_size": 4 * 256}),
        ("activation: gelu", "--swiglu --hidden-size 300", {"activation": "gated-silu", "ff_hidden_size": 768}),
        ("glu-activation: swiglu", "--activation relu", {"activation": "relu"}),
        ("activation: relu", "--glu-activation swiglu", {"activation": "gated-silu"}),
        ("activation: silu", "--no-bias-gelu-fusion", {"activation": "silu"}),
        ("num-query-groups: 2", "--group-query-attention", {"num_query_groups": 2}),
        ("group-query-attention: true", "--num-query-groups 2", {"num_query_groups": 2}),
        ("use-distributed-optimizer: true", "--zero-stage 2", {"zero_stage": 2}),
        ("zero-stage: 2", "--use-distributed-optimizer", {"zero_stage": 2}),
        ("lr-warmup-iters: 9", "--lr-warmup-fraction 0.1", {"warmup": 0.1, "lr_warmup_iters": None}),
        ("lr-warmup-samples: 9", "--lr-warmup-iters 5", {"lr_warmup_iters": 5, "lr_warmup_samples": None}),
        ("warmup: 0.1", "--lr-warmup-tokens 2048", {"lr_warmup_samples": 8}),
        ("lr-warmup-tokens: 2048", "--warmup 0.1", {"warmup": 0.1, "lr_warmup_samples": None}),
        ("lr-decay-iters: 9", "--lr-decay-tokens 102400", {"lr_decay_samples": 400}),
        ("lr-wsd-decay-iters: 9\nlr-decay-style: wsd", "--wsd-decay-fraction 0.5", {"lr_wsd_decay_iters": None}),
        ("exit-duration-in-mins: 9", "--exit-duration-in-secs 60", {"exit_duration_in_mins": 1}),
        ("ds-sequence-parallel-size: 2", "--context-parallel-size 1", {"context_parallel_size": 1}),
        ("skip-train: true\nsave-interval: 5", "--load x", {"eval_only": True, "save_interval": 0}),
    ],
)
def test_command_line_replaces_file_keys_with_other_names(tmp_path, text, line, expected):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    config = parse([*line.split(), "--config", str(path)], world_size=1, env={})
    values = vars(config.namespace())
    assert {name: values[name] for name in expected} == expected
    assert not [note for note in config.notes if "given more than once" in note] and not config.shadowed
    if line in ("--group-query-attention", "--use-distributed-optimizer"):
        return  # the flag of the command line means a value there, which a recipe's default does not change
    recipe = text.replace("\n", " --").replace(": true", "").replace(":", "")
    config = parse(line.split(), world_size=1, env={"MEGATRON_DEFAULTS": f"--{recipe}"})
    values = vars(config.namespace())
    assert {name: values[name] for name in expected} == expected, "flags of a run script's recipe give way, too"


def test_file_values_accept_command_line_synonyms(tmp_path):
    assert parse_file(tmp_path, "lr-decay-style: WSD").optimizer.lr_decay_style == "wsd"


def test_unrelated_file_keys_remain(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train-samples: 80\nswiglu: true\nlr-warmup-tokens: 2048\nhidden-size: 300\nff-hidden-size: 512")
    config = parse(["--lr-decay-samples", "40", "--config", str(path)], world_size=1, env={})
    assert (config.batch.train_iters, config.optimizer.lr_decay_samples) == (20, 40)
    assert (config.optimizer.lr_warmup_samples, config.model.activation) == (8, "gated-silu")


def test_derived_batch_size_is_recomputed(tmp_path):
    text = "global-batch-size: 64\nbatch-size: 8\ngas: 8\n"
    for line, expected in (
        ("--batch-size 4", (4, 16)),
        ("--gas 4", (16, 4)),
        ("--global-batch-size 32", (8, 4)),
        ("--batch-size 2 --gas 3", (2, 3)),
    ):
        batch = parse_file(tmp_path, text, line).batch
        assert (batch.batch_size, batch.gas) == expected, line
    assert "run.yaml:2: batch-size 7" in error_message(tmp_path, text.replace("size: 8", "size: 7"))


DUPLICATES = {
    "run.yaml": ("num-layers: 2\nmodel:\n  hidden-size: 3\n  hidden-size: 4\n", 4, "'hidden-size'"),
    "top.yaml": ("num-layers: 2\nlr: 1\nnum-layers: 3\n", 3, "'num-layers'"),
    "run.toml": ("num-layers = 2\n[model]\nhidden-size = 3\nhidden-size = 4\n", 4, "'hidden-size = 4'"),
    "run.json": ('{"num-layers": 2,\n "model": {"hidden-size": 3,\n "hidden-size": 4}}', 3, "'hidden-size'"),
}


@pytest.mark.parametrize("name", DUPLICATES)
def test_duplicate_key_error_names_file_line_and_key(tmp_path, name):
    text, line, key = DUPLICATES[name]
    message = error_message(tmp_path, text, name=name)
    assert message.startswith(f"{name}:{line}:") and f"a key may occur only once, got {key} again" in message, message


def test_two_keys_for_one_flag_raise(tmp_path):
    message = error_message(tmp_path, "model: {num-layers: 2}\nnum_layers: 3\n")
    assert message.startswith("run.yaml:2: num_layers sets the same field as run.yaml:1: num-layers")
    assert "a flag may occur only once" in error_message(tmp_path, "bf16: true\nfp32: true\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num-layer: 2", "run.yaml:1: unknown key num-layer; did you mean num-layers?"),
        ("modle: {num-layers: 2}", "run.yaml:1: unknown section modle; did you mean model?"),
        ("num-layers: two", "run.yaml:1: num-layers must be an integer of at least 0, got 'two'"),
        ("num-layers: 2.5", "run.yaml:1: num-layers must be an integer of at least 0, got 2.5"),
        ("num-layers: true", "run.yaml:1: num-layers must be an integer of at least 0, got True"),
        ("num-layers:", "run.yaml:1: num-layers must be an integer of at least 0, got no value"),
        ("num-layers: [2]", "run.yaml:1: num-layers must be an integer of at least 0, got a list"),
        ("\nlr: '0.1'", "run.yaml:2: lr must be a finite number of more than 0, got '0.1'"),
        ("lr: .inf", "run.yaml:1: lr must be a finite number of more than 0, got inf"),
        ("save: 5", "run.yaml:1: save must be a string, got 5. Quote it"),
        ("compile: yes", "run.yaml:1: compile must be true or false, got 'yes'"),
        ("bf16: 1", "run.yaml:1: bf16 must be true or false, got 1"),
        ("data-path: {a: 1}", "run.yaml:1: unknown section data-path"),
        ("data-path: [a, [b]]", "run.yaml:1: data-path must be a string, or a list of strings and numbers, got a list"),
        ("lr-decay-style: sine", "run.yaml:1: lr-decay-style must be one of"),
        ("config: b.yaml", "run.yaml:1: config is accepted on the command line only"),
        ("enc-seq-length: 2", "run.yaml:1: --enc-seq-length is not supported"),
        ("mtp-detach-heads: true", "run.yaml:1: --mtp-detach-heads is not supported"),
        ("a: [", "run.yaml:1:5: must be YAML"),
        ("a: !!python/object:os.system {}", "run.yaml:1: unknown section a"),
        ("a: !run 1", "run.yaml:1: YAML tags are not supported, got !run"),
        ("a: &b [*b]", "run.yaml:1: YAML aliases of lists and mappings are not supported"),
        ("- a", "run.yaml:1: must contain keys with values"),
        ("a: 1\n---\nb: 2", "run.yaml:2:1: must be YAML"),
        ("[1, 2]: 3", "run.yaml:1: a key must be a name"),
        ("", "run.yaml:1:1: must contain flags, got an empty file"),
    ],
)
def test_invalid_entry_error_names_file_line_and_key(tmp_path, text, expected):
    assert error_message(tmp_path, text).startswith(expected)


def test_docs_quote_example_run_yaml():
    text = (ROOT / "examples" / "run.yaml").read_text(encoding="utf-8")
    config = parse(["--config", str(ROOT / "examples" / "run.yaml")], world_size=1, env={})
    assert (config.model.num_layers, config.model.hidden_size, config.optimizer.lr) == (6, 192, 2e-3)
    for page in ("docs/run_scripts.md", "docs/zh/run_scripts.md"):
        assert f"```yaml\n{text}```" in (ROOT / page).read_text(encoding="utf-8")


def test_invalid_toml_and_unknown_suffix_raise(tmp_path):
    assert error_message(tmp_path, "a =\nb = 2", name="run.toml").startswith("run.toml:1: must be TOML")
    assert error_message(tmp_path, "[model]\nnum-layers = 'a'", name="run.toml").startswith(
        "run.toml:2: num-layers must be"
    )
    assert "--config must name a file that ends in .yaml, .yml, .toml, .json" in error_message(
        tmp_path, "", name="run.txt"
    )
    with pytest.raises(ConfigError, match="--config must name a file that can be read, got nowhere.yaml"):
        parse(["--config", "nowhere.yaml"], world_size=1, env={})


def test_file_and_command_line_errors_are_reported_together(tmp_path):
    message = error_message(tmp_path, "num-layers: a\nlr: b\n", "--hidden-sice 4")
    assert message.startswith("3 problems") and "--hidden-sice" in message and "lr must be" in message


def test_extra_args_provider_flags_are_file_keys(tmp_path):
    def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--my-flag", type=int, default=1)
        parser.add_argument("--my-words", nargs="*")
        parser.add_argument("--my-switch", action="store_true")
        return parser

    text = "my_flag: 4\nmy-words: [a, b]\nmy-switch: true\n"
    assert parse_file(tmp_path, text, extra_args_provider=add_flags).extra == {
        "my_flag": 4, "my_words": ["a", "b"], "my_switch": True,
    }  # fmt: skip
    assert parse_file(tmp_path, text, "--my-flag 5", extra_args_provider=add_flags).extra["my_flag"] == 5
    assert "invalid int value: 'x'" in error_message(tmp_path, "my-flag: x", extra_args_provider=add_flags)


# The config.json of a run folder.

RUN_FLAGS = "--num-layers 3 --hidden-size 32 --train-iters 30 --prefetch-factor 2 --num-workers 1"


def make_run_config_json(folder: Path, line: str = RUN_FLAGS, **kwargs) -> str:
    """Return the config.json of a run in ``folder`` with these flags."""
    return json.dumps(parse(line.split(), world_size=1, env=kwargs.pop("env", {}), **kwargs).to_dict())


def parse_run_config(folder: Path, text: str, line: str = "", **kwargs) -> Config:
    return parse_file(folder, text, line, "config.json", **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_run_config_json_reproduces_config(tmp_path, family):
    line = "--num-layers 3 --hidden-size 32 --lr 1e-3 --adam-beta2 0.9 --vocab-size 50"
    original = parse(line.split(), world_size=1, env={"MEGATRON_DEFAULTS": "--gas 3"}, family=family)
    env = {"MEGATRON_DEFAULTS": "--gas 7 --seed 8 --ff-hidden-size 7 --lr-decay-iters 9"}
    config = parse_run_config(tmp_path, json.dumps(original.to_dict()), family=family, env=env)
    assert config_sections(config) == config_sections(original)
    assert config.explicit_fields == ("config",)


def test_run_config_json_replaces_deepspeed_file(tmp_path):
    ds_json = tmp_path / "ds.json"
    ds_json.write_text(json.dumps({"gradient_accumulation_steps": 3, "bf16": {"enabled": False}, "steps_per_print": 5}))
    text = make_run_config_json(tmp_path, f"{RUN_FLAGS} --deepspeed_config {ds_json}")
    ds_json.unlink()
    config = parse_run_config(tmp_path, text, "--gas 4")
    assert (config.batch.gas, config.precision.excluded) == (4, ("bf16",))
    assert config.deepspeed["steps_per_print"] == 5 and config.run.deepspeed_config is None
    assert "unknown key steps_per_prin" in error_message(tmp_path, text.replace("steps_per_print", "steps_per_prin"),
                                                    name="config.json")  # fmt: skip


def test_derived_sizes_follow_command_line(tmp_path):
    config = parse_run_config(tmp_path, make_run_config_json(tmp_path), "--train-iters 50 --hidden-size 64")
    assert (config.optimizer.lr_decay_iters, config.model.ff_hidden_size, config.model.kv_hidden_size) == (50, 256, 16)
    config = parse_run_config(
        tmp_path, make_run_config_json(tmp_path, f"{RUN_FLAGS} --lr-decay-iters 20"), "--train-iters 50"
    )
    assert config.optimizer.lr_decay_iters == 20


def test_repeated_run_resets_load_and_save(tmp_path):
    for checkpoint_flags in (f"--load {tmp_path} --save {tmp_path} --strict-load", "--resume --no-load-rng"):
        config = parse_run_config(tmp_path, make_run_config_json(tmp_path, f"{RUN_FLAGS} {checkpoint_flags}"))
        assert asdict(config.checkpoint) == asdict(Config().checkpoint)
    config = parse_run_config(
        tmp_path, make_run_config_json(tmp_path, f"{RUN_FLAGS} --load {tmp_path}/other-run --finetune --save elsewhere")
    )
    assert (config.checkpoint.load, config.checkpoint.finetune) == (f"{tmp_path}/other-run", True)
    assert config.checkpoint.save == "elsewhere"


@pytest.mark.parametrize("first_flags", ["", "--train-samples 80 --fp32", "--optimizer sgd --data-path mock"])
def test_inactive_settings_of_run_config_are_not_reported(tmp_path, first_flags):
    text = make_run_config_json(tmp_path, f"--strict-flags {first_flags}")
    assert not parse_run_config(tmp_path, text).ignored
    with pytest.raises(ConfigError, match="^--muon-momentum 0.5 is rejected by --strict-flags"):
        parse_run_config(tmp_path, text, "--muon-momentum 0.5")


@pytest.mark.parametrize("value", [False, True])
def test_removed_setting_is_dropped_and_reported_if_enabled(tmp_path, value):
    settings = json.loads(make_run_config_json(tmp_path))
    settings["parallel"]["overlap_forward_backward"] = value
    settings["deepspeed"] = {"pipeline": {"overlap_forward_backward": value}}
    config = parse_run_config(tmp_path, json.dumps(settings))
    assert asdict(config.parallel) == asdict(parse_run_config(tmp_path, make_run_config_json(tmp_path)).parallel)
    assert list(config.ignored) == (["--overlap-forward-backward"] if value else [])


LENGTH_FIELDS = ("train_samples", "train_tokens", "train_iters", "lr_decay_samples", "lr_decay_iters")


@pytest.mark.parametrize(
    ("first_flags", "line", "expected"),
    [
        ("--train-iters 40", "--train-samples 80", (80, None, 20, 80, 20)),
        ("--train-iters 40", "--train-iters 20", (None, None, 20, None, 20)),
        ("--train-iters 40 --lr-decay-iters 30", "--train-samples 80", (80, None, 20, 120, 30)),
        ("--train-iters 40 --lr-warmup-samples 8", "--train-iters 80", (None, None, 80, 320, 80)),
        ("--train-iters 40 --lr-warmup-samples 8", "--gas 2", (None, None, 40, 320, 40)),
        ("--train-iters 40 --lr-decay-samples 100", "--train-iters 80", (None, None, 80, 100, 25)),
        ("--train-tokens 3201", "--seq-length 64", (None, 3201, 13, 3201 / 64, 13)),
        ("--train-tokens 3201 --train-iters 50", "--train-iters 10", (None, None, 10, None, 10)),
        ("--train-tokens 3201 --train-iters 20", "--train-tokens 6400", (None, 6400, 50, 200, 50)),
        ("--train-tokens 3201 --train-tokens-lr-unit steps", "--gas 2", (None, 3201, 13, None, 13)),
        ("--train-samples 160 --lr-decay-samples 120", "--train-iters 80", (None, None, 80, 120, 30)),
    ],
)
def test_repeated_run_derives_lr_decay_from_length(tmp_path, first_flags, line, expected):
    text = make_run_config_json(tmp_path, f"--batch-size 4 --seq-length 32 {first_flags}")
    config = parse_run_config(tmp_path, text, line)
    fields = {**vars(config.batch), **vars(config.optimizer)}
    assert tuple(fields[name] for name in LENGTH_FIELDS) == expected
    repeated = parse_run_config(tmp_path, text)
    first_config = parse(f"--batch-size 4 --seq-length 32 {first_flags}".split(), world_size=1, env={})
    assert (repeated.batch, repeated.optimizer) == (first_config.batch, first_config.optimizer)


def test_run_config_of_other_family_error_names_program(tmp_path):
    message = error_message(tmp_path, make_run_config_json(tmp_path), name="config.json", family="t5")
    assert message == "config.json:1: the file must be from a run of T5, got family gpt2: use pretrain_gpt2.py"


def test_parsing_imports_no_torch_and_yaml_on_demand(tmp_path):
    (tmp_path / "a.yaml").write_text("num-layers: 2\n")
    (tmp_path / "a.toml").write_text("num-layers = 2\n")
    code = "import sys; from megatron.arguments import parse; parse(['--config', sys.argv[1]], world_size=1, env={});"
    for name, is_yaml_loaded in (("a.yaml", True), ("a.toml", False)):
        check = f"{code} assert ('yaml' in sys.modules) is {is_yaml_loaded} and 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", check, str(tmp_path / name)], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("name", ["swiglu", "no_weight_tying", "group_query_attention", "no_position_embedding"])
def test_false_foreign_switch_sets_nothing(tmp_path: Path, name: str) -> None:
    assert parse_file(tmp_path, f"{name}: false\n").model == parse_file(tmp_path, "seed: 1\n").model
    assert parse_file(tmp_path, f"{name}: true\n").model != parse_file(tmp_path, "seed: 1\n").model


@pytest.mark.parametrize(
    ("switch_line", "field_line", "value"),
    [
        ("group_query_attention: true", "num_query_groups: 2", 2),
        ("no_position_embedding: true", "use_rotary_position_embeddings: true", "rope"),
        ("no_position_embedding: true", "position_embedding_type: rope", "rope"),
    ],
)
def test_field_key_overrides_fallback_switch(tmp_path: Path, switch_line: str, field_line: str, value: object) -> None:
    for text in (f"{switch_line}\n{field_line}\n", f"{field_line}\n{switch_line}\n"):
        model = parse_file(tmp_path, text).model
        assert value in (model.num_query_groups, model.position_embedding_type)


def test_conflicting_keys_raise(tmp_path: Path) -> None:
    assert parse_file(tmp_path, "activation: gated-silu\nswiglu: true\n").model.activation == "gated-silu"
    message = error_message(tmp_path, "activation: relu\nswiglu: true\n")
    assert message == (
        "run.yaml:2: swiglu must agree with run.yaml:1: activation, got activation gated-silu and relu. Remove one of "
        "them"
    )
