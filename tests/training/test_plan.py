"""The rows of the start table that tell how a pipeline is laid out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron import device
from megatron.config import Config, parse
from megatron.costs.memory import Zero
from megatron.data.mock_dataset import MockTokenizer
from megatron.errors import ConfigError, DataError
from megatron.log import human_bytes
from megatron.models import registry
from megatron.mpu.topology import Topology
from megatron.training import vocabulary
from megatron.training.callbacks.speed_monitor import Rates
from megatron.training.dry_run import TEXT_VOCABULARY, dry_run, plan_rows
from megatron.training.estimates import simulated_bubble
from megatron.training.vocabulary import with_tokenizer

GPT2_FLAGS = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 101 --gas 8"
T5_FLAGS = GPT2_FLAGS.replace("--seq-length 32", "--enc-seq-length 64").replace("--num-layers 8", "--num-layers 4")
TOKENIZER = Path(__file__).parents[1] / "golden" / "tokenizer.json"


def make_config(flags: str, num_stages: int, family: str) -> Config:
    model_flags = T5_FLAGS if family == "t5" else GPT2_FLAGS
    command_line = f"{model_flags} {flags} --pipe-parallel-size {num_stages}"
    return parse(command_line.split(), world_size=num_stages, env={}, family=family).with_vocab(101)


def make_plan_rows(
    flags: str,
    num_stages: int = 2,
    parameter_counts: list[int] | None = None,
    bounds: list[int] | None = None,
    family: str = "gpt2",
) -> dict[str, str]:
    config = make_config(flags, num_stages, family)
    topology = Topology.from_world_size(num_stages, 1, num_stages)
    bounds = bounds or registry.costs_of(config).stage_bounds(num_stages, config.parallel.chunks)
    return dict(
        plan_rows(config, topology, bounds, "fp32", parameter_counts, simulated_bubble if parameter_counts else None)
    )


def test_plan_shows_layers_and_activations_of_all_chunks() -> None:
    plan = make_plan_rows("--pipeline-chunks 2")
    assert plan["stage 0"].startswith("layers 0-2 and 5-6 of 11, ")
    assert plan["stage 1"].startswith("layers 3-4 and 7-10 of 11, ")
    assert plan["stage 0"].endswith("; stores the activations of 5 of 8 x 2 forwards")
    assert plan["stage 1"].endswith("; stores the activations of 3 of 8 x 2 forwards")
    assert plan["pipeline"] == "schedule interleaved, 2 chunks on each stage"
    assert plan["pipeline bubble"].endswith(" % expected, 5.9 % with equal stages")


def test_plan_shows_llama_key_value_heads() -> None:
    plan = make_plan_rows("--num-query-groups 2", family="llama")
    assert plan["model"].endswith("4 heads, feed-forward 256, vocabulary 101, 2 key-value heads")
    assert plan["stage 1"].startswith("layers 5-10 of 11, ") and "key-value heads" not in make_plan_rows("")["model"]


def test_stage_parameters_sum_to_model_parameters_for_any_chunks() -> None:
    for num_chunks in (1, 2, 4):
        costs = registry.costs_of(make_config("", 1, "gpt2"))
        bounds = costs.stage_bounds(2, num_chunks)
        assert sum(costs.stage_parameters(bounds, stages=2)) == costs.num_parameters + 101 * 64


@pytest.mark.parametrize(
    ("schedule", "stored_counts", "bubble"), [("1f1b", (2, 1), 11.1), ("gpipe", (8, 8), 11.1), ("zb-h1", (2, 2), 4.0)]
)
def test_plan_shows_bubble_and_memory_of_schedule(schedule: str, stored_counts: tuple[int, int], bubble: float) -> None:
    plan = make_plan_rows(f"--pipeline-schedule {schedule}")
    assert plan["pipeline"] == f"schedule {schedule}"
    assert f"{bubble} % with equal stages" in plan["pipeline bubble"]
    for stage, count in enumerate(stored_counts):
        assert f"stores the activations of {count} of 8 micro-batches" in plan[f"stage {stage}"]


def test_plan_lists_bubbles_of_auto_schedules() -> None:
    bubbles = make_plan_rows("--pipeline-schedule auto")["pipeline bubble"]
    assert [text.split(":")[0] for text in bubbles.split("; ")] == ["1f1b", "gpipe", "zb-h1"]


def test_plan_simulates_known_model_and_assumes_equal_stages_for_user_model() -> None:
    simulated = make_plan_rows(
        "", parameter_counts=[registry.costs_of(make_config("", 1, "gpt2")).num_parameters, 0, 0]
    )
    assert simulated["pipeline bubble"] == make_plan_rows("")["pipeline bubble"].removeprefix("about ")
    user_model = make_plan_rows("", parameter_counts=[1000, 600, 400], bounds=[0, 2, 3, 5, 7])
    stored_text = "stores the activations of 5 of 8 x 2 forwards"
    assert user_model["stage 0"] == f"layers 0-1 and 3-4, 600 parameters on each rank; {stored_text}"
    assert user_model["stage 1"].startswith("layers 2 and 5-6, 400 parameters")
    assert user_model["pipeline bubble"] == "5.9 % with equal stages"


def test_plan_shows_partition_method_only_for_split_at_start() -> None:
    assert (
        "--partition-method uniform splits the model at the start"
        in make_plan_rows("--partition-method uniform")["partition"]
    )
    assert "partition" not in make_plan_rows("")


def test_plan_reports_fewer_micro_batches_than_stages() -> None:
    assert make_plan_rows("--gas 2", num_stages=4)["pipeline bubble"].endswith(
        "(fewer micro-batches than stages: raise --gas)"
    )


def test_plan_with_zero_1_shards_optimizer_states() -> None:
    plan = {}
    for zero_stage in (0, 1):
        command_line = f"{GPT2_FLAGS} --zero-stage {zero_stage}"
        config = parse(command_line.split(), world_size=1024, env={}, family="gpt2").with_vocab(101)
        plan[zero_stage] = dict(plan_rows(config, Topology.from_world_size(1024, 1, 1), [0, 11], "bf16"))
    assert plan[1]["ZeRO"] == "stage 1: 1024 replicas share main params and optimizer states" and "ZeRO" not in plan[0]
    costs = registry.costs_of(config, is_on_cpu=True)
    common_args = {"micro_batch_size": config.batch.batch_size, "num_micro_batches": 8, "dtype": "bf16"}
    (memory,) = costs.memory_per_stage([0, 11], zero=Zero(1, 1024), **common_args)
    assert f"about {human_bytes(memory.total)} on each rank" in plan[1]["stage 0"]
    assert plan[0]["stage 0"] != plan[1]["stage 0"]


def test_plan_shows_encoder_and_decoder_layers_of_t5_stages() -> None:
    plan = make_plan_rows("", num_stages=4, family="t5", bounds=[0, 3, 8, 10, 13])
    assert plan["stage 0"].startswith("encoder 0-1, ")
    assert plan["stage 1"].startswith("encoder 2-3 and decoder 0, ")
    assert plan["stage 2"].startswith("decoder 1-2, ")
    assert plan["stage 3"].startswith("decoder 3, ") and plan["stage 3"].endswith(
        "stores the activations of 1 of 8 micro-batches"
    )
    chunked = make_plan_rows("", num_stages=2, family="t5", bounds=[0, 3, 6, 9, 13])
    assert chunked["stage 0"].startswith("encoder 0-1 and decoder 0-1, ")
    assert chunked["stage 1"].startswith("encoder 2-3 and decoder 2-3, ")


def test_plan_shows_t5_model_tokens_and_spans() -> None:
    plan = make_plan_rows("--denoisers R,X --dec-layers 2", family="t5")
    assert ": 4 encoder and 2 decoder layers, hidden 64, 4 heads, " in plan["model"]
    assert plan["model"].endswith("vocabulary 101, relative positions")
    config = make_config("--denoisers R,X --dec-layers 2", 2, "t5")
    tokens_per_sample = 64 + config.family_config.dec_seq_length
    assert plan["tokens per step"].startswith(
        f"{8 * 4 * tokens_per_sample:,} = (encoder 64 + decoder {tokens_per_sample - 64}) x micro-batch 4"
    )
    expected_start = f"{config.family_config.raw_length} text tokens become up to 64 input tokens"
    assert plan["spans"] == f"{expected_start} and up to {tokens_per_sample - 64} target tokens; denoisers R,X"
    default_spans = make_plan_rows("--dec-seq-length 40", family="t5")["spans"]
    assert (
        default_spans
        == "70 text tokens become 64 input tokens and 14 target tokens; noise density 0.15, mean span length 3"
    )
    assert "spans" not in make_plan_rows("")


def test_plan_shows_packing_and_fill_in_the_middle() -> None:
    assert not {"packing", "fill in the middle"} & set(make_plan_rows(""))
    plan = make_plan_rows("--packing best-fit --fim-rate 0.4 --fim-spm-rate 0.25")
    assert plan["packing"].startswith("best-fit: full documents, separated in attention")
    assert plan["fill in the middle"] == "40 % of the documents, of these 25 % with the suffix first"


def test_plan_checks_sentinels_unless_all_corpora_are_datasets(tmp_path: Path) -> None:
    for name in ("a_context", "a_target", "a_target_offset", "b"):
        for suffix in (".idx", ".bin"):
            (tmp_path / (name + suffix)).touch()
    dataset_flags, blend_flags = f"--data-path {tmp_path}/a", f"--data-path 1 {tmp_path}/a 1 {tmp_path}/b"
    assert "spans" not in make_plan_rows(dataset_flags, family="t5") and "spans" in make_plan_rows(
        blend_flags, family="t5"
    )
    command_line = (
        f"{T5_FLAGS.replace('--vocab-size 101', '')} --vocab-extra-ids 1 --tokenizer-path {TOKENIZER} --dry-run"
    )
    dry_run(parse([*command_line.split(), *dataset_flags.split()], world_size=1, env={}, family="t5"), 1)
    with pytest.raises(DataError, match="--vocab-extra-ids"):
        dry_run(parse([*command_line.split(), *blend_flags.split()], world_size=1, env={}, family="t5"), 1)


def test_t5_bubble_uses_t5_costs() -> None:
    config = make_config("", 2, "t5")
    uneven = make_plan_rows(
        "", family="t5", bounds=[0, 2, 13], parameter_counts=[registry.costs_of(config).num_parameters, 0, 0]
    )["pipeline bubble"]
    even = make_plan_rows("", family="t5", parameter_counts=[registry.costs_of(config).num_parameters, 0, 0])[
        "pipeline bubble"
    ]
    assert float(uneven.split()[0]) > 30 > float(even.split()[0])


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_flops_use_model_costs_or_six_per_parameter_and_token(family: str) -> None:
    config = make_config("", 1, family)
    costs = registry.costs_of(config)
    assert 24 * Rates(config, None, [costs.num_parameters]).flops_per_sample == costs.flops_per_step(24)
    assert Rates(config, None, [1000]).flops_per_sample == 6 * 1000 * config.tokens_per_sample


def test_plan_shows_seq_length_schedule() -> None:
    plan = make_plan_rows("--seq-length 64 --seq-length-schedule 0:16;1000:32;5e3:64 --batch-size 2 --gas 2", 1)
    assert "sequence length" not in make_plan_rows("", 1)
    assert plan["sequence length"] == (
        "16, 32 from 1,000 tokens on (about step 5), 64 from 5,000 tokens on (about step 21); chunks of the same "
        "samples"
    )


def test_rates_count_chunks_as_samples_of_chunk_length() -> None:
    config = make_config("", 1, "gpt2")
    length = config.batch.seq_length
    costs = registry.costs_of(config)
    rates = Rates(config, None, [costs.num_parameters])
    half = registry.costs_of(replace(config, batch=replace(config.batch, seq_length=length // 2)))
    assert rates.flops_of_sample(length) == rates.flops_per_sample == costs.flops_per_sample
    assert rates.flops_of_sample(length // 2) == 2 * half.flops_per_sample < costs.flops_per_sample
    assert rates.drain(1, 4, flops=5.0)["flops_per_s"] < rates.drain(1, 4)["flops_per_s"]
    assert Rates(config, None, [1000]).flops_of_sample(length // 2) == 6 * 1000 * length


def test_rates_count_samples_of_variable_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("", 1, "gpt2")
    times = iter([10.0, 15.0])
    monkeypatch.setattr("megatron.training.callbacks.speed_monitor.time.perf_counter", lambda: next(times))
    rates = Rates(config, 1e9, [1000])
    metrics = rates.drain(2, 12, pause_s=1.0, waited_s=0.5)
    assert metrics["tokens_per_s"] == 12 * config.tokens_per_sample / 4
    assert (metrics["step_s"], metrics["data_wait"]) == (2.0, 0.125)
    assert metrics["flops_per_s"] == 6 * 1000 * metrics["tokens_per_s"] == metrics["mfu"] * 1e9


def test_mean_speed_skips_first_of_several_records(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 10.0, 12.0, 16.0])
    monkeypatch.setattr("megatron.training.callbacks.speed_monitor.time.perf_counter", lambda: next(times))
    config = make_config("", 1, "gpt2")
    rates = Rates(config, None, [1000])
    means = [rates.mean_tokens_per_s()]
    for samples in (10, 6, 6):
        rates.drain(1, samples)
        means.append(rates.mean_tokens_per_s())
    assert means == [None, *(samples_per_s * config.tokens_per_sample for samples_per_s in (1.0, 3.0, 2.0))]


def test_dry_run_rejects_too_few_sentinels() -> None:
    command_line = f"--tokenizer-path {TOKENIZER} --enc-seq-length 2048 --vocab-extra-ids 5 --dry-run"
    with pytest.raises(DataError, match=r"--enc-seq-length 2048 needs 114 .*provides 5\. Raise .* to 114"):
        dry_run(parse(command_line.split(), world_size=1, env={}, family="t5"), 1)


def test_t5_vocabulary_includes_appended_sentinels_and_modes() -> None:
    t5_flags = f"--tokenizer-path {TOKENIZER} --vocab-extra-ids 30"
    vocab_sizes = {}
    for family, flags in (
        ("gpt2", t5_flags.split(" --vocab")[0]),
        ("t5", t5_flags),
        ("t5", f"{t5_flags} --denoisers R,X,S"),
    ):
        _, config = with_tokenizer(parse(flags.split(), world_size=1, env={}, family=family))
        vocab_sizes[flags] = config.model.vocab_size
    text_size, with_sentinels, with_modes = vocab_sizes.values()
    assert (with_sentinels, with_modes) == (text_size + 30, text_size + 33)


class SentinelTokenizer(MockTokenizer):
    """A tokenizer of 50 tokens, three of which are sentinels."""

    def __init__(self) -> None:
        super().__init__(50, sentinel_ids=(49, 48, 47))


def test_appended_sentinels_are_rejected_if_tokenizer_has_sentinels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "build", lambda *args, **kwargs: SentinelTokenizer())
    argv = ["--tokenizer-path", str(TOKENIZER)]
    _, config = with_tokenizer(parse(argv, world_size=1, env={}, family="t5"))
    assert config.model.vocab_size == 50
    message = r"--vocab-extra-ids needs a tokenizer without sentinels, got .* 100 and a tokenizer with 3 sentinels"
    with pytest.raises(ConfigError, match=message):
        with_tokenizer(parse([*argv, "--vocab-extra-ids", "100"], world_size=1, env={}, family="t5"))


@pytest.mark.parametrize(
    ("family", "flags", "vocab_size"),
    [
        ("gpt2", "", 900),
        ("gpt2", "--vocab-size 950", 950),
        ("t5", "", 1000),
        ("t5", "--vocab-extra-ids 20 --denoisers R,X", 922),
        ("t5", "--vocab-size 2000", 2000),
    ],
)
def test_dry_run_without_tokenizer_shows_run_vocabulary_size(
    family: str, flags: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TEXT_VOCABULARY, "900")
    monkeypatch.setenv("RANK", "0")
    dry_run(parse(["--dry-run", *flags.split()], world_size=1, env={}, family=family), 1)
    assert f"vocabulary {vocab_size}" in capsys.readouterr().out


def test_cpu_plan_counts_probabilities_saved_by_blocked_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    size_flags = "--attention-dropout 0 --enc-seq-length 512 --dec-seq-length 512 --batch-size 1"
    stage_rows = {
        device_type: make_plan_rows(f"{size_flags} --device {device_type}", 1, family="t5")["stage 0"]
        for device_type in ("cpu", "cuda")
    }
    config = make_config(size_flags, 1, "t5")
    for device_type, row in stage_rows.items():
        costs = registry.costs_of(config, is_on_cpu=device_type == "cpu")
        (memory,) = costs.memory_per_stage([0, costs.num_units], micro_batch_size=1)
        assert f"about {human_bytes(memory.total)} on each rank" in row
    assert stage_rows["cpu"] != stage_rows["cuda"]
    monkeypatch.setattr(device, "choose", lambda requested: "cpu")
    assert make_plan_rows(size_flags, 1, family="t5")["stage 0"] == stage_rows["cpu"]
