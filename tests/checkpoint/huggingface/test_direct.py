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
from megatron.checkpoint.huggingface.weights import (
    expected_weights,
    is_huggingface_folder,
    open_pretrained,
    weights_to_huggingface,
)
from megatron.checkpoint.resized_vocab import fill_resized
from megatron.config import CheckpointConfig, Config
from megatron.errors import CheckpointError
from megatron.mpu.groups import Group
from megatron.mpu.shard import Shard, shard_of
from tests.helpers.harness import fork_ranks
from tests.helpers.huggingface_models import build_small_model, make_family_config, random_values

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


RESIZED_WEIGHTS = [f"weights/{name}" for name in ("embedding.word.weight", "head.weight", "head.bias")]


def make_config(name: str, **values) -> Config:
    return make_family_config(name.split()[0], **{**MODELS[name], "num_attention_heads": 4, **values})


def write_folder(path: Path, config: Config) -> dict[str, torch.Tensor]:
    """Write a folder with the model of ``config``, in several files; return its weights under our names."""
    weights = {name: random_values(name, tuple(tensor.shape)) for name, tensor in expected_weights(config).items()}
    path.mkdir(parents=True)
    folder.write_json(path / folder.CONFIG, config_to_huggingface(config, "float32"))
    hf_weights = weights_to_huggingface(weights, config)
    folder.write_tensors(path, hf_weights, max_shard_bytes=sum(map(folder._num_bytes, hf_weights.values())) // 3)
    return weights


def make_records(config: Config, rank: int = 0, size: int = 1) -> list[TensorRecord]:
    module = build_small_model(config, Group(tuple(range(size)), rank, None))
    return [
        TensorRecord(f"weights/{name}", parameter.detach(), shard_of(parameter))
        for name, parameter in named_parameters(module)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_every_rank_loads_its_shard_of_every_weight(name: str, tmp_path: Path) -> None:
    config = make_config(name)
    weights = write_folder(tmp_path / "hf", config)
    for size in (1, 2, 4):
        for rank in range(size):
            records = make_records(config, rank, size)
            for record in records:
                record.tensor.fill_(7.0)  # whoever leaves a number out is seen
            with ExitStack() as stack:
                checkpoint = open_pretrained(tmp_path / "hf", stack)
                checkpoint.check_fits(config)
                checkpoint.load(records)
            assert {r.name for r in records} == {f"weights/{name}" for name in weights}
            for record in records:
                local_tensor = record.shard.unpadded(record.tensor)
                full_weight = weights[record.name.removeprefix("weights/")]
                assert torch.equal(local_tensor, record.shard.narrow(full_weight)), (record.name, size, rank)


def test_shards_within_attention_head_are_loaded(tmp_path: Path) -> None:
    """As ZeRO's are: a part may begin anywhere."""
    config = make_config("t5 gated and untied")
    weights = write_folder(tmp_path / "hf", config)
    with ExitStack() as stack:
        checkpoint = open_pretrained(tmp_path / "hf", stack)
        for name in ("encoder.layers.0.attention.query_key_value.weight", "decoder.layers.1.mlp.up.weight"):
            full_weight = weights[name]
            for start, length in ((0, 1), (3, 8), (5, full_weight.shape[0] - 5)):
                shard = Shard(tuple(full_weight.shape), 0, start, length)
                assert torch.equal(checkpoint.read(name, shard), shard.narrow(full_weight))


@pytest.mark.parametrize("name", ["gpt2 without biases and untied", "bert"])
@pytest.mark.parametrize(("saved_vocab_size", "vocab_size"), [(29, 40), (29, 23)])
def test_resized_vocab_keeps_shared_rows_and_fills_new_rows_with_mean(
    saved_vocab_size: int, vocab_size: int, name: str, tmp_path: Path
) -> None:
    saved_config = make_config(name, vocab_size=saved_vocab_size)
    weights = write_folder(tmp_path / "hf", saved_config)
    config = replace(saved_config, model=replace(saved_config.model, vocab_size=vocab_size))
    for size in (1, 4):
        for rank in range(size):
            records = make_records(config, rank, size)
            with ExitStack() as stack:
                checkpoint = open_pretrained(tmp_path / "hf", stack)
                with pytest.raises(CheckpointError, match=r"vocab_size: saved 29[\s\S]*, or --resize-vocab"):
                    checkpoint.check_fits(config)
                checkpoint.check_fits(replace(config, checkpoint=CheckpointConfig(resize_vocab=True)))
                checkpoint.load(records)
            for record in records:
                full_weight = weights[record.name.removeprefix("weights/")]
                if record.name in RESIZED_WEIGHTS:
                    mean = (
                        full_weight.double()
                        .mean(0)
                        .float()
                        .expand(max(vocab_size - saved_vocab_size, 0), *full_weight.shape[1:])
                    )
                    full_weight = torch.cat([full_weight[:vocab_size], mean])
                torch.testing.assert_close(record.shard.unpadded(record.tensor), record.shard.narrow(full_weight))
                if record.shard.partition_dim == 0:
                    assert not record.tensor[record.shard.length :].any()  # padding stays zero


def test_resized_table_is_filled_in_row_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.checkpoint.resized_vocab._BLOCK_ROWS", 3)
    table = torch.arange(20.0).view(10, 2)
    target = torch.zeros(7, 2)
    fill_resized(target, Shard((14, 2), 0, 7, 7), (10, 2), lambda shard: shard.narrow(table))
    assert target.tolist() == [[14, 15], [16, 17], [18, 19], *[[9, 10]] * 4]


def test_mismatched_config_error_names_matching_flags(tmp_path: Path) -> None:
    config = make_config("gpt2")
    write_folder(tmp_path / "hf", config)
    wide_config = make_config("gpt2", ff_hidden_size=48)
    with ExitStack() as stack:
        checkpoint = open_pretrained(tmp_path / "hf", stack)
        with pytest.raises(CheckpointError, match=r"ff_hidden_size: saved 64, now 48[\s\S]*--ff-hidden-size 64"):
            checkpoint.check_fits(wide_config)
    next(iter((tmp_path / "hf").glob("model-00002-of-*.safetensors"))).unlink()
    with ExitStack() as stack, pytest.raises(CheckpointError, match=r"must contain model-00002-of"):
        open_pretrained(tmp_path / "hf", stack)
    assert not is_huggingface_folder(tmp_path)


LARGE_MODEL = {"hidden_size": 512, "num_attention_heads": 8, "num_layers": 4, "vocab_size": 12_000}


QUICK_CASES = [("gpt2", 2), ("llama", 1)]
CASES = [(name, size) for name in MODELS if " " not in name for size in (1, 2)]


@pytest.mark.parametrize(
    ("name", "size"), [pytest.param(*case, marks=[] if case in QUICK_CASES else pytest.mark.slow) for case in CASES]
)
def test_peak_load_memory_is_shard_plus_one_tensor(name: str, size: int, tmp_path: Path) -> None:
    config = make_config(name, **LARGE_MODEL)
    write_folder(tmp_path / "hf", config)
    _, results, _ = fork_ranks(1, _measure_load_memory, tmp_path / "hf", config, size, init=False)
    memory_growth, shard_bytes, largest_tensor_bytes = results[0]
    print(
        f"grown by {memory_growth / 1e6:.1f} MB; share {shard_bytes / 1e6:.1f} MB, largest tensor "
        f"{largest_tensor_bytes / 1e6:.1f} MB"
    )
    assert 0.9 * shard_bytes < memory_growth < 1.05 * (shard_bytes + largest_tensor_bytes), (
        "its part of the weights, and one tensor"
    )


def _measure_load_memory(rank: int, path: Path, config: Config, size: int) -> tuple[int, int, int]:
    """Return how far this process grew while the last of so many ranks was built and loaded, and what it holds."""
    peak_bytes, is_done = 0, threading.Event()

    def poll_memory() -> None:
        nonlocal peak_bytes
        while not is_done.wait(0.0005):
            peak_bytes = max(peak_bytes, _anonymous_bytes())

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the parent has freed is no room for this
    bytes_before = _anonymous_bytes()
    poller = threading.Thread(target=poll_memory)
    poller.start()
    records = make_records(config, size - 1, size)
    with ExitStack() as stack:
        open_pretrained(path, stack).load(records)
    is_done.set()
    poller.join()
    shard_bytes = sum(record.tensor.numel() * 4 for record in records)
    return (
        peak_bytes - bytes_before,
        shard_bytes,
        max(tensor.numel() * 4 for tensor in expected_weights(config).values()),
    )


def _anonymous_bytes() -> int:
    """Return the memory of this process that is no page of a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not say RssAnon")
