"""Runs with --exclude: equal to runs in which the same tokens are masked by hand, in every layout, and resumed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatron.data
from megatron import tokenizer
from megatron.checkpoint.one_process import open_folder
from megatron.data import IndexedDatasetBuilder, gpt2_fields
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.document_losses import read_step
from tests.helpers.chats import CHATML, make_messages, write_conversations, write_tokenizer
from tests.helpers.runs import TOKENIZER, make_flags, train_ranks

FIRST_EXCLUDED_TOKEN = 900
"""Only excluded documents have tokens from here on."""
EXCLUDED = "1\n4-5\n20\n33\n"
FLAGS = "--train-iters 3 --fp64 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --split 1,0,0"
PACKINGS = {"concat": "", "best-fit": "--packing best-fit"}
LAYOUTS = {
    "data 2": (2, "--gas 1"),
    "tensor 2, sequence": (2, "--model-parallel-size 2 --sequence-parallel"),
    "context 2": (2, "--context-parallel-size 2"),
    "context 2, all-to-all": (2, "--context-parallel-size 2 --cp-comm-type a2a"),
    "pipe 2, chunks 2": (2, "--pipe-parallel-size 2 --pipeline-chunks 2 --num-layers 4"),
    "pipe 2 x tensor 2": (4, "--pipe-parallel-size 2 --model-parallel-size 2"),
    "data 2, ZeRO 3": (2, "--gas 1 --zero-stage 3"),
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 40 documents of random tokens; the excluded ones have tokens from 900 on."""
    folder, vocab = tmp_path_factory.mktemp("documents"), tokenizer.build(tokenizer_path=TOKENIZER)
    excluded, generator = {1, 4, 5, 20, 33}, np.random.default_rng(1)
    with IndexedDatasetBuilder(folder / "texts", vocab_size=vocab.vocab_size, tokenizer=vocab.identity) as writer:
        for document in range(40):
            low, high = (FIRST_EXCLUDED_TOKEN, 1000) if document in excluded else (300, FIRST_EXCLUDED_TOKEN)
            writer.add(generator.integers(low, high, 10 + document % 9))
    (folder / "ids.txt").write_text(EXCLUDED)
    return folder


def mask_by_hand() -> Callable[[int], None]:
    """Return an injector that masks the tokens from 900 on, and separates them from the other tokens."""

    def masked_fields(text: torch.Tensor, *, segments: torch.Tensor | None = None, **flags: Any) -> dict[str, Any]:
        fields = gpt2_fields(text, segments=segments, **flags)
        is_excluded = text >= FIRST_EXCLUDED_TOKEN
        assert fields["loss_mask"] is not None
        fields["loss_mask"] = fields["loss_mask"] * (~is_excluded[:, :-1] & ~is_excluded[:, 1:])
        if segments is None:
            changes = (is_excluded[:, 1:-1] != is_excluded[:, :-2]).int().cumsum(1)
            fields["segment_ids"] = torch.nn.functional.pad(changes, (1, 0)).int()
        return fields

    return lambda rank: setattr(megatron.data, "gpt2_fields", masked_fields)


def read_steps(folder: Path) -> list[tuple[float, float]]:
    records = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]
    return [(record["loss"], record["grad_norm"]) for record in records]


def train(
    documents: Path, folder: Path, extra: str, num_ranks: int = 1, inject: Callable[[int], None] | None = None
) -> list[tuple[float, float]]:
    argv = make_flags(documents / "texts", folder, f"{FLAGS} {extra}")
    assert train_ranks(num_ranks, argv, inject)[0] == [0] * num_ranks
    return read_steps(folder)


@pytest.mark.parametrize("packing", ["concat", pytest.param("best-fit", marks=pytest.mark.slow)])
def test_excluded_run_equals_run_masked_by_hand(packing: str, documents: Path, tmp_path: Path) -> None:
    flags = PACKINGS[packing]
    excluded = train(documents, tmp_path / "excluded", f"{flags} --exclude {documents / 'ids.txt'}")
    by_hand = train(documents, tmp_path / "hand", flags, inject=mask_by_hand())
    plain = train(documents, tmp_path / "plain", flags)
    assert np.allclose(excluded, by_hand, rtol=1e-11, atol=0)
    assert not np.allclose(excluded, plain, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["concat", "best-fit"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_one_process(layout: str, packing: str, documents: Path, tmp_path: Path) -> None:
    num_ranks, layout_flags = LAYOUTS[layout]
    flags = f"{PACKINGS[packing]} --exclude {documents / 'ids.txt'}"
    model_flags = "--num-layers 4" if "chunks" in layout else ""
    expected = train(documents, tmp_path / "one", f"{flags} {model_flags}")
    assert np.allclose(train(documents, tmp_path / "many", f"{flags} {layout_flags}", num_ranks), expected, rtol=1e-9)


def test_resumed_run_adds_list_and_requires_it_later(documents: Path, tmp_path: Path) -> None:
    run, flags = tmp_path / "run", f"{FLAGS} --load {tmp_path / 'run'}"
    argv = make_flags(documents / "texts", run, f"{FLAGS} --exit-interval 1")
    assert train_ranks(1, argv)[0] == [75]
    with_list = f"{flags} --exclude {documents / 'ids.txt'}"
    assert train_ranks(1, make_flags(documents / "texts", run, f"{with_list} --exit-interval 2"))[0] == [75]
    assert open_folder(run).metadata["excluded_documents"]
    with pytest.raises(AssertionError, match=r"excluded documents \(--exclude"):
        train_ranks(1, make_flags(documents / "texts", run, flags))
    assert train_ranks(1, make_flags(documents / "texts", run, with_list))[0] == [0]
    plain = train(documents, tmp_path / "plain", "")
    resumed = read_steps(run)
    assert resumed[0] == plain[0] and resumed[1] != plain[1] and len(resumed) == 3


# Conversations.

SFT_EXCLUDED = (2, 3, 11, 17)
SFT_FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 96 --batch-size 1 --gas 4 --lr 3e-3 "
    f"--log-interval 1 --eval-iters 0 --device cpu --progress plain {FLAGS} --log-document-losses"
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two files of conversations with the same lengths in tokens; only the excluded conversations differ."""
    folder = write_tokenizer(tmp_path_factory.mktemp("chats"), CHATML)
    for name, word in (("a", "answer"), ("b", "anther")):
        write_conversations(
            folder / f"{name}.jsonl",
            [
                make_messages(f"question {n:02d}", f"the {word if n in SFT_EXCLUDED else 'answer'} {n:02d}")
                for n in range(24)
            ],
        )
    (folder / "ids.txt").write_text("2-3\n11\n17\n")
    return folder


def train_on_chats(
    chats: Path, name: str, folder: Path, extra: str = "", num_ranks: int = 1, exit_code: int = 0
) -> Any:
    """Return the losses and norms of the steps, and the losses of the conversations in each step."""
    argv = f"{SFT_FLAGS} --sft {chats / name}.jsonl --tokenizer-path {chats} --save {folder} {extra}".split()
    assert train_ranks(num_ranks, argv)[0] == [exit_code] * num_ranks
    return read_steps(folder), [read_step(folder, step) for step in (1, 2, 3)]


def test_excluded_conversations_have_no_loss_and_no_influence(chats: Path, tmp_path: Path) -> None:
    exclude = f"--exclude {chats / 'ids.txt'}"
    plain, plain_losses = train_on_chats(chats, "a", tmp_path / "plain")
    excluded, losses = train_on_chats(chats, "a", tmp_path / "excluded", exclude)
    replaced, replaced_losses = train_on_chats(chats, "b", tmp_path / "replaced", exclude)
    assert excluded != plain
    assert excluded == replaced
    assert [list(by_document.values()) for by_document in losses] == [
        list(by_document.values()) for by_document in replaced_losses
    ]
    is_read = False
    for step, (with_list, without_list) in enumerate(zip(losses, plain_losses, strict=True), 1):
        excluded_keys = {key for key in without_list if key[1] in SFT_EXCLUDED}
        is_read = is_read or bool(excluded_keys)
        assert with_list.keys() == without_list.keys() - excluded_keys  # the order of the others does not change
        if step == 1:  # with the initial weights
            for key, loss in with_list.items():
                assert loss.tokens == without_list[key].tokens and abs(loss.loss - without_list[key].loss) <= 1e-12
    assert is_read


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data 2", "context 2", "pipe 2 x tensor 2"])
def test_excluded_conversations_in_layouts_and_after_resume(layout: str, chats: Path, tmp_path: Path) -> None:
    num_ranks, flags = LAYOUTS[layout]
    flags = flags.replace("--gas 1", "--gas 2")
    exclude = f"--exclude {chats / 'ids.txt'}"
    plain, _ = train_on_chats(chats, "a", tmp_path / "plain")
    expected, _ = train_on_chats(chats, "a", tmp_path / "one", "--exit-interval 1", exit_code=75)
    assert expected == plain[:1]
    shutil.copytree(tmp_path / "one", tmp_path / "many")
    expected, losses = train_on_chats(chats, "a", tmp_path / "one", f"{exclude} --load {tmp_path / 'one'}")
    assert open_folder(tmp_path / "one").metadata["excluded_documents"]
    assert expected[1:] != plain[1:]
    resumed, resumed_losses = train_on_chats(
        chats, "a", tmp_path / "many", f"{flags} {exclude} --load {tmp_path / 'many'}", num_ranks
    )
    assert np.allclose(resumed, expected, rtol=1e-9, atol=0)
    for by_document, expected_by_document in zip(resumed_losses, losses, strict=True):
        assert by_document.keys() == expected_by_document.keys()
