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
from megatron.training.callbacks.text_samples import TextSamples, num_new_tokens
from megatron.training.trainer import Trainer
from tests.helpers.runs import make_flags, train_ranks, write_corpus

PROMPTS = {"gpt2": ["The tide", "海"], "t5": ["The <extra_id_0> comes <extra_id_1> a day."]}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def generate_samples(
    script: ModuleType, num_ranks: int, extra: str, corpus: Path, folder: Path, capture: pytest.CaptureFixture
) -> str:
    """Train in a layout; return what stands on the screen from the first sample on."""
    prompts = PROMPTS[script.__name__.removeprefix("pretrain_")]
    argv = make_flags(
        corpus, folder, f"--fp64 --train-iters 3 --hidden-dropout 0 --attention-dropout 0 {extra}", script
    )
    codes, _ = train_ranks(num_ranks, [*argv, "--sample-prompts", *prompts], script=script)
    assert codes == [0] * num_ranks
    output = capture.readouterr().out
    return output[output.index("sample | ") :].partition("Done")[0].rstrip()


@pytest.mark.parametrize(
    ("script", "layouts"),
    [
        (pretrain_gpt2, [(2, "--gas 1 --zero-stage 3")]),
        pytest.param(pretrain_gpt2, [(4, "--model-parallel-size 2 --pipe-parallel-size 2")], marks=pytest.mark.slow),
        pytest.param(pretrain_t5, [(2, "--pipe-parallel-size 2")], marks=pytest.mark.slow),
    ],
    ids=["gpt2", "gpt2-2x2", "t5"],
)
def test_prompts_get_same_text_in_all_layouts(
    script: ModuleType, layouts: list[tuple[int, str]], corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = generate_samples(script, 1, "", corpus, tmp_path / "alone", capfd)
    lines = expected.split("sample | ")[1:]
    for line, prompt in zip(lines, PROMPTS[script.__name__.removeprefix("pretrain_")], strict=True):
        assert line.startswith(prompt.partition("<")[0]) and len(line) > len(prompt)
        assert "<extra_id" not in line
    for layout_idx, (num_ranks, extra) in enumerate(layouts):
        assert generate_samples(script, num_ranks, extra, corpus, tmp_path / str(layout_idx), capfd) == expected, extra


def test_model_without_text_output_rejects_prompts() -> None:
    with pytest.raises(ConfigError, match="--sample-prompts is not supported: BERT .* does not generate text"):
        parse(["--sample-prompts", "The"], world_size=1, env={}, family="bert")


def test_unsupported_sampling_is_rejected_with_advice() -> None:
    extra = "--sequence-parallel --model-parallel-size 2".split()
    with pytest.raises(ConfigError, match="--sequence-parallel cannot split.*tools/generate.py"):
        parse(["--sample-prompts", "The", *extra], world_size=2, env={})
    config = parse(["--sample-prompts", "The", "--vocab-size", "64"], world_size=1, env={})
    callback = TextSamples(config)
    callback.trainer = cast(Trainer, SimpleNamespace(config=config))
    with pytest.raises(ConfigError, match="--sample-prompts needs a tokenizer, got none"):
        callback.on_train_start()


def test_overlong_prompt_raises_before_first_step(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = [*make_flags(corpus, tmp_path / "run", "--train-iters 2"), "--sample-prompts", "The tide " * 40]
    with pytest.raises(AssertionError, match=r"prompt 1 has \d+ tokens\. .* 32 learned positions"):
        train_ranks(1, argv)
    assert "step 1/2" not in capfd.readouterr().out


def test_overlong_default_prompt_is_skipped_with_warning(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_DEFAULTS", f"--sample-prompts '{'The tide ' * 40}'")
    codes, _ = train_ranks(1, make_flags(corpus, tmp_path / "run", "--train-iters 2"))
    captured = capfd.readouterr()
    assert codes == [0] and "step 2/2" in captured.out and "sample | " not in captured.out
    assert (captured.out + captured.err).count("no text samples will be generated at the end: prompt 1 has") == 1


def test_generated_text_fits_training_sample_length() -> None:
    assert [num_new_tokens(length, [[1], [1, 2]]) for length in (2, 3, 32, 1024)] == [None, 1, 30, 128]
