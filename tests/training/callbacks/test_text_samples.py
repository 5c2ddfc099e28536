"""What the model writes at the end of a training: after each prompt, the same in every layout."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

import pretrain_gpt2
import pretrain_t5
from megatron.config import parse
from megatron.errors import ConfigError
from megatron.training.callbacks.text_samples import TextSamples, new_tokens
from megatron.training.trainer import Trainer
from tests.helpers.runs import flags, train_ranks, write_corpus

PROMPTS = {"gpt2": ["The tide", "海"], "t5": ["The <extra_id_0> comes <extra_id_1> a day."]}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def samples(
    script: ModuleType, ranks: int, extra: str, corpus: Path, folder: Path, capture: pytest.CaptureFixture
) -> str:
    """Train in a layout; return what stands on the screen from the first sample on."""
    prompts = PROMPTS[script.__name__.removeprefix("pretrain_")]
    argv = flags(corpus, folder, f"--fp64 --train-iters 3 --hidden-dropout 0 --attention-dropout 0 {extra}", script)
    codes, _ = train_ranks(ranks, [*argv, "--sample-prompts", *prompts], script=script)
    assert codes == [0] * ranks
    out = capture.readouterr().out
    return out[out.index("sample | ") :].partition("Done")[0].rstrip()


@pytest.mark.parametrize(
    ("script", "layouts"),
    [
        (pretrain_gpt2, [(2, "--gas 1 --zero-stage 3")]),
        pytest.param(pretrain_gpt2, [(4, "--model-parallel-size 2 --pipe-parallel-size 2")], marks=pytest.mark.slow),
        pytest.param(pretrain_t5, [(2, "--pipe-parallel-size 2")], marks=pytest.mark.slow),
    ],
    ids=["gpt2", "gpt2-2x2", "t5"],
)
def test_each_prompt_gets_the_same_text_in_every_layout(
    script: ModuleType, layouts: list[tuple[int, str]], corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = samples(script, 1, "", corpus, tmp_path / "alone", capfd)
    lines = alone.split("sample | ")[1:]
    for line, prompt in zip(lines, PROMPTS[script.__name__.removeprefix("pretrain_")], strict=True):
        assert line.startswith(prompt.partition("<")[0]) and len(line) > len(prompt)
        assert "<extra_id" not in line
    for number, (ranks, extra) in enumerate(layouts):
        assert samples(script, ranks, extra, corpus, tmp_path / str(number), capfd) == alone, extra


def test_a_model_that_writes_no_text_takes_no_prompts() -> None:
    with pytest.raises(ConfigError, match="--sample-prompts is not supported: BERT .* writes no text"):
        parse(["--sample-prompts", "The"], world_size=1, env={}, family="bert")


def test_what_cannot_be_is_refused_with_the_way_out() -> None:
    extra = "--sequence-parallel --model-parallel-size 2".split()
    with pytest.raises(ConfigError, match="--sequence-parallel cannot split.*tools/generate.py"):
        parse(["--sample-prompts", "The", *extra], world_size=2, env={})
    config = parse(["--sample-prompts", "The", "--vocab-size", "64"], world_size=1, env={})
    samples = TextSamples(config)
    samples.trainer = cast(Trainer, SimpleNamespace(config=config))
    with pytest.raises(ConfigError, match="--sample-prompts needs a tokenizer, got none"):
        samples.on_train_start()


def test_a_prompt_that_the_model_cannot_take_is_an_error_ahead_of_the_first_step(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = [*flags(corpus, tmp_path / "run", "--train-iters 2"), "--sample-prompts", "The tide " * 40]
    with pytest.raises(AssertionError, match=r"prompt 1 has \d+ tokens; they must fit into the 32 positions"):
        train_ranks(1, argv)
    assert "step 1/2" not in capfd.readouterr().out


def test_a_prompt_of_the_defaults_that_the_model_cannot_take_is_left_out_and_told(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_DEFAULTS", f"--sample-prompts '{'The tide ' * 40}'")
    codes, _ = train_ranks(1, flags(corpus, tmp_path / "run", "--train-iters 2"))
    captured = capfd.readouterr()
    assert codes == [0] and "step 2/2" in captured.out and "sample | " not in captured.out
    assert (captured.out + captured.err).count("no text samples will be generated at the end: prompt 1 has") == 1


def test_a_text_ends_where_a_training_sample_does() -> None:
    assert [new_tokens(length, [[1], [1, 2]]) for length in (2, 3, 32, 1024)] == [None, 1, 30, 128]
