"""A Hugging Face folder read in parts: every part is that of the whole, and no rank holds more than it must."""

from __future__ import annotations

import ctypes
import gc
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import TensorRecord, named_parameters
from megatron.checkpoint.huggingface import folder
from megatron.checkpoint.huggingface.config import config_to_huggingface
from megatron.checkpoint.huggingface.weights import expected_weights, is_folder, open_pretrained, weights_to_huggingface
from megatron.checkpoint.resized_vocab import fill
from megatron.config import CheckpointConfig, Config
from megatron.errors import CheckpointError
from megatron.mpu.groups import Group
from megatron.mpu.shard import Shard, shard_of
from tests.helpers.harness import fork_ranks
from tests.helpers.huggingface_models import build, config_of, values_of

MODELS = {
    "gpt2": {"hidden_bias": True},
    "gpt2 without biases and untied": {"untie_embeddings": True},
    "mpt": {},
    "t5": {"max_position_embeddings": 0},
    "t5 gated and untied": {"max_position_embeddings": 0, "activation": "gated-gelu", "untie_embeddings": True},
    "llama": {"num_query_groups": 4, "activation": "gated-silu", "untie_embeddings": True},
    "llama of Qwen 3": {"num_query_groups": 4, "qk_norm": "head", "kv_hidden_size": 6},
    "llama of OLMo 2": {"num_query_groups": 4, "qk_norm": "all", "kv_hidden_size": 6, "norm_placement": "after"},
    "bert": {"hidden_bias": True},
}


RESIZED = [f"weights/{name}" for name in ("embedding.word.weight", "head.weight", "head.bias")]


def config_named(name: str, **values) -> Config:
    return config_of(name.split()[0], **{**MODELS[name], "num_attention_heads": 4, **values})


def write(place: Path, config: Config) -> dict[str, torch.Tensor]:
    """Write a folder with the model of ``config``, in several files; return its weights under our names."""
    weights = {name: values_of(name, tuple(tensor.shape)) for name, tensor in expected_weights(config).items()}
    place.mkdir(parents=True)
    folder.write_json(place / folder.CONFIG, config_to_huggingface(config, "float32"))
    theirs = weights_to_huggingface(weights, config)
    folder.write_tensors(place, theirs, max_shard_bytes=sum(map(folder._bytes, theirs.values())) // 3)
    return weights


def records_of(config: Config, rank: int = 0, size: int = 1) -> list[TensorRecord]:
    module = build(config, Group(tuple(range(size)), rank, None))
    return [TensorRecord(f"weights/{name}", p.detach(), shard_of(p)) for name, p in named_parameters(module)]


@pytest.mark.parametrize("name", MODELS)
def test_every_rank_reads_its_parts_of_every_weight(name: str, tmp_path: Path) -> None:
    config = config_named(name)
    weights = write(tmp_path / "hf", config)
    for size in (1, 2, 4):
        for rank in range(size):
            records = records_of(config, rank, size)
            for record in records:
                record.tensor.fill_(7.0)  # whoever leaves a number out is seen
            with ExitStack() as stack:
                opened = open_pretrained(tmp_path / "hf", stack)
                opened.check_fits(config)
                opened.load(records)
            assert {r.name for r in records} == {f"weights/{name}" for name in weights}
            for record in records:
                part = record.shard.unpadded(record.tensor)
                whole = weights[record.name.removeprefix("weights/")]
                assert torch.equal(part, record.shard.cut(whole)), (record.name, size, rank)


def test_parts_that_cut_through_a_head_are_read_too(tmp_path: Path) -> None:
    """As ZeRO's are: a part may begin anywhere."""
    config = config_named("t5 gated and untied")
    weights = write(tmp_path / "hf", config)
    with ExitStack() as stack:
        opened = open_pretrained(tmp_path / "hf", stack)
        for name in ("encoder.layers.0.attention.query_key_value.weight", "decoder.layers.1.mlp.up.weight"):
            whole = weights[name]
            for start, length in ((0, 1), (3, 8), (5, whole.shape[0] - 5)):
                part = Shard(tuple(whole.shape), 0, start, length)
                assert torch.equal(opened.read(name, part), part.cut(whole))


@pytest.mark.parametrize("name", ["gpt2 without biases and untied", "bert"])
@pytest.mark.parametrize(("saved", "now"), [(29, 40), (29, 23)])
def test_a_vocabulary_of_another_size_keeps_what_both_have_and_fills_the_rest_with_the_mean(
    saved: int, now: int, name: str, tmp_path: Path
) -> None:
    theirs = config_named(name, vocab_size=saved)
    weights = write(tmp_path / "hf", theirs)
    ours = replace(theirs, model=replace(theirs.model, vocab_size=now))
    for size in (1, 4):
        for rank in range(size):
            records = records_of(ours, rank, size)
            with ExitStack() as stack:
                opened = open_pretrained(tmp_path / "hf", stack)
                with pytest.raises(CheckpointError, match=r"vocab_size: saved 29[\s\S]*, or --resize-vocab"):
                    opened.check_fits(ours)
                opened.check_fits(replace(ours, checkpoint=CheckpointConfig(resize_vocab=True)))
                opened.load(records)
            for record in records:
                whole = weights[record.name.removeprefix("weights/")]
                if record.name in RESIZED:
                    mean = whole.double().mean(0).float().expand(max(now - saved, 0), *whole.shape[1:])
                    whole = torch.cat([whole[:now], mean])
                torch.testing.assert_close(record.shard.unpadded(record.tensor), record.shard.cut(whole))
                if record.shard.partition_dim == 0:
                    assert not record.tensor[record.shard.length :].any()  # padding stays zero


def test_tables_of_many_rows_are_filled_a_block_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.checkpoint.resized_vocab._ROWS_AT_ONCE", 3)
    whole = torch.arange(20.0).view(10, 2)
    target = torch.zeros(7, 2)
    fill(target, Shard((14, 2), 0, 7, 7), (10, 2), lambda shard: shard.cut(whole))
    assert target.tolist() == [[14, 15], [16, 17], [18, 19], *[[9, 10]] * 4]


def test_what_does_not_fit_is_told_with_the_flags_that_do(tmp_path: Path) -> None:
    config = config_named("gpt2")
    write(tmp_path / "hf", config)
    wider = config_named("gpt2", ff_hidden_size=48)
    with ExitStack() as stack:
        opened = open_pretrained(tmp_path / "hf", stack)
        with pytest.raises(CheckpointError, match=r"ff_hidden_size: saved 64, now 48[\s\S]*--ff-hidden-size 64"):
            opened.check_fits(wider)
    next(iter((tmp_path / "hf").glob("model-00002-of-*.safetensors"))).unlink()
    with ExitStack() as stack, pytest.raises(CheckpointError, match=r"must contain model-00002-of"):
        open_pretrained(tmp_path / "hf", stack)
    assert not is_folder(tmp_path)


LARGE = {"hidden_size": 512, "num_attention_heads": 8, "num_layers": 4, "vocab_size": 12_000}


SHORT = [("gpt2", 2), ("llama", 1)]
CASES = [(name, size) for name in MODELS if " " not in name for size in (1, 2)]


@pytest.mark.parametrize(
    ("name", "size"), [pytest.param(*case, marks=[] if case in SHORT else pytest.mark.slow) for case in CASES]
)
def test_a_rank_holds_its_share_and_one_tensor_at_most(name: str, size: int, tmp_path: Path) -> None:
    config = config_named(name, **LARGE)
    write(tmp_path / "hf", config)
    _, results, _ = fork_ranks(1, _peak, tmp_path / "hf", config, size, init=False)
    grown, share, largest = results[0]
    print(f"grown by {grown / 1e6:.1f} MB; share {share / 1e6:.1f} MB, largest tensor {largest / 1e6:.1f} MB")
    assert 0.9 * share < grown < 1.05 * (share + largest), "its part of the weights, and one tensor"


def _peak(rank: int, place: Path, config: Config, size: int) -> tuple[int, int, int]:
    """Return how far this process grew while the last of so many ranks was built and loaded, and what it holds."""
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, _anonymous_bytes())

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the parent has freed is no room for this
    before = _anonymous_bytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    records = records_of(config, size - 1, size)
    with ExitStack() as stack:
        open_pretrained(place, stack).load(records)
    done.set()
    watcher.join()
    share = sum(record.tensor.numel() * 4 for record in records)
    return peak - before, share, max(tensor.numel() * 4 for tensor in expected_weights(config).values())


def _anonymous_bytes() -> int:
    """Return the memory of this process that is no page of a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not say RssAnon")
