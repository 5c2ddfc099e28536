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
from tests.helpers.runs import TOKENIZER, flags, parse_as, train_ranks, write_corpus

FEW = "--train-iters 3 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0"
LAYOUTS = {1: "", 2: "--model-parallel-size 2", 4: "--model-parallel-size 2 --pipe-parallel-size 2"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def write_model(place: Path, argv: list[str], vocab_size: int, script: ModuleType = pretrain_gpt2) -> None:
    """Write a Hugging Face folder with random weights of the model that ``argv`` names."""
    config = parse_as(script, argv, 1).with_vocab(vocab_size)
    rng = torch.Generator().manual_seed(5)
    weights = {name: 0.3 * torch.randn(p.shape, generator=rng) for name, p in expected_weights(config).items()}
    place.mkdir()
    folder.write_json(place / folder.CONFIG, config_to_huggingface(config, "float32"))
    folder.write_tensors(place, weights_to_huggingface(weights, config), 50_000)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]


def vocab_of(corpus: Path) -> int:
    return int(json.loads(corpus.with_suffix(".meta.json").read_text())["vocab_size"])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_hugging_face_folder_starts_the_same_run_in_every_layout(ranks: int, corpus: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", flags(corpus, tmp_path / "none", FEW), vocab_of(corpus))
    for count in (1, ranks):
        more = f"{FEW} {LAYOUTS[count]} --load {tmp_path / 'hf'} --finetune"
        codes, _ = train_ranks(count, flags(corpus, tmp_path / str(count), more))
        assert codes == [0] * count
    one, other = losses(tmp_path / "1"), losses(tmp_path / str(ranks))
    assert len(one) == 3 and one == pytest.approx(other, rel=1e-5)
    for count in (1, ranks):
        origin = origin_of(open_folder(tmp_path / str(count)).metadata)
        assert origin is not None and origin.files == {folder.CONFIG: (tmp_path / "hf" / folder.CONFIG).read_text()}
    scratch = tmp_path / "scratch"
    assert train_ranks(1, flags(corpus, scratch, FEW))[0] == [0]
    assert abs(losses(scratch)[0] - one[0]) > 0.1, "the folder's weights must count"


def test_a_folder_of_weights_is_no_run_to_go_on_with(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "hf", flags(corpus, tmp_path / "none", FEW), vocab_of(corpus))
    with pytest.raises(AssertionError, match="contains only weights.* Add --finetune"):
        train_ranks(1, flags(corpus, tmp_path / "run", f"{FEW} --load {tmp_path / 'hf'}"))


def test_a_larger_vocabulary_takes_the_tables_of_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    size = vocab_of(corpus)
    assert train_ranks(1, flags(corpus, tmp_path / "first", FEW))[0] == [0]
    more = f"--train-iters 0 --eval-iters 0 --load {tmp_path / 'first'} --finetune --vocab-size {size + 7}"
    with pytest.raises(AssertionError, match=re.escape(f"vocab_size: saved {size}, now {size + 7}")):
        train_ranks(1, flags(corpus, tmp_path / "refused", more))
    argv = flags(corpus, tmp_path / "second", f"{FEW} {more} --resize-vocab --train-iters 1 --lr 1e-30 --min-lr 0")
    assert train_ranks(2, [*argv, "--model-parallel-size", "2"])[0] == [0, 0]
    before, after = (read_weights(open_folder(tmp_path / name)) for name in ("first", "second"))
    table, grown = before["embedding.word.weight"], after["embedding.word.weight"]
    assert torch.equal(grown[:size], table) and grown.shape[0] == size + 7
    torch.testing.assert_close(grown[size:], table.double().mean(0).float().expand(7, -1))


def test_weights_of_16_bits_are_those_of_the_folder(corpus: Path, tmp_path: Path) -> None:
    """The model computes with its own copy, not with the masters: a loss of the folder's weights, not of the seed's."""
    write_model(tmp_path / "hf", flags(corpus, tmp_path / "none", FEW), vocab_of(corpus))
    found = {}
    for dtype in ("fp32", "bf16"):
        more = f"{FEW} --train-iters 1 --{dtype} --load {tmp_path / 'hf'} --finetune"
        assert train_ranks(1, flags(corpus, tmp_path / dtype, more))[0] == [0]
        found[dtype] = losses(tmp_path / dtype)[0]
    assert found["bf16"] == pytest.approx(found["fp32"], rel=5e-3)


QWEN3 = "--qk-norm head --num-query-groups 2 --kv-channels 6 --position-embedding-type rope --normalization RMSNorm "
QWEN3 += "--activation gated-silu --untie-embeddings-and-output-weights"


@pytest.mark.slow
def test_a_folder_of_a_qwen_3_starts_the_same_run_in_the_program_of_either_family(corpus: Path, tmp_path: Path) -> None:
    more = f"{FEW} {QWEN3}"
    write_model(
        tmp_path / "hf", flags(corpus, tmp_path / "none", more, pretrain_llama), vocab_of(corpus), pretrain_llama
    )
    assert json.loads((tmp_path / "hf" / folder.CONFIG).read_text())["model_type"] == "qwen3"
    found = []
    for script, ranks in ((pretrain_llama, 2), (pretrain_gpt2, 1)):
        words = f"{more} {LAYOUTS[ranks]} --load {tmp_path / 'hf'} --finetune"
        argv = flags(corpus, tmp_path / script.__name__, words, pretrain_llama)  # no biases
        assert train_ranks(ranks, argv, script=script)[0] == [0] * ranks
        found.append(losses(tmp_path / script.__name__))
    assert len(found[0]) == 3 and found[0] == pytest.approx(found[1], rel=1e-5)


REACH = "--rotary-scaling linear --rotary-scaling-factor 4"


@pytest.mark.parametrize("source", [pytest.param("a checkpoint", marks=pytest.mark.slow), "a folder"])
def test_a_fresh_start_may_reach_further_than_an_earlier_training(
    source: str, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(name: str, more: str) -> str:
        argv = flags(corpus, tmp_path / name, f"{FEW} --train-iters 0 {more}", pretrain_llama)
        assert train_ranks(1, argv, script=pretrain_llama)[0] == [0]
        return capfd.readouterr().err

    if source == "a folder":
        write_model(
            tmp_path / "old", flags(corpus, tmp_path / "none", FEW, pretrain_llama), vocab_of(corpus), pretrain_llama
        )
    else:
        train("old", "")
        with pytest.raises(AssertionError, match="rotary_scaling: saved none, now linear"):
            train("plain", f"--load {tmp_path / 'old'} {REACH}")
    message = train("new", f"--load {tmp_path / 'old'} --finetune {REACH} --layernorm-epsilon 1e-3")
    assert "produce other outputs" in message
    for change in (
        "rotary_scaling: saved none, now linear",
        "rotary_scaling_factor: saved 8.0, now 4.0",
        "layernorm_epsilon: saved 1e-05, now 0.001",
    ):
        assert message.count(change) == 1, message
    assert ("The folder's settings: --num-layers 2" in message) is (source == "a folder")
    assert "produce other outputs" not in train("same", f"--load {tmp_path / 'old'} --finetune")


def test_the_tokenizer_is_compared_with_that_of_the_folder(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = flags(corpus, tmp_path / "run", f"{FEW} --train-iters 0 --load {tmp_path / 'hf'} --finetune")
    write_model(tmp_path / "hf", flags(corpus, tmp_path / "none", FEW), vocab_of(corpus))
    assert train_ranks(1, argv)[0] == [0]
    assert "is not checked: " in capfd.readouterr().err
    config, place = parse_as(pretrain_gpt2, argv, 1).with_vocab(vocab_of(corpus)), tmp_path / "hf" / JSON
    own = TOKENIZER.read_text(encoding="utf-8")
    place.write_text(own, encoding="utf-8")
    assert tokenizer_difference(tmp_path / "hf", config) is None
    for change, message in (
        (lambda vocab: {**vocab, "a": vocab["b"], "b": vocab["a"]}, "2 of [0-9]+ ids represent other tokens"),
        (lambda vocab: {**vocab, "a new token": max(vocab.values()) + 1}, "it has ([0-9]+) tokens, the folder's"),
    ):
        library = json.loads(own)
        library["model"]["vocab"] = change(library["model"]["vocab"])
        place.write_text(json.dumps(library), encoding="utf-8")
        assert re.search(message, tokenizer_difference(tmp_path / "hf", config) or "")
    argv = flags(corpus, tmp_path / "other", f"{FEW} --train-iters 0 --load {tmp_path / 'hf'} --finetune")
    assert train_ranks(1, argv)[0] == [0]
    assert "warning: the tokenizer differs from that of" in capfd.readouterr().err
