"""The flags of an encoder-decoder: derived numbers, cross checks, and what each model refuses of the other's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import config_from_values, flags_doc
from megatron.arguments.validate import find_problems
from megatron.config import Config, ModelConfig, T5Config, decoder, parse
from megatron.config.data import SET_SUFFIXES
from megatron.errors import ConfigError
from megatron.models.registry import FAMILIES

DEFAULTS = {"activation": "relu", "layernorm_epsilon": 1e-6}


def read(line: str = "", world_size: int = 1, **others: Any) -> Config:
    env = others.pop("env", {})
    return parse(line.split(), world_size=world_size, env=env, family="t5", defaults=DEFAULTS, **others)


def error_of(line: str, world_size: int = 1, **others: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(line, world_size, **others)
    return str(caught.value)


def test_missing_numbers_follow_from_the_others():
    config = read("--num-layers 3 --dec-layers 5 --enc-seq-length 512")
    t5 = config.own
    assert (t5.enc_layers, t5.dec_layers, config.total_layers) == (3, 5, 8)
    assert (t5.raw_length, t5.dec_seq_length, t5.most_spans) == (568, 114, 28)
    assert (config.tokens_per_sample, config.loss_tokens_per_sample) == (626, 114)
    assert config.model.max_position_embeddings == 0
    assert (config.model.activation, config.model.layernorm_epsilon) == ("relu", 1e-6)
    gpt2 = parse(["--seq-length", "64", "--num-layers", "3"], world_size=1, env={})
    assert (gpt2.tokens_per_sample, gpt2.loss_tokens_per_sample, gpt2.total_layers) == (64, 64, 3)


def test_a_longer_decoder_pads_and_learned_positions_hold_the_longer_side():
    learned = "--position-embedding-type learned --enc-seq-length 64"
    assert read("--enc-seq-length 512 --dec-seq-length 130").own.dec_seq_length == 130
    assert read(learned).model.max_position_embeddings == 64
    assert read(f"{learned} --dec-seq-length 100").model.max_position_embeddings == 100
    assert read(f"{learned} --max-position-embeddings 200").model.max_position_embeddings == 200


def test_segments_travel_where_documents_are_apart_or_lengths_differ():
    assert not read().own.has_segments(False)
    assert read().own.has_segments(True)
    assert read("--denoisers R,X,S").own.has_segments(False)
    assert read("--denoisers R:2,S:1").own.most_spans == read("--denoisers R,S").own.most_spans


def test_a_config_of_t5_can_be_made_without_a_command_line():
    model = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=2)
    config = Config(family="t5", model=model, own=T5Config(enc_seq_length=40))
    assert find_problems(config, 1) == []
    assert config.own.dec_seq_length == config.own.longest_target
    with pytest.raises(ValueError, match=f"family must be {' or '.join(FAMILIES)}, got 'opt'"):
        config_from_values({}, family="opt")
    with pytest.raises(ValueError, match="got 'opt'"):
        parse([], world_size=1, env={}, family="opt")


def test_the_namespace_has_megatrons_names():
    args = read("--enc-seq-length 64 --dec-seq-length 40 --dec-layers 2").namespace()
    assert (args.seq_length, args.encoder_seq_length, args.decoder_seq_length) == (64, 64, 40)
    assert (args.encoder_num_layers, args.decoder_num_layers) == (4, 2)
    assert (args.vocab_extra_ids, args.pipeline_model_parallel_split_rank) == (100, 0)
    assert not hasattr(parse([], world_size=1, env={}).namespace(), "enc_seq_length")


def test_what_two_models_must_share_is_named_by_family():
    gpt2 = parse(["--vocab-size", "9"], world_size=1, env={})
    assert list(gpt2.identity()) == [
        *("num_layers", "hidden_size", "num_attention_heads", "kv_hidden_size", "ff_hidden_size", "hidden_bias"),
        *("max_position_embeddings", "vocab_size", "untie_embeddings", "activation", *decoder.IDENTITY),
    ]
    t5 = read("--enc-layers 2 --vocab-size 9").identity()
    assert (t5["family"], t5["enc_layers"], t5["dec_layers"], "num_layers" in t5) == ("t5", 2, 4, False)
    assert t5 != read("--enc-layers 2 --vocab-size 9 --relative-attention-max-distance 64").identity()
    assert t5 == read("--num-layers 2 --dec-layers 4 --vocab-size 9 --enc-seq-length 80").identity()


def test_a_config_is_json_with_a_section_of_t5_only_where_it_counts():
    assert json.loads(json.dumps(read().to_dict()))["t5"]["dec_seq_length"] == read().own.dec_seq_length
    gpt2 = parse([], world_size=1, env={}).to_dict()
    assert gpt2["family"] == "gpt2" and "t5" not in gpt2


def test_relative_positions_have_no_end_so_a_number_of_them_is_neutral():
    config = read("--enc-seq-length 64 --max-position-embeddings 512")
    assert list(config.ignored) == ["--max-position-embeddings"] and config.model.has_relative_positions
    assert config.model.max_position_embeddings == 0


def test_a_script_of_megatrons_t5_has_learned_positions_and_its_defaults():
    lengths = "--encoder-seq-length 64 --decoder-seq-length 32 --max-position-embeddings 80"
    config = read(lengths)
    assert (config.model.position_embedding_type, config.model.max_position_embeddings) == ("learned_absolute", 80)
    assert (config.model.activation, config.model.hidden_bias) == ("gelu-tanh", True)
    assert (config.optimizer.lr_decay_style, config.optimizer.warmup) == ("linear", 0.0)
    assert any("parsed as a script for Megatron's T5" in note for note in config.notes) and not config.ignored
    assert read(f"{lengths} --position-embedding-type relative").model.has_relative_positions
    assert read(lengths.partition(" --max")[0]).model.has_relative_positions, "as before"


@pytest.mark.parametrize(
    ("line", "parts"),
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
def test_a_value_that_cannot_be_used_is_told_with_its_cure(line, parts):
    message = error_of(line, 3 if "parallel-size 3" in line else 1)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("line", "world_size", "parts"),
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
def test_a_layout_that_does_not_fit_names_the_numbers_that_do(line, world_size, parts):
    message = error_of(line, world_size)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("stages", [5, 8])
def test_more_stages_than_a_side_has_layers_work(stages):
    assert read(f"--pipe-parallel-size {stages}", stages).parallel.num_stages == stages


def test_layers_of_a_chunk_count_both_sides():
    line = "--pipe-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --enc-layers 2 --dec-layers 6"
    assert read(line, 2).parallel.chunks == 2


def test_a_seam_in_the_defaults_is_a_note_without_a_pipeline():
    config = read(env={"MEGATRON_DEFAULTS": "--pipeline-split-rank 1"})
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
def test_t5_refuses_what_acts_in_gpt2_only(flag, expected):
    message = error_of(flag)
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
def test_gpt2_refuses_what_acts_in_t5_only(flag, message):
    with pytest.raises(ConfigError) as caught:
        parse(flag.split(), world_size=1, env={})
    assert str(caught.value).startswith(f"{flag.split()[0]} is not supported: ") and message in str(caught.value)


def test_positions_of_the_other_kind_of_model_are_refused():
    assert "must be relative (T5) or learned (CPM's T5), got rope" in error_of("--use-rotary-position-embeddings")
    assert "must be relative (T5) or learned (CPM's T5), got alibi" in error_of("--position-embedding-type alibi")
    with pytest.raises(
        ConfigError, match="must be one of learned_absolute, rope, alibi, none in a decoder, got relative"
    ):
        parse(["--position-embedding-type", "relative"], world_size=1, env={})


def test_defaults_of_the_other_model_are_told():
    with pytest.raises(ConfigError, match=r"seq_length in the defaults of pretrain\(\) is not supported: T5 has two"):
        parse([], world_size=1, env={}, family="t5", defaults={"seq_length": 4})
    assert "MEGATRON_DEFAULTS: --seq-length is not supported" in error_of(
        "", env={"MEGATRON_DEFAULTS": "--seq-length 4"}
    )


def test_defaults_of_the_script_give_way_to_flags_and_show_in_help(capsys):
    config = read("--activation gated-gelu --layernorm-epsilon 1e-5")
    assert (config.model.activation, config.model.layernorm_epsilon) == ("gated-gelu", 1e-5)
    with pytest.raises(SystemExit):
        read("--help-all")
    text = " ".join(capsys.readouterr().out.split())
    assert "bash run_t5.sh [flags]" in text and "--denoisers" in text and "(default: relu)" in text
    assert "--seq-length INT" not in text.replace("enc-seq-length", "").replace("dec-seq-length", "")


def test_help_of_gpt2_shows_no_flag_of_t5(capsys):
    with pytest.raises(SystemExit):
        parse(["--help-all"], world_size=1, env={})
    text = capsys.readouterr().out
    assert "--seq-length" in text and "--denoisers" not in text and "\nt5:" not in text


def make_set(prefix: Path, *parts: str) -> Path:
    for part in parts or SET_SUFFIXES:
        for suffix in (".idx", ".bin"):
            Path(f"{prefix}{part}{suffix}").touch()
    return prefix


def test_a_set_in_three_files_has_any_length_of_targets(tmp_path: Path):
    line = f"--data-path {make_set(tmp_path / 'corpus')} --enc-seq-length 128"
    assert read(f"{line} --dec-seq-length 20").own.dec_seq_length == 20
    assert read(line).own.dec_seq_length == 128
    assert read(f"{line} --position-embedding-type learned").model.max_position_embeddings == 128
    assert read(line.replace("length 128", "length 2")).own.dec_seq_length == 2, "too short for a span of ours"
    assert "--enc-seq-length must be at least 2, a token and the end token, got 1" in error_of(
        line.replace("length 128", "length 1")
    )
    assert "--dec-seq-length must be at least 29" in error_of("--enc-seq-length 128 --dec-seq-length 20")


@pytest.mark.parametrize("flag", ["--noise-density 0.2", "--mean-span-length 4", "--denoisers R", "--denoisers R,X"])
def test_a_set_in_three_files_refuses_what_would_cut_spans(flag, tmp_path: Path):
    prefix = make_set(tmp_path / "corpus")
    message = f"{flag.split()[0]} has no effect on spans that are fixed in the data, got --data-path {prefix}, a set"
    assert error_of(f"--data-path {prefix} {flag}").startswith(message)


@pytest.mark.parametrize(("denoisers", "message"), [("R,X", "must be one denoiser for --data-path"), ("Q", "must be")])
def test_a_set_in_three_files_refuses_denoisers_of_the_defaults_that_it_cannot_have(denoisers, message, tmp_path: Path):
    env = {"MEGATRON_DEFAULTS": f"--denoisers {denoisers}"}
    assert f"--denoisers {message}" in error_of(f"--data-path {make_set(tmp_path / 'corpus')}", env=env)


def make_corpus(prefix: Path) -> Path:
    return make_set(prefix, "")


def test_a_set_in_three_files_among_others_leaves_them_their_flags(tmp_path: Path):
    line = f"--data-path 0.7 {make_corpus(tmp_path / 'corpus')} 0.3 {make_set(tmp_path / 'fixed')} --enc-seq-length 128"
    config = read(f"{line} --noise-density 0.2 --mean-span-length 4 --denoisers R")
    assert config.data.cuts_spans and list(config.data.flag_of_set) == [str(tmp_path / "fixed")]
    assert config.own.dec_seq_length == 128, "long enough for the set as well"
    most = read(f"{line} --noise-density 0.6 --mean-span-length 8").own
    assert most.dec_seq_length == most.longest_target > 128
    assert "--dec-seq-length must be at least 29" in error_of(f"{line} --dec-seq-length 20")
    message = (
        f"--denoisers must be one denoiser for --data-path {tmp_path / 'fixed'}, a set in three files whose spans are "
    )
    assert error_of(f"{line} --denoisers R,X").startswith(f"{message}fixed, got R,X. Remove it")
    assert "R,X in the defaults. Remove it" in error_of(line, env={"MEGATRON_DEFAULTS": "--denoisers R,X"})


def test_the_set_that_refuses_a_flag_is_named_by_its_own_flag(tmp_path: Path):
    fixed = [make_set(tmp_path / name) for name in ("a", "b", "c")]
    line = f"--train-data-path {fixed[0]} --valid-data-path {fixed[1]} --test-data-path {fixed[2]}"
    assert f"got --train-data-path {fixed[0]}, a set in three files" in error_of(f"{line} --noise-density 0.2")
    mixed = line.replace(str(fixed[0]), str(make_corpus(tmp_path / "d")))
    assert read(f"{mixed} --noise-density 0.2").data.cuts_spans
    assert f"one denoiser for --valid-data-path {fixed[1]}, a set" in error_of(f"{mixed} --denoisers R,S")


def test_files_of_pairs_are_looked_for_where_one_of_them_is(tmp_path: Path):
    prefix = tmp_path / "corpus"
    assert f"without {prefix}.idx and {prefix}.bin" in error_of(f"--data-path {prefix}")
    make_set(prefix, "_context", "_target")
    assert f"without {prefix}_target_offset.idx and {prefix}_target_offset.bin" in error_of(f"--data-path {prefix}")
    make_set(prefix)
    assert not read(f"--data-path {prefix}").data.cuts_spans
    with pytest.raises(ConfigError, match=r"without .*corpus\.idx"):
        parse(["--data-path", str(prefix)], world_size=1, env={})


def test_the_recipe_of_t5_is_taken_and_adams_flags_are_not():
    line = "--optimizer adafactor --lr-decay-style inverse-square-root"
    config = read(line)
    assert (config.optimizer.optimizer, config.optimizer.lr_decay_style) == ("adafactor", "inverse-square-root")
    assert "--adam-beta1 applies to AdamW only, got --optimizer adafactor" in error_of(f"{line} --adam-beta1 0.8")


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_adafactor_takes_no_padded_vocabulary(family):
    line = "--optimizer adafactor --make-vocab-size-divisible-by 16".split()
    config = parse(line, world_size=1, env={}, family=family)
    with pytest.raises(ConfigError, match=r"got a vocabulary of 101 that .*-by 16 pads to 112 rows.*--vocab-size 112"):
        config.with_vocab(101)
    assert config.with_vocab(96).model.vocab_size == 96
    full = parse([*line, "--vocab-size", "112"], world_size=1, env={}, family=family)
    assert full.with_vocab(101).model.vocab_size == 112


def test_the_help_tells_what_dropout_epsilon_and_the_last_step_of_decay_do_in_t5():
    text = flags_doc.text()
    for part in (
        "in T5 with relative positions also of the activation and of the final norms",
        "to the mean square in RMS norms",
        "with inverse-square-root it only determines the warm-up",
        "--lr-decay-iters then only determines W",
        "with a set in three files --enc-seq-length |",
    ):
        assert part in text
