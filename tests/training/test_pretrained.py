"""A run that starts from a Hugging Face folder, or with a larger vocabulary, is the same run in every layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pretrain_gpt2
from examples.llama import pretrain_llama
from megatron.checkpoint.huggingface import folder
from megatron.checkpoint.huggingface.config import config_to_huggingface
from megatron.checkpoint.huggingface.origin import origin_of
from megatron.checkpoint.huggingface.tokenizer import JSON, tokenizer_difference
from megatron.checkpoint.huggingface.weights import expected_weights, weights_to_huggingface
from megatron.checkpoint.one_process import open_folder, read_weights
from tests.helpers.runs import TOKENIZER, make_flags, parse_script_config, train_ranks, write_corpus

SHORT_RUN_FLAGS = "--train-iters 3 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0"
LAYOUT_FLAGS = {1: "", 2: "--model-parallel-size 2", 4: "--model-parallel-size 2 --pipe-parallel-size 2"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def write_model(model_dir: Path, argv: list[str], vocab_size: int, script: ModuleType = pretrain_gpt2) -> None:
    """Write a Hugging Face folder with random weights of the model that ``argv`` names."""
    config = parse_script_config(script, argv, 1).with_vocab(vocab_size)
    rng = torch.Generator().manual_seed(5)
    weights = {name: 0.3 * torch.randn(p.shape, generator=rng) for name, p in expected_weights(config).items()}
    model_dir.mkdir()
    folder.write_json(model_dir / folder.CONFIG, config_to_huggingface(config, "float32"))
    folder.write_tensors(model_dir, weights_to_huggingface(weights, config), 50_000)


def read_losses(run_dir: Path) -> list[float]:
    return [
        json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines() if '"loss"' in line
    ]


def read_vocab_size(corpus: Path) -> int:
    return int(json.loads(corpus.with_suffix(".meta.json").read_text())["vocab_size"])


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_hugging_face_folder_starts_equal_run_in_all_layouts(num_ranks: int, corpus: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", make_flags(corpus, tmp_path / "none", SHORT_RUN_FLAGS), read_vocab_size(corpus))
    for world_size in (1, num_ranks):
        extra_flags = f"{SHORT_RUN_FLAGS} {LAYOUT_FLAGS[world_size]} --load {tmp_path / 'hf'} --finetune"
        codes, _ = train_ranks(world_size, make_flags(corpus, tmp_path / str(world_size), extra_flags))
        assert codes == [0] * world_size
    reference_losses, parallel_losses = read_losses(tmp_path / "1"), read_losses(tmp_path / str(num_ranks))
    assert len(reference_losses) == 3 and reference_losses == pytest.approx(parallel_losses, rel=1e-5)
    for world_size in (1, num_ranks):
        origin = origin_of(open_folder(tmp_path / str(world_size)).metadata)
        assert origin is not None and origin.files == {folder.CONFIG: (tmp_path / "hf" / folder.CONFIG).read_text()}
    scratch_run = tmp_path / "scratch"
    assert train_ranks(1, make_flags(corpus, scratch_run, SHORT_RUN_FLAGS))[0] == [0]
    assert abs(read_losses(scratch_run)[0] - reference_losses[0]) > 0.1, "the folder's weights must count"


def test_weights_folder_cannot_be_resumed(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "hf", make_flags(corpus, tmp_path / "none", SHORT_RUN_FLAGS), read_vocab_size(corpus))
    with pytest.raises(AssertionError, match="contains only weights.* Add --finetune"):
        train_ranks(1, make_flags(corpus, tmp_path / "run", f"{SHORT_RUN_FLAGS} --load {tmp_path / 'hf'}"))


def test_resized_vocabulary_loads_saved_rows_and_fills_mean(corpus: Path, tmp_path: Path) -> None:
    vocab_size = read_vocab_size(corpus)
    assert train_ranks(1, make_flags(corpus, tmp_path / "first", SHORT_RUN_FLAGS))[0] == [0]
    load_flags = f"--train-iters 0 --eval-iters 0 --load {tmp_path / 'first'} --finetune --vocab-size {vocab_size + 7}"
    with pytest.raises(AssertionError, match=re.escape(f"vocab_size: saved {vocab_size}, now {vocab_size + 7}")):
        train_ranks(1, make_flags(corpus, tmp_path / "refused", load_flags))
    argv = make_flags(
        corpus,
        tmp_path / "second",
        f"{SHORT_RUN_FLAGS} {load_flags} --resize-vocab --train-iters 1 --lr 1e-30 --min-lr 0",
    )
    assert train_ranks(2, [*argv, "--model-parallel-size", "2"])[0] == [0, 0]
    before, after = (read_weights(open_folder(tmp_path / name)) for name in ("first", "second"))
    old_table, new_table = before["embedding.word.weight"], after["embedding.word.weight"]
    assert torch.equal(new_table[:vocab_size], old_table) and new_table.shape[0] == vocab_size + 7
    torch.testing.assert_close(new_table[vocab_size:], old_table.double().mean(0).float().expand(7, -1))


def test_bf16_weights_load_from_hugging_face_folder(corpus: Path, tmp_path: Path) -> None:
    """The model computes with its own copy, not with the masters: a loss of the folder's weights, not of the seed's."""
    write_model(tmp_path / "hf", make_flags(corpus, tmp_path / "none", SHORT_RUN_FLAGS), read_vocab_size(corpus))
    losses_by_dtype = {}
    for dtype in ("fp32", "bf16"):
        extra_flags = f"{SHORT_RUN_FLAGS} --train-iters 1 --{dtype} --load {tmp_path / 'hf'} --finetune"
        assert train_ranks(1, make_flags(corpus, tmp_path / dtype, extra_flags))[0] == [0]
        losses_by_dtype[dtype] = read_losses(tmp_path / dtype)[0]
    assert losses_by_dtype["bf16"] == pytest.approx(losses_by_dtype["fp32"], rel=5e-3)


QWEN3_FLAGS = (
    "--qk-norm head --num-query-groups 2 --kv-channels 6 --position-embedding-type rope --normalization RMSNorm "
)
QWEN3_FLAGS += "--activation gated-silu --untie-embeddings-and-output-weights"


@pytest.mark.slow
def test_qwen3_folder_starts_equal_run_in_gpt2_and_llama_scripts(corpus: Path, tmp_path: Path) -> None:
    model_flags = f"{SHORT_RUN_FLAGS} {QWEN3_FLAGS}"
    write_model(
        tmp_path / "hf",
        make_flags(corpus, tmp_path / "none", model_flags, pretrain_llama),
        read_vocab_size(corpus),
        pretrain_llama,
    )
    assert json.loads((tmp_path / "hf" / folder.CONFIG).read_text())["model_type"] == "qwen3"
    losses_by_script = []
    for script, num_ranks in ((pretrain_llama, 2), (pretrain_gpt2, 1)):
        run_flags = f"{model_flags} {LAYOUT_FLAGS[num_ranks]} --load {tmp_path / 'hf'} --finetune"
        argv = make_flags(corpus, tmp_path / script.__name__, run_flags, pretrain_llama)  # no biases
        assert train_ranks(num_ranks, argv, script=script)[0] == [0] * num_ranks
        losses_by_script.append(read_losses(tmp_path / script.__name__))
    assert len(losses_by_script[0]) == 3 and losses_by_script[0] == pytest.approx(losses_by_script[1], rel=1e-5)


ROTARY_SCALING_FLAGS = "--rotary-scaling linear --rotary-scaling-factor 4"


@pytest.mark.parametrize("source", [pytest.param("a checkpoint", marks=pytest.mark.slow), "a folder"])
def test_finetune_may_change_settings_that_resume_rejects(
    source: str, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(name: str, extra_flags: str) -> str:
        argv = make_flags(corpus, tmp_path / name, f"{SHORT_RUN_FLAGS} --train-iters 0 {extra_flags}", pretrain_llama)
        assert train_ranks(1, argv, script=pretrain_llama)[0] == [0]
        return capfd.readouterr().err

    if source == "a folder":
        write_model(
            tmp_path / "old",
            make_flags(corpus, tmp_path / "none", SHORT_RUN_FLAGS, pretrain_llama),
            read_vocab_size(corpus),
            pretrain_llama,
        )
    else:
        train("old", "")
        with pytest.raises(AssertionError, match="rotary_scaling: saved none, now linear"):
            train("plain", f"--load {tmp_path / 'old'} {ROTARY_SCALING_FLAGS}")
    message = train("new", f"--load {tmp_path / 'old'} --finetune {ROTARY_SCALING_FLAGS} --layernorm-epsilon 1e-3")
    assert "produce other outputs" in message
    for change in (
        "rotary_scaling: saved none, now linear",
        "rotary_scaling_factor: saved 8.0, now 4.0",
        "layernorm_epsilon: saved 1e-05, now 0.001",
    ):
        assert message.count(change) == 1, message
    assert ("The folder's settings: --num-layers 2" in message) is (source == "a folder")
    assert "produce other outputs" not in train("same", f"--load {tmp_path / 'old'} --finetune")


def test_tokenizer_is_compared_with_hugging_face_folder(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = make_flags(
        corpus, tmp_path / "run", f"{SHORT_RUN_FLAGS} --train-iters 0 --load {tmp_path / 'hf'} --finetune"
    )
    write_model(tmp_path / "hf", make_flags(corpus, tmp_path / "none", SHORT_RUN_FLAGS), read_vocab_size(corpus))
    assert train_ranks(1, argv)[0] == [0]
    assert "cannot compare the tokenizer with that of " in capfd.readouterr().err
    config, tokenizer_path = (
        parse_script_config(pretrain_gpt2, argv, 1).with_vocab(read_vocab_size(corpus)),
        tmp_path / "hf" / JSON,
    )
    tokenizer_text = TOKENIZER.read_text(encoding="utf-8")
    tokenizer_path.write_text(tokenizer_text, encoding="utf-8")
    assert tokenizer_difference(tmp_path / "hf", config) is None
    for change, message in (
        (lambda vocab: {**vocab, "a": vocab["b"], "b": vocab["a"]}, "2 of [0-9]+ ids represent other tokens"),
        (lambda vocab: {**vocab, "a new token": max(vocab.values()) + 1}, "it has ([0-9]+) tokens, the folder's"),
    ):
        tokenizer = json.loads(tokenizer_text)
        tokenizer["model"]["vocab"] = change(tokenizer["model"]["vocab"])
        tokenizer_path.write_text(json.dumps(tokenizer), encoding="utf-8")
        assert re.search(message, tokenizer_difference(tmp_path / "hf", config) or "")
    argv = make_flags(
        corpus, tmp_path / "other", f"{SHORT_RUN_FLAGS} --train-iters 0 --load {tmp_path / 'hf'} --finetune"
    )
    assert train_ranks(1, argv)[0] == [0]
    assert "warning: the tokenizer differs from that of" in capfd.readouterr().err
