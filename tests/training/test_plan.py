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

SIZES = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 101 --gas 8"
T5_SIZES = SIZES.replace("--seq-length 32", "--enc-seq-length 64").replace("--num-layers 8", "--num-layers 4")
TOKENIZER = Path(__file__).parents[1] / "golden" / "tokenizer.json"


def config_of(flags: str, pipe: int, family: str) -> Config:
    sizes = T5_SIZES if family == "t5" else SIZES
    line = f"{sizes} {flags} --pipe-parallel-size {pipe}"
    return parse(line.split(), world_size=pipe, env={}, family=family).with_vocab(101)


def rows(
    flags: str,
    pipe: int = 2,
    counted: list[int] | None = None,
    bounds: list[int] | None = None,
    family: str = "gpt2",
) -> dict[str, str]:
    config = config_of(flags, pipe, family)
    topology = Topology.of_world(pipe, 1, pipe)
    bounds = bounds or registry.costs_of(config).stage_bounds(pipe, config.parallel.chunks)
    return dict(plan_rows(config, topology, bounds, "fp32", counted, simulated_bubble if counted else None))


def test_stages_of_several_chunks_show_all_their_layers_and_what_they_keep() -> None:
    shown = rows("--pipeline-chunks 2")
    assert shown["stage 0"].startswith("layers 0-2 and 5-6 of 11, ")
    assert shown["stage 1"].startswith("layers 3-4 and 7-10 of 11, ")
    assert shown["stage 0"].endswith("; stores the activations of 5 of 8 x 2 forwards")
    assert shown["stage 1"].endswith("; stores the activations of 3 of 8 x 2 forwards")
    assert shown["pipeline"] == "schedule interleaved, 2 chunks on each stage"
    assert shown["pipeline bubble"].endswith(" % expected, 5.9 % with equal stages")


def test_a_llama_is_described_with_its_heads_of_keys() -> None:
    shown = rows("--num-query-groups 2", family="llama")
    assert shown["model"].endswith("4 heads, feed-forward 256, vocabulary 101, 2 key-value heads")
    assert shown["stage 1"].startswith("layers 5-10 of 11, ") and "key-value heads" not in rows("")["model"]


def test_parameters_of_stages_add_up_whatever_the_chunks() -> None:
    for chunks in (1, 2, 4):
        costs = registry.costs_of(config_of("", 1, "gpt2"))
        bounds = costs.stage_bounds(2, chunks)
        assert sum(costs.stage_parameters(bounds, stages=2)) == costs.num_parameters + 101 * 64


@pytest.mark.parametrize(
    ("schedule", "kept", "bubble"), [("1f1b", (2, 1), 11.1), ("gpipe", (8, 8), 11.1), ("zb-h1", (2, 2), 4.0)]
)
def test_each_schedule_has_its_bubble_and_its_memory(schedule: str, kept: tuple[int, int], bubble: float) -> None:
    shown = rows(f"--pipeline-schedule {schedule}")
    assert shown["pipeline"] == f"schedule {schedule}"
    assert f"{bubble} % with equal stages" in shown["pipeline bubble"]
    for stage, number in enumerate(kept):
        assert f"stores the activations of {number} of 8 micro-batches" in shown[f"stage {stage}"]


def test_auto_shows_what_it_chooses_from() -> None:
    bubbles = rows("--pipeline-schedule auto")["pipeline bubble"]
    assert [part.split(":")[0] for part in bubbles.split("; ")] == ["1f1b", "gpipe", "zb-h1"]


def test_a_model_that_is_built_is_simulated_and_one_of_ones_own_has_equal_stages() -> None:
    built = rows("", counted=[registry.costs_of(config_of("", 1, "gpt2")).num_parameters, 0, 0])
    assert built["pipeline bubble"] == rows("")["pipeline bubble"].removeprefix("about ")
    own = rows("", counted=[1000, 600, 400], bounds=[0, 2, 3, 5, 7])
    kept = "stores the activations of 5 of 8 x 2 forwards"
    assert own["stage 0"] == f"layers 0-1 and 3-4, 600 parameters on each rank; {kept}"
    assert own["stage 1"].startswith("layers 2 and 5-6, 400 parameters")
    assert own["pipeline bubble"] == "5.9 % with equal stages"


def test_a_plan_says_where_the_cut_is_made_only_at_the_start() -> None:
    assert "--partition-method uniform splits the model at the start" in rows("--partition-method uniform")["partition"]
    assert "partition" not in rows("")


def test_few_micro_batches_are_told() -> None:
    assert rows("--gas 2", pipe=4)["pipeline bubble"].endswith("(fewer micro-batches than stages: raise --gas)")


def test_a_plan_with_zero_1_counts_the_states_that_replicas_share() -> None:
    shown = {}
    for stage in (0, 1):
        line = f"{SIZES} --zero-stage {stage}"
        config = parse(line.split(), world_size=1024, env={}, family="gpt2").with_vocab(101)
        shown[stage] = dict(plan_rows(config, Topology.of_world(1024, 1, 1), [0, 11], "bf16"))
    assert (
        shown[1]["ZeRO"] == "stage 1: 1024 replicas share main params and optimizer states" and "ZeRO" not in shown[0]
    )
    costs = registry.costs_of(config, is_on_cpu=True)
    common = {"micro_batch_size": config.batch.batch_size, "num_micro_batches": 8, "dtype": "bf16"}
    (memory,) = costs.memory_per_stage([0, 11], zero=Zero(1, 1024), **common)
    assert f"about {human_bytes(memory.total)} on each rank" in shown[1]["stage 0"]
    assert shown[0]["stage 0"] != shown[1]["stage 0"]


def test_stages_of_t5_show_the_layers_of_their_sides() -> None:
    shown = rows("", pipe=4, family="t5", bounds=[0, 3, 8, 10, 13])
    assert shown["stage 0"].startswith("encoder 0-1, ")
    assert shown["stage 1"].startswith("encoder 2-3 and decoder 0, ")
    assert shown["stage 2"].startswith("decoder 1-2, ")
    assert shown["stage 3"].startswith("decoder 3, ") and shown["stage 3"].endswith(
        "stores the activations of 1 of 8 micro-batches"
    )
    chunked = rows("", pipe=2, family="t5", bounds=[0, 3, 6, 9, 13])
    assert chunked["stage 0"].startswith("encoder 0-1 and decoder 0-1, ")
    assert chunked["stage 1"].startswith("encoder 2-3 and decoder 2-3, ")


def test_the_rows_of_t5_tell_its_sizes_tokens_and_spans() -> None:
    shown = rows("--denoisers R,X --dec-layers 2", family="t5")
    assert ": 4 encoder and 2 decoder layers, hidden 64, 4 heads, " in shown["model"]
    assert shown["model"].endswith("vocabulary 101, relative positions")
    config = config_of("--denoisers R,X --dec-layers 2", 2, "t5")
    each = 64 + config.own.dec_seq_length
    assert shown["tokens per step"].startswith(f"{8 * 4 * each:,} = (encoder 64 + decoder {each - 64}) x micro-batch 4")
    text = f"{config.own.raw_length} text tokens become up to 64 input tokens"
    assert shown["spans"] == f"{text} and up to {each - 64} of targets; denoisers R,X"
    plain = rows("--dec-seq-length 40", family="t5")["spans"]
    assert plain == "70 text tokens become 64 input tokens and 14 target tokens; noise density 0.15, mean span length 3"
    assert "spans" not in rows("")


def test_packing_and_fill_in_the_middle_are_told() -> None:
    assert not {"packing", "fill in the middle"} & set(rows(""))
    shown = rows("--packing best-fit --fim-rate 0.4 --fim-spm-rate 0.25")
    assert shown["packing"].startswith("best-fit: full documents, separated in attention")
    assert shown["fill in the middle"] == "40 % of the documents, of these 25 % with the suffix first"


def test_spans_are_told_and_sentinels_checked_unless_every_corpus_is_a_set(tmp_path: Path) -> None:
    for name in ("a_context", "a_target", "a_target_offset", "b"):
        for suffix in (".idx", ".bin"):
            (tmp_path / (name + suffix)).touch()
    fixed, mixed = f"--data-path {tmp_path}/a", f"--data-path 1 {tmp_path}/a 1 {tmp_path}/b"
    assert "spans" not in rows(fixed, family="t5") and "spans" in rows(mixed, family="t5")
    line = f"{T5_SIZES.replace('--vocab-size 101', '')} --vocab-extra-ids 1 --tokenizer-path {TOKENIZER} --dry-run"
    dry_run(parse([*line.split(), *fixed.split()], world_size=1, env={}, family="t5"), 1)
    with pytest.raises(DataError, match="--vocab-extra-ids"):
        dry_run(parse([*line.split(), *mixed.split()], world_size=1, env={}, family="t5"), 1)


def test_the_bubble_of_t5_is_that_of_its_own_costs() -> None:
    config = config_of("", 2, "t5")
    uneven = rows("", family="t5", bounds=[0, 2, 13], counted=[registry.costs_of(config).num_parameters, 0, 0])[
        "pipeline bubble"
    ]
    even = rows("", family="t5", counted=[registry.costs_of(config).num_parameters, 0, 0])["pipeline bubble"]
    assert float(uneven.split()[0]) > 30 > float(even.split()[0])


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_rates_count_the_flops_of_the_model_and_of_ones_own_six_per_parameter_and_token(family: str) -> None:
    config = config_of("", 1, family)
    costs = registry.costs_of(config)
    assert 24 * Rates(config, None, [costs.num_parameters]).flops_per_sample == costs.flops_per_step(24)
    assert Rates(config, None, [1000]).flops_per_sample == 6 * 1000 * config.tokens_per_sample


def test_a_plan_tells_the_lengths_of_a_schedule_and_when_they_come() -> None:
    shown = rows("--seq-length 64 --seq-length-schedule 0:16;1000:32;5e3:64 --batch-size 2 --gas 2", 1)
    assert "sequence length" not in rows("", 1)
    assert shown["sequence length"] == (
        "16, 32 from 1,000 tokens on (about step 5), 64 from 5,000 tokens on (about step 21); chunks of the same "
        "samples"
    )


def test_rates_count_pieces_as_samples_of_their_length() -> None:
    config = config_of("", 1, "gpt2")
    length = config.batch.seq_length
    costs = registry.costs_of(config)
    rates = Rates(config, None, [costs.num_parameters])
    half = registry.costs_of(replace(config, batch=replace(config.batch, seq_length=length // 2)))
    assert rates.flops_of_sample(length) == rates.flops_per_sample == costs.flops_per_sample
    assert rates.flops_of_sample(length // 2) == 2 * half.flops_per_sample < costs.flops_per_sample
    assert rates.drain(1, 4, flops=5.0)["flops_per_s"] < rates.drain(1, 4)["flops_per_s"]
    assert Rates(config, None, [1000]).flops_of_sample(length // 2) == 6 * 1000 * length


def test_rates_count_the_samples_that_steps_of_any_size_have_read(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("", 1, "gpt2")
    times = iter([10.0, 15.0])
    monkeypatch.setattr("megatron.training.callbacks.speed_monitor.time.perf_counter", lambda: next(times))
    rates = Rates(config, 1e9, [1000])
    metrics = rates.drain(2, 12, pause_s=1.0, waited_s=0.5)
    assert metrics["tokens_per_s"] == 12 * config.tokens_per_sample / 4
    assert (metrics["step_s"], metrics["data_wait"]) == (2.0, 0.125)
    assert metrics["flops_per_s"] == 6 * 1000 * metrics["tokens_per_s"] == metrics["mfu"] * 1e9


def test_the_mean_speed_leaves_out_the_first_record_where_there_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 10.0, 12.0, 16.0])
    monkeypatch.setattr("megatron.training.callbacks.speed_monitor.time.perf_counter", lambda: next(times))
    config = config_of("", 1, "gpt2")
    rates = Rates(config, None, [1000])
    means = [rates.mean_tokens_per_s()]
    for samples in (10, 6, 6):
        rates.drain(1, samples)
        means.append(rates.mean_tokens_per_s())
    assert means == [None, *(each * config.tokens_per_sample for each in (1.0, 3.0, 2.0))]


def test_a_dry_run_tells_of_too_few_sentinels() -> None:
    line = f"--tokenizer-path {TOKENIZER} --enc-seq-length 2048 --vocab-extra-ids 5 --dry-run"
    with pytest.raises(DataError, match=r"114 for --enc-seq-length 2048.*gives 5\. Raise --vocab-extra-ids to 114"):
        dry_run(parse(line.split(), world_size=1, env={}, family="t5"), 1)


def test_the_vocabulary_of_t5_holds_the_appended_sentinels_and_modes() -> None:
    line = f"--tokenizer-path {TOKENIZER} --vocab-extra-ids 30"
    sizes = {}
    for family, flags in (("gpt2", line.split(" --vocab")[0]), ("t5", line), ("t5", f"{line} --denoisers R,X,S")):
        _, config = with_tokenizer(parse(flags.split(), world_size=1, env={}, family=family))
        sizes[flags] = config.model.vocab_size
    text, with_sentinels, with_modes = sizes.values()
    assert (with_sentinels, with_modes) == (text + 30, text + 33)


class WithSentinels(MockTokenizer):
    """A tokenizer of 50 tokens, three of which are sentinels."""

    def __init__(self) -> None:
        super().__init__(50, sentinel_ids=(49, 48, 47))


def test_sentinels_to_append_are_refused_where_the_tokenizer_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "build", lambda *args, **kwargs: WithSentinels())
    line = ["--tokenizer-path", str(TOKENIZER)]
    _, config = with_tokenizer(parse(line, world_size=1, env={}, family="t5"))
    assert config.model.vocab_size == 50
    message = r"--vocab-extra-ids needs a tokenizer without sentinels, got .* 100 and a tokenizer with 3 sentinels"
    with pytest.raises(ConfigError, match=message):
        with_tokenizer(parse([*line, "--vocab-extra-ids", "100"], world_size=1, env={}, family="t5"))


@pytest.mark.parametrize(
    ("family", "flags", "size"),
    [
        ("gpt2", "", 900),
        ("gpt2", "--vocab-size 950", 950),
        ("t5", "", 1000),
        ("t5", "--vocab-extra-ids 20 --denoisers R,X", 922),
        ("t5", "--vocab-size 2000", 2000),
    ],
)
def test_a_dry_run_before_the_tokenizer_is_made_counts_what_the_run_will_have(
    family: str, flags: str, size: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TEXT_VOCABULARY, "900")
    monkeypatch.setenv("RANK", "0")
    dry_run(parse(["--dry-run", *flags.split()], world_size=1, env={}, family=family), 1)
    assert f"vocabulary {size}" in capsys.readouterr().out


def test_a_plan_for_cpus_counts_the_probabilities_that_blocked_attention_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = "--attention-dropout 0 --enc-seq-length 512 --dec-seq-length 512 --batch-size 1"
    held = {kind: rows(f"{sizes} --device {kind}", 1, family="t5")["stage 0"] for kind in ("cpu", "cuda")}
    config = config_of(sizes, 1, "t5")
    for kind, row in held.items():
        costs = registry.costs_of(config, is_on_cpu=kind == "cpu")
        (memory,) = costs.memory_per_stage([0, costs.num_units], micro_batch_size=1)
        assert f"about {human_bytes(memory.total)} on each rank" in row
    assert held["cpu"] != held["cuda"]
    monkeypatch.setattr(device, "choose", lambda requested: "cpu")
    assert rows(sizes, 1, family="t5")["stage 0"] == held["cpu"]
