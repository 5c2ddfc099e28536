"""The flags of an encoder-decoder: derived numbers, cross checks, and what each model refuses of the other's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import config_from_values, flags_doc
from megatron.arguments.validate import find_problems
from megatron.config import Config, ModelConfig, T5Config, decoder, parse
from megatron.config.data import CPM_SUFFIXES
from megatron.errors import ConfigError
from megatron.models.registry import FAMILIES

DEFAULTS = {"activation": "relu", "layernorm_epsilon": 1e-6}


def parse_line(line: str = "", world_size: int = 1, **kwargs: Any) -> Config:
    env = kwargs.pop("env", {})
    return parse(line.split(), world_size=world_size, env=env, family="t5", defaults=DEFAULTS, **kwargs)


def error_message(line: str, world_size: int = 1, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as exc_info:
        parse_line(line, world_size, **kwargs)
    return str(exc_info.value)


def test_missing_sizes_are_derived():
    config = parse_line("--num-layers 3 --dec-layers 5 --enc-seq-length 512")
    t5 = config.family_config
    assert (t5.enc_layers, t5.dec_layers, config.total_layers) == (3, 5, 8)
    assert (t5.raw_length, t5.dec_seq_length, t5.max_num_spans) == (568, 114, 28)
    assert (config.tokens_per_sample, config.loss_tokens_per_sample) == (626, 114)
    assert config.model.max_position_embeddings == 0
    assert (config.model.activation, config.model.layernorm_epsilon) == ("relu", 1e-6)
    gpt2 = parse(["--seq-length", "64", "--num-layers", "3"], world_size=1, env={})
    assert (gpt2.tokens_per_sample, gpt2.loss_tokens_per_sample, gpt2.total_layers) == (64, 64, 3)


def test_dec_seq_length_and_learned_positions_use_longer_side():
    learned = "--position-embedding-type learned --enc-seq-length 64"
    assert parse_line("--enc-seq-length 512 --dec-seq-length 130").family_config.dec_seq_length == 130
    assert parse_line(learned).model.max_position_embeddings == 64
    assert parse_line(f"{learned} --dec-seq-length 100").model.max_position_embeddings == 100
    assert parse_line(f"{learned} --max-position-embeddings 200").model.max_position_embeddings == 200


def test_segments_are_needed_for_separate_documents_or_denoisers():
    assert not parse_line().family_config.has_segments(False)
    assert parse_line().family_config.has_segments(True)
    assert parse_line("--denoisers R,X,S").family_config.has_segments(False)
    assert (
        parse_line("--denoisers R:2,S:1").family_config.max_num_spans
        == parse_line("--denoisers R,S").family_config.max_num_spans
    )


def test_t5_config_is_built_without_command_line():
    model = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=2)
    config = Config(family="t5", model=model, family_config=T5Config(enc_seq_length=40))
    assert find_problems(config, 1) == []
    assert config.family_config.dec_seq_length == config.family_config.max_target_length
    with pytest.raises(ValueError, match=f"family must be {' or '.join(FAMILIES)}, got 'opt'"):
        config_from_values({}, family="opt")
    with pytest.raises(ValueError, match="got 'opt'"):
        parse([], world_size=1, env={}, family="opt")


def test_namespace_has_megatron_names():
    args = parse_line("--enc-seq-length 64 --dec-seq-length 40 --dec-layers 2").namespace()
    assert (args.seq_length, args.encoder_seq_length, args.decoder_seq_length) == (64, 64, 40)
    assert (args.encoder_num_layers, args.decoder_num_layers) == (4, 2)
    assert (args.vocab_extra_ids, args.pipeline_model_parallel_split_rank) == (100, 0)
    assert not hasattr(parse([], world_size=1, env={}).namespace(), "enc_seq_length")


def test_identity_depends_on_family():
    gpt2 = parse(["--vocab-size", "9"], world_size=1, env={})
    assert list(gpt2.identity()) == [
        *("num_layers", "hidden_size", "num_attention_heads", "kv_hidden_size", "ff_hidden_size", "hidden_bias"),
        *("max_position_embeddings", "vocab_size", "untie_embeddings", "activation", *decoder.IDENTITY),
    ]
    t5 = parse_line("--enc-layers 2 --vocab-size 9").identity()
    assert (t5["family"], t5["enc_layers"], t5["dec_layers"], "num_layers" in t5) == ("t5", 2, 4, False)
    assert t5 != parse_line("--enc-layers 2 --vocab-size 9 --relative-attention-max-distance 64").identity()
    assert t5 == parse_line("--num-layers 2 --dec-layers 4 --vocab-size 9 --enc-seq-length 80").identity()


def test_config_json_has_t5_section_for_t5_only():
    assert (
        json.loads(json.dumps(parse_line().to_dict()))["t5"]["dec_seq_length"]
        == parse_line().family_config.dec_seq_length
    )
    gpt2 = parse([], world_size=1, env={}).to_dict()
    assert gpt2["family"] == "gpt2" and "t5" not in gpt2


def test_max_position_embeddings_is_ignored_with_relative_positions():
    config = parse_line("--enc-seq-length 64 --max-position-embeddings 512")
    assert list(config.ignored) == ["--max-position-embeddings"] and config.model.has_relative_positions
    assert config.model.max_position_embeddings == 0


def test_megatron_t5_script_uses_learned_positions_and_defaults():
    lengths = "--encoder-seq-length 64 --decoder-seq-length 32 --max-position-embeddings 80"
    config = parse_line(lengths)
    assert (config.model.position_embedding_type, config.model.max_position_embeddings) == ("learned_absolute", 80)
    assert (config.model.activation, config.model.hidden_bias) == ("gelu-tanh", True)
    assert (config.optimizer.lr_decay_style, config.optimizer.warmup) == ("linear", 0.0)
    assert any("parsed as a script for Megatron's T5" in note for note in config.notes) and not config.ignored
    assert parse_line(f"{lengths} --position-embedding-type relative").model.has_relative_positions
    assert parse_line(lengths.partition(" --max")[0]).model.has_relative_positions, "as before"


@pytest.mark.parametrize(
    ("line", "fragments"),
    [
        ("--enc-seq-length 2", ["--enc-seq-length must be at least 3", "got 2"]),
        (
            "--enc-seq-length 512 --dec-seq-length 100",
            ["--dec-seq-length must be at least 114", "568 tokens of text", "got 100", "raise it to 114"],
        ),
        ("--enc-seq-length 64 --dec-seq-length 12 --denoisers R,X", ["--denoisers R,X", "--dec-seq-length must be"]),
        ("--denoisers R,Q", ["--denoisers must be", "'Q'"]),
        ("--denoisers R,R", ["--denoisers must be", "R twice"]),
        ("--noise-density 1", ["--noise-density must be a finite number of more than 0 and less than 1, got 1"]),
        ("--mean-span-length 0.5", ["--mean-span-length must be a finite number of at least 1, got 0.5"]),
        ("--noise-density 0.6 --mean-span-length 1", ["spans need at least one text token between them"]),
        ("--noise-density 0.5 --denoisers X,S", ["has no effect without the denoiser R", "--denoisers X,S"]),
        (
            "--position-embedding-type learned --enc-seq-length 64 --max-position-embeddings 32",
            ["--enc-seq-length must not exceed --max-position-embeddings, got 64 and 32"],
        ),
        (
            "--position-embedding-type learned --enc-seq-length 64 --dec-seq-length 80 --max-position-embeddings 64",
            ["--dec-seq-length must not exceed --max-position-embeddings, got 80 and 64"],
        ),
        (
            "--position-embedding-type learned --relative-attention-num-buckets 8",
            ["--relative-attention-num-buckets has no effect without --position-embedding-type relative"],
        ),
        ("--relative-attention-num-buckets 7", ["must be even, got 7", "Use 6 or 8"]),
        ("--relative-attention-max-distance 16", ["must exceed half of", "16 and 32", "Use 17 or more"]),
        ("--num-layers 0", ["each side of a T5 must have a layer, got 0 in the encoder and 0"]),
        ("--num-layers 3 --enc-layers 2 --dec-layers 2", ["--num-layers has no effect with both", "--enc-layers 2"]),
        ("--pipeline-split-rank 1", ["--pipeline-split-rank has no effect without a pipeline"]),
        ("--model-parallel-size 3 --hidden-size 48", ["--num-attention-heads must be a multiple"]),
    ],
)
def test_invalid_value_error_has_fix(line, fragments):
    message = error_message(line, 3 if "parallel-size 3" in line else 1)
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    ("line", "world_size", "fragments"),
    [
        ("--pipe-parallel-size 9", 9, ["got 4 encoder and 4 decoder layers", "0 to 8", "or 9 layers or more in all"]),
        ("--pipe-parallel-size 4 --pipeline-chunks 3", 4, ["4 x --pipeline-chunks 3 = 12", "1 to 2, or 12 layers"]),
        ("--pipe-parallel-size 2 --pipeline-split-rank 2", 2, ["must be 1 with --pipe-parallel-size 2, got 2"]),
        ("--pipe-parallel-size 3 --pipeline-split-rank 3", 3, ["must be 1 to 2 with", "got 3", "Use 0"]),
        (
            "--pipe-parallel-size 4 --pipeline-split-rank 1 --dec-layers 2",
            4,
            ["assigns 3 of 4 stages to the decoder", "got --dec-layers 2"],
        ),
        (
            "--pipe-parallel-size 4 --pipeline-split-rank 3 --enc-layers 2",
            4,
            ["assigns 3 of 4 stages to the encoder", "got --enc-layers 2"],
        ),
        ("--pipe-parallel-size 2 --pipeline-split-rank 1 --pipeline-chunks 2", 2, ["requires one chunk per stage"]),
        (
            "--pipe-parallel-size 2 --pipeline-split-rank 1 --partition-method uniform",
            2,
            ["has no effect without --partition-method balanced", "uniform"],
        ),
        ("--optimizer adafactor --model-parallel-size 2", 2, ["columns of full matrices", "--model-parallel-size 2"]),
        (
            "--pipe-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            2,
            ["the layers of both sides must be a multiple", "got 8 and 2 x 3 = 6"],
        ),
    ],
)
def test_invalid_layout_error_names_valid_values(line, world_size, fragments):
    message = error_message(line, world_size)
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize("num_stages", [5, 8])
def test_more_stages_than_layers_per_side_are_accepted(num_stages):
    assert parse_line(f"--pipe-parallel-size {num_stages}", num_stages).parallel.num_stages == num_stages


def test_layers_per_chunk_count_both_sides():
    line = "--pipe-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --enc-layers 2 --dec-layers 6"
    assert parse_line(line, 2).parallel.chunks == 2


def test_default_split_rank_without_pipeline_is_noted():
    config = parse_line(env={"MEGATRON_DEFAULTS": "--pipeline-split-rank 1"})
    assert "--pipeline-split-rank in the defaults has no effect without a pipeline" in config.notes


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--seq-length 9", "T5 has two lengths; use --enc-seq-length and --dec-seq-length"),
        ("--reset-position-ids", "with --reset-attention-mask only; use that flag"),
        ("--eod-mask-loss", "remove it"),
        ("--apply-residual-connection-post-layernorm", "T5's residual connections"),
        ("--mask-prob 0.2", "use --noise-density"),
        ("--normalization RMSNorm", "RMSNorm with relative"),
    ],
)
def test_gpt2_flags_raise_in_t5(flag, expected):
    message = error_message(flag)
    assert message.startswith(f"{flag.split()[0]} is not supported: ") and expected in message


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--enc-seq-length 9", "use pretrain_t5.py, or --seq-length"),
        ("--decoder-seq-length 9", "use pretrain_t5.py, or --seq-length"),
        ("--enc-layers 2", "use pretrain_t5.py, or --num-layers"),
        ("--noise-density 0.1", "use pretrain_t5.py, or remove it"),
        ("--relative-attention-num-buckets 8", "use pretrain_t5.py, or remove it"),
    ],
)
def test_t5_flags_raise_in_gpt2(flag, message):
    with pytest.raises(ConfigError) as exc_info:
        parse(flag.split(), world_size=1, env={})
    assert str(exc_info.value).startswith(f"{flag.split()[0]} is not supported: ") and message in str(exc_info.value)


def test_position_types_of_other_family_raise():
    assert "must be relative (T5) or learned (CPM's T5), got rope" in error_message("--use-rotary-position-embeddings")
    assert "must be relative (T5) or learned (CPM's T5), got alibi" in error_message("--position-embedding-type alibi")
    with pytest.raises(
        ConfigError, match="must be one of learned_absolute, rope, alibi, none in a decoder, got relative"
    ):
        parse(["--position-embedding-type", "relative"], world_size=1, env={})


def test_defaults_of_other_family_raise():
    with pytest.raises(ConfigError, match=r"seq_length in the defaults of pretrain\(\) is not supported: T5 has two"):
        parse([], world_size=1, env={}, family="t5", defaults={"seq_length": 4})
    assert "MEGATRON_DEFAULTS: --seq-length is not supported" in error_message(
        "", env={"MEGATRON_DEFAULTS": "--seq-length 4"}
    )


def test_flags_override_script_defaults_and_help_shows_them(capsys):
    config = parse_line("--activation gated-gelu --layernorm-epsilon 1e-5")
    assert (config.model.activation, config.model.layernorm_epsilon) == ("gated-gelu", 1e-5)
    with pytest.raises(SystemExit):
        parse_line("--help-all")
    text = " ".join(capsys.readouterr().out.split())
    assert "bash run_t5.sh [flags]" in text and "--denoisers" in text and "(default: relu)" in text
    assert "--seq-length INT" not in text.replace("enc-seq-length", "").replace("dec-seq-length", "")


def test_gpt2_help_omits_t5_flags(capsys):
    with pytest.raises(SystemExit):
        parse(["--help-all"], world_size=1, env={})
    text = capsys.readouterr().out
    assert "--seq-length" in text and "--denoisers" not in text and "\nt5:" not in text


def make_three_file_set(prefix: Path, *set_suffixes: str) -> Path:
    for set_suffix in set_suffixes or CPM_SUFFIXES:
        for suffix in (".idx", ".bin"):
            Path(f"{prefix}{set_suffix}{suffix}").touch()
    return prefix


def test_three_file_set_allows_any_target_length(tmp_path: Path):
    line = f"--data-path {make_three_file_set(tmp_path / 'corpus')} --enc-seq-length 128"
    assert parse_line(f"{line} --dec-seq-length 20").family_config.dec_seq_length == 20
    assert parse_line(line).family_config.dec_seq_length == 128
    assert parse_line(f"{line} --position-embedding-type learned").model.max_position_embeddings == 128
    assert parse_line(line.replace("length 128", "length 2")).family_config.dec_seq_length == 2, (
        "too short for a span of ours"
    )
    assert "--enc-seq-length must be at least 2 (one token and the end token), got 1" in error_message(
        line.replace("length 128", "length 1")
    )
    assert "--dec-seq-length must be at least 29" in error_message("--enc-seq-length 128 --dec-seq-length 20")


@pytest.mark.parametrize("flag", ["--noise-density 0.2", "--mean-span-length 4", "--denoisers R", "--denoisers R,X"])
def test_three_file_set_rejects_span_flags(flag, tmp_path: Path):
    prefix = make_three_file_set(tmp_path / "corpus")
    flag_name = flag.split()[0]
    message = f"{flag_name} has no effect on spans that are fixed in the data, got --data-path {prefix}, a three-file"
    assert error_message(f"--data-path {prefix} {flag}").startswith(message)


@pytest.mark.parametrize(("denoisers", "message"), [("R,X", "must be one denoiser for --data-path"), ("Q", "must be")])
def test_three_file_set_rejects_unsupported_default_denoisers(denoisers, message, tmp_path: Path):
    env = {"MEGATRON_DEFAULTS": f"--denoisers {denoisers}"}
    assert f"--denoisers {message}" in error_message(f"--data-path {make_three_file_set(tmp_path / 'corpus')}", env=env)


def make_corpus(prefix: Path) -> Path:
    return make_three_file_set(prefix, "")


def test_three_file_set_in_mixture_allows_span_flags(tmp_path: Path):
    corpus, fixed = make_corpus(tmp_path / "corpus"), make_three_file_set(tmp_path / "fixed")
    line = f"--data-path 0.7 {corpus} 0.3 {fixed} --enc-seq-length 128"
    config = parse_line(f"{line} --noise-density 0.2 --mean-span-length 4 --denoisers R")
    assert config.data.has_dynamic_spans and list(config.data.flag_of_cpm_set) == [str(tmp_path / "fixed")]
    assert config.family_config.dec_seq_length == 128, "long enough for the set as well"
    long_spans = parse_line(f"{line} --noise-density 0.6 --mean-span-length 8").family_config
    assert long_spans.dec_seq_length == long_spans.max_target_length > 128
    assert "--dec-seq-length must be at least 29" in error_message(f"{line} --dec-seq-length 20")
    message = (
        f"--denoisers must be one denoiser for --data-path {tmp_path / 'fixed'}, a three-file set with fixed spans"
    )
    assert error_message(f"{line} --denoisers R,X").startswith(f"{message}, got R,X. Remove it")
    assert "R,X in the defaults. Remove it" in error_message(line, env={"MEGATRON_DEFAULTS": "--denoisers R,X"})


def test_three_file_set_error_names_data_flag(tmp_path: Path):
    prefixes = [make_three_file_set(tmp_path / name) for name in ("a", "b", "c")]
    line = f"--train-data-path {prefixes[0]} --valid-data-path {prefixes[1]} --test-data-path {prefixes[2]}"
    assert f"got --train-data-path {prefixes[0]}, a three-file set" in error_message(f"{line} --noise-density 0.2")
    mixed_line = line.replace(str(prefixes[0]), str(make_corpus(tmp_path / "d")))
    assert parse_line(f"{mixed_line} --noise-density 0.2").data.has_dynamic_spans
    assert f"one denoiser for --valid-data-path {prefixes[1]}, a three-file set" in error_message(
        f"{mixed_line} --denoisers R,S"
    )


def test_missing_pair_files_are_named_if_one_exists(tmp_path: Path):
    prefix = tmp_path / "corpus"
    assert f"cannot read {prefix}.idx and {prefix}.bin" in error_message(f"--data-path {prefix}")
    make_three_file_set(prefix, "_context", "_target")
    assert f"cannot read {prefix}_target_offset.idx and {prefix}_target_offset.bin" in error_message(
        f"--data-path {prefix}"
    )
    make_three_file_set(prefix)
    assert not parse_line(f"--data-path {prefix}").data.has_dynamic_spans
    with pytest.raises(ConfigError, match=r"cannot read .*corpus\.idx"):
        parse(["--data-path", str(prefix)], world_size=1, env={})


def test_t5_recipe_is_accepted_and_adam_flags_raise():
    line = "--optimizer adafactor --lr-decay-style inverse-square-root"
    config = parse_line(line)
    assert (config.optimizer.optimizer, config.optimizer.lr_decay_style) == ("adafactor", "inverse-square-root")
    assert "--adam-beta1 applies to AdamW only, got --optimizer adafactor" in error_message(f"{line} --adam-beta1 0.8")


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_adafactor_rejects_padded_vocabulary(family):
    line = "--optimizer adafactor --make-vocab-size-divisible-by 16".split()
    config = parse(line, world_size=1, env={}, family=family)
    with pytest.raises(ConfigError, match=r"got a vocabulary of 101 that .*-by 16 pads to 112 rows.*--vocab-size 112"):
        config.with_vocab(101)
    assert config.with_vocab(96).model.vocab_size == 96
    full = parse([*line, "--vocab-size", "112"], world_size=1, env={}, family=family)
    assert full.with_vocab(101).model.vocab_size == 112


def test_flag_docs_describe_t5_dropout_epsilon_and_decay():
    text = flags_doc.text()
    for fragment in (
        "in T5 with relative positions also of the activation and of the final norms",
        "to the mean square in RMS norms",
        "with inverse-square-root it only determines the warm-up",
        "--lr-decay-iters then only determines W",
        "--enc-seq-length with a three-file set |",
    ):
        assert fragment in text
