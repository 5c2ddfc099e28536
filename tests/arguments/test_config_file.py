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
from megatron.arguments.flag_values import options_in
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
    "seed": 7,
    "save": None,
}
WORDS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --lr 3e-4 --min-lr 0 --bf16 --seed 7 --pipeline-trace",
    "--data-path 0.7 data/a 0.3".split() + ["data/b c"] + ["--sample-prompts", "Once upon", "a time"],
)
PIPES = "--pipe-parallel-size 2 --dry-run"


def read(folder: Path, text: str, line: str = "", name: str = "run.yaml", **others) -> Config:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    others.setdefault("env", {})
    return parse([*line.split(), "--config", str(path)], world_size=others.pop("world_size", 1), **others)


def error_of(folder: Path, text: str, *args, **others) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, text, *args, **others)
    return str(caught.value).replace(f"{folder}/", "")


def sections(config: Config) -> dict:
    found = config.to_dict()
    del found["run"]["config"]
    return found


@pytest.mark.parametrize(("name", "text"), [("a.yaml", YAML), ("a.yml", YAML), ("a.toml", TOML), ("a.json", "")])
def test_a_file_says_what_the_same_flags_say(tmp_path, name, text):
    words = [*WORDS[0].split(), *WORDS[1], *PIPES.split()]
    wanted = parse(words, world_size=2, env={})
    found = read(tmp_path, text or json.dumps(JSON), PIPES, name, world_size=2)
    assert sections(found) == sections(wanted)
    assert {*found.given} == {*wanted.given, "config", "hidden_bias"}


def test_every_field_has_a_key_and_no_key_means_two(tmp_path):
    for family in FAMILIES:
        names = {option.name: option for option in options_in(family)}
        for option in options_in(family):
            for flag in option.flags:
                other = names.get(flag.lstrip("-").replace("-", "_"), option)
                assert other.name == option.name, f"{flag} of {option.name} is the name of another field"


def test_the_order_is_command_line_file_json_recipe(tmp_path):
    ds = tmp_path / "ds.json"
    ds.write_text(json.dumps({"gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": 5}))
    env = {"MEGATRON_DEFAULTS": "--gas 4 --num-layers 9 --seq-length 77 --hidden-size 32"}
    text = f"deepspeed_config: {ds}\ngas: 2\nhidden-size: 128\nnum-layers: 3\n"
    config = read(tmp_path, text, "--num-layers 6", env=env)
    assert (config.model.num_layers, config.model.hidden_size, config.batch.seq_length) == (6, 128, 77)
    assert (config.batch.gas, config.batch.batch_size) == (2, 5)
    found = [note for note in config.notes if "gradient_accumulation_steps 3 of the JSON" in note]
    assert len(found) == 1 and "run.yaml:2: gas 2 overrides" in found[0]
    assert "MEGATRON_DEFAULTS" not in error_of(tmp_path, "lr: 0")
    with pytest.raises(ConfigError, match="--config is accepted on the command line only"):
        parse([], world_size=1, env={"MEGATRON_DEFAULTS": "--config a.yaml"})


def test_a_false_wins_over_a_recipe_and_a_false_of_several_names_says_nothing(tmp_path):
    env = {"MEGATRON_DEFAULTS": "--hidden-bias --bf16"}
    config = read(tmp_path, "hidden-bias: false\nfp16: false\n", env=env)
    assert (config.model.hidden_bias, config.precision.dtype) == (False, "bf16")


@pytest.mark.parametrize(
    ("text", "line", "wanted"),
    [
        ("data-path: a\nsplit: 1,1,1", "--train-data-path b --eval-iters 0", {"data_path": None, "split": "949,50,1"}),
        ("vocab-file: FILE\nmerge-file: FILE", "--tokenizer-path FILE", {"vocab_file": None, "merge_file": None}),
        ("tokenizer-path: FILE", "--vocab-file FILE --merge-file FILE", {"tokenizer_path": None}),
        ("load: a\nfinetune: true", "--resume", {"load": None}),
    ],
)
def test_what_undoes_a_flag_of_the_command_line_gives_way(tmp_path, text, line, wanted):
    (tmp_path / "file.json").write_text("{}")
    text, line = (each.replace("FILE", str(tmp_path / "file.json")) for each in (text, line))
    flat = vars(read(tmp_path, text, f"{line} --dry-run").namespace())
    assert {name: flat[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("text", "line", "wanted"),
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
def test_a_flag_of_the_command_line_replaces_keys_that_set_the_same_under_another_name(tmp_path, text, line, wanted):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    config = parse([*line.split(), "--config", str(path)], world_size=1, env={})
    values = vars(config.namespace())
    assert {name: values[name] for name in wanted} == wanted
    assert not [note for note in config.notes if "given more than once" in note] and not config.shadowed
    if line in ("--group-query-attention", "--use-distributed-optimizer"):
        return  # the flag of the command line means a value there, which a recipe's default does not change
    recipe = text.replace("\n", " --").replace(": true", "").replace(":", "")
    config = parse(line.split(), world_size=1, env={"MEGATRON_DEFAULTS": f"--{recipe}"})
    values = vars(config.namespace())
    assert {name: values[name] for name in wanted} == wanted, "flags of a run script's recipe give way, too"


def test_values_have_the_synonyms_of_the_command_line(tmp_path):
    assert read(tmp_path, "lr-decay-style: WSD").optimizer.lr_decay_style == "wsd"


def test_a_key_that_a_flag_of_the_command_line_does_not_set_stays(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train-samples: 80\nswiglu: true\nlr-warmup-tokens: 2048\nhidden-size: 300\nff-hidden-size: 512")
    config = parse(["--lr-decay-samples", "40", "--config", str(path)], world_size=1, env={})
    assert (config.batch.train_iters, config.optimizer.lr_decay_samples) == (20, 40)
    assert (config.optimizer.lr_warmup_samples, config.model.activation) == (8, "gated-silu")


def test_of_three_sizes_of_a_batch_the_one_that_follows_gives_way(tmp_path):
    text = "global-batch-size: 64\nbatch-size: 8\ngas: 8\n"
    for line, sizes in (
        ("--batch-size 4", (4, 16)),
        ("--gas 4", (16, 4)),
        ("--global-batch-size 32", (8, 4)),
        ("--batch-size 2 --gas 3", (2, 3)),
    ):
        batch = read(tmp_path, text, line).batch
        assert (batch.batch_size, batch.gas) == sizes, line
    assert "run.yaml:2: batch-size 7" in error_of(tmp_path, text.replace("size: 8", "size: 7"))


DUPLICATES = {
    "run.yaml": ("num-layers: 2\nmodel:\n  hidden-size: 3\n  hidden-size: 4\n", 4, "'hidden-size'"),
    "top.yaml": ("num-layers: 2\nlr: 1\nnum-layers: 3\n", 3, "'num-layers'"),
    "run.toml": ("num-layers = 2\n[model]\nhidden-size = 3\nhidden-size = 4\n", 4, "'hidden-size = 4'"),
    "run.json": ('{"num-layers": 2,\n "model": {"hidden-size": 3,\n "hidden-size": 4}}', 3, "'hidden-size'"),
}


@pytest.mark.parametrize("name", DUPLICATES)
def test_a_duplicated_key_is_an_error_that_names_file_line_and_key(tmp_path, name):
    text, line, key = DUPLICATES[name]
    said = error_of(tmp_path, text, name=name)
    assert said.startswith(f"{name}:{line}:") and f"a key may occur only once, got {key} again" in said, said


def test_two_keys_of_one_flag_are_an_error_that_names_both(tmp_path):
    said = error_of(tmp_path, "model: {num-layers: 2}\nnum_layers: 3\n")
    assert said.startswith("run.yaml:2: num_layers sets the same field as run.yaml:1: num-layers")
    assert "a flag may occur only once" in error_of(tmp_path, "bf16: true\nfp32: true\n")


@pytest.mark.parametrize(
    ("text", "said"),
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
        ("mtp-num-layers: 2", "run.yaml:1: --mtp-num-layers is not supported"),
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
def test_bad_keys_and_values_are_named_with_file_line_and_key(tmp_path, text, said):
    assert error_of(tmp_path, text).startswith(said)


def test_the_example_and_the_pages_that_show_it_are_one_file():
    text = (ROOT / "examples" / "run.yaml").read_text(encoding="utf-8")
    config = parse(["--config", str(ROOT / "examples" / "run.yaml")], world_size=1, env={})
    assert (config.model.num_layers, config.model.hidden_size, config.optimizer.lr) == (6, 192, 2e-3)
    for page in ("docs/run_scripts.md", "docs/zh/run_scripts.md"):
        assert f"```yaml\n{text}```" in (ROOT / page).read_text(encoding="utf-8")


def test_bad_toml_and_another_suffix_are_refused(tmp_path):
    assert error_of(tmp_path, "a =\nb = 2", name="run.toml").startswith("run.toml:1: must be TOML")
    assert error_of(tmp_path, "[model]\nnum-layers = 'a'", name="run.toml").startswith("run.toml:2: num-layers must be")
    assert "--config must name a file that ends in .yaml, .yml, .toml, .json" in error_of(tmp_path, "", name="run.txt")
    with pytest.raises(ConfigError, match="--config must name a file that can be read, got nowhere.yaml"):
        parse(["--config", "nowhere.yaml"], world_size=1, env={})


def test_all_mistakes_of_a_file_and_of_the_command_line_are_told_at_once(tmp_path):
    said = error_of(tmp_path, "num-layers: a\nlr: b\n", "--hidden-sice 4")
    assert said.startswith("3 problems") and "--hidden-sice" in said and "lr must be" in said


def test_flags_of_the_script_itself_are_keys_too(tmp_path):
    def extra(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--my-flag", type=int, default=1)
        parser.add_argument("--my-words", nargs="*")
        parser.add_argument("--my-switch", action="store_true")
        return parser

    text = "my_flag: 4\nmy-words: [a, b]\nmy-switch: true\n"
    assert read(tmp_path, text, extra_args_provider=extra).extra == {
        "my_flag": 4, "my_words": ["a", "b"], "my_switch": True,
    }  # fmt: skip
    assert read(tmp_path, text, "--my-flag 5", extra_args_provider=extra).extra["my_flag"] == 5
    assert "invalid int value: 'x'" in error_of(tmp_path, "my-flag: x", extra_args_provider=extra)


# The config.json of a run folder.

STATED = "--num-layers 3 --hidden-size 32 --train-iters 30 --prefetch-factor 2 --num-workers 1"


def written(folder: Path, line: str = STATED, **others) -> str:
    """Return the config.json of a run in ``folder`` with these flags."""
    return json.dumps(parse(line.split(), world_size=1, env=others.pop("env", {}), **others).to_dict())


def again(folder: Path, text: str, line: str = "", **others) -> Config:
    return read(folder, text, line, "config.json", **others)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_json_is_accepted_as_it_is_and_says_the_same(tmp_path, family):
    line = "--num-layers 3 --hidden-size 32 --lr 1e-3 --adam-beta2 0.9 --vocab-size 50"
    first = parse(line.split(), world_size=1, env={"MEGATRON_DEFAULTS": "--gas 3"}, family=family)
    env = {"MEGATRON_DEFAULTS": "--gas 7 --seed 8 --ff-hidden-size 7 --lr-decay-iters 9"}
    config = again(tmp_path, json.dumps(first.to_dict()), family=family, env=env)
    assert sections(config) == sections(first)
    assert config.given == ("config",)


def test_the_json_of_a_run_is_repeated_without_its_file(tmp_path):
    ds = tmp_path / "ds.json"
    ds.write_text(json.dumps({"gradient_accumulation_steps": 3, "bf16": {"enabled": False}, "steps_per_print": 5}))
    text = written(tmp_path, f"{STATED} --deepspeed_config {ds}")
    ds.unlink()
    config = again(tmp_path, text, "--gas 4")
    assert (config.batch.gas, config.precision.excluded) == (4, ("bf16",))
    assert config.deepspeed["steps_per_print"] == 5 and config.run.deepspeed_config is None
    assert "unknown key steps_per_prin" in error_of(tmp_path, text.replace("steps_per_print", "steps_per_prin"),
                                                    name="config.json")  # fmt: skip


def test_what_follows_from_other_sizes_follows_those_of_the_command_line(tmp_path):
    config = again(tmp_path, written(tmp_path), "--train-iters 50 --hidden-size 64")
    assert (config.optimizer.lr_decay_iters, config.model.ff_hidden_size, config.model.kv_hidden_size) == (50, 256, 16)
    config = again(tmp_path, written(tmp_path, f"{STATED} --lr-decay-iters 20"), "--train-iters 50")
    assert config.optimizer.lr_decay_iters == 20


def test_a_repeated_run_begins_as_the_first_start_did_and_saves_elsewhere(tmp_path):
    for begun in (f"--load {tmp_path} --save {tmp_path} --strict-load", "--resume --no-load-rng"):
        config = again(tmp_path, written(tmp_path, f"{STATED} {begun}"))
        assert asdict(config.checkpoint) == asdict(Config().checkpoint)
    config = again(tmp_path, written(tmp_path, f"{STATED} --load {tmp_path}/other-run --finetune --save elsewhere"))
    assert (config.checkpoint.load, config.checkpoint.finetune) == (f"{tmp_path}/other-run", True)
    assert config.checkpoint.save == "elsewhere"


@pytest.mark.parametrize("first", ["", "--train-samples 80 --fp32", "--optimizer sgd --data-path mock"])
def test_settings_of_a_run_that_have_no_effect_are_no_flags_without_effect(tmp_path, first):
    text = written(tmp_path, f"--strict-flags {first}")
    assert not again(tmp_path, text).ignored
    with pytest.raises(ConfigError, match="^--muon-momentum 0.5 is rejected by --strict-flags"):
        again(tmp_path, text, "--muon-momentum 0.5")


@pytest.mark.parametrize("value", [False, True])
def test_a_removed_setting_of_a_run_is_dropped_and_reported_if_it_was_on(tmp_path, value):
    settings = json.loads(written(tmp_path))
    settings["parallel"]["overlap_forward_backward"] = value
    settings["deepspeed"] = {"pipeline": {"overlap_forward_backward": value}}
    config = again(tmp_path, json.dumps(settings))
    assert asdict(config.parallel) == asdict(again(tmp_path, written(tmp_path)).parallel)
    assert list(config.ignored) == (["--overlap-forward-backward"] if value else [])


LENGTHS = ("train_samples", "train_tokens", "train_iters", "lr_decay_samples", "lr_decay_iters")


@pytest.mark.parametrize(
    ("first", "line", "wanted"),
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
def test_the_decay_of_a_repeated_run_follows_its_length_where_the_first_one_did(tmp_path, first, line, wanted):
    text = written(tmp_path, f"--batch-size 4 --seq-length 32 {first}")
    config = again(tmp_path, text, line)
    found = {**vars(config.batch), **vars(config.optimizer)}
    assert tuple(found[name] for name in LENGTHS) == wanted
    unchanged, first_config = again(tmp_path, text), parse(f"--batch-size 4 --seq-length 32 {first}".split(),
                                                           world_size=1, env={})  # fmt: skip
    assert (unchanged.batch, unchanged.optimizer) == (first_config.batch, first_config.optimizer)


def test_a_config_json_of_another_family_names_its_program(tmp_path):
    said = error_of(tmp_path, written(tmp_path), name="config.json", family="t5")
    assert said == "config.json:1: the file must be from a run of T5, got family gpt2: use pretrain_gpt2.py"


def test_no_torch_and_yaml_only_where_one_is_given(tmp_path):
    (tmp_path / "a.yaml").write_text("num-layers: 2\n")
    (tmp_path / "a.toml").write_text("num-layers = 2\n")
    code = "import sys; from megatron.arguments import parse; parse(['--config', sys.argv[1]], world_size=1, env={});"
    for name, loaded in (("a.yaml", True), ("a.toml", False)):
        check = f"{code} assert ('yaml' in sys.modules) is {loaded} and 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", check, str(tmp_path / name)], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("name", ["swiglu", "no_weight_tying", "group_query_attention", "no_position_embedding"])
def test_a_switch_of_another_trainer_that_is_false_sets_nothing(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, f"{name}: false\n").model == read(tmp_path, "seed: 1\n").model
    assert read(tmp_path, f"{name}: true\n").model != read(tmp_path, "seed: 1\n").model


@pytest.mark.parametrize(
    ("switch", "own", "value"),
    [
        ("group_query_attention: true", "num_query_groups: 2", 2),
        ("no_position_embedding: true", "use_rotary_position_embeddings: true", "rope"),
        ("no_position_embedding: true", "position_embedding_type: rope", "rope"),
    ],
)
def test_a_fields_own_key_decides_before_and_after_a_switch_that_yields(
    tmp_path: Path, switch: str, own: str, value: object
) -> None:
    for text in (f"{switch}\n{own}\n", f"{own}\n{switch}\n"):
        model = read(tmp_path, text).model
        assert value in (model.num_query_groups, model.position_embedding_type)


def test_two_keys_that_set_a_field_must_agree(tmp_path: Path) -> None:
    assert read(tmp_path, "activation: gated-silu\nswiglu: true\n").model.activation == "gated-silu"
    message = error_of(tmp_path, "activation: relu\nswiglu: true\n")
    assert message == (
        "run.yaml:2: swiglu must agree with run.yaml:1: activation, got activation gated-silu and relu. Remove one of "
        "them"
    )
