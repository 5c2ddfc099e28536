"""Evaluation through lm_eval itself: what its own model of Hugging Face says of the exported folder, in every layout.

Both sides compute in fp64, their softmax as well. lm_eval imports accelerate, which places models on several GPUs;
where it is missing a stand-in that can do nothing takes its place, since here a model is given that lies on the CPU.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import logging
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.checkpoint.huggingface.config import saved_config
from megatron.checkpoint.huggingface.convert import export
from megatron.checkpoint.huggingface.tokenizer import vocabulary_of
from megatron.checkpoint.one_process import open_folder
from megatron.evaluation.all_ranks import DistributedModel
from megatron.evaluation.options import parse_args
from megatron.evaluation.tasks import LoadedTasks, Suite
from megatron.generate import load
from megatron.generate.text import Prompts
from megatron.tokenizer import build
from megatron.tokenizer.chat import find_template
from tests.helpers.chats import MARKED, write_tokenizer
from tests.helpers.harness import run_ranks
from tests.helpers.modern_decoders import disable_upcasts
from tests.helpers.saved_models import save_model
from tools import evaluate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install -e '.[eval]'"
    ),
]

TASKS = Path(__file__).resolve().parents[2] / "examples" / "evaluation" / "tasks"
LENGTH = 48
"""Positions of the models; the stories of the tasks are longer, in these tokens."""
ROUNDING = 1e-12
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"activation": "gelu-tanh"}),
    "llama": ("llama", {"hidden_bias": True}),
}
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 3), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
PAIRS = [
    ("the lamp stood", " in the window"),
    ("the lamp stood ", "in the window"),
    ("the lamp  \n ", "stood"),
    ("", "of the house"),
    ("", "x"),
    ("灯在窗前。 ", "x = [1]"),
    ("x = [1", "]"),
    ("x = [1", "] of"),
    ("the lamp stood", " in the house of the lamp"),
    ("of the house " * 40, "the lamp"),
    ("of the house " * 40, "灯在窗前，灯在窗前，灯在"),
    ("the lamp stood", " in the window"),
    ("the window", " a"),
    ("the window", " b"),
]
"""Spaces at the end of a context, none at all, a cut within a word, one token, too long, twice the same."""
_LETTERS = "".join(random.Random(0).choices("bjkqvz", k=144))
TEXTS = ["x", "the lamp stood in the window", "灯在窗前。", *(_LETTERS[:n] for n in (47, 48, 49, 95, 96, 97, 144))]
"""Each letter is a token. No text repeats itself: theirs takes two windows of the same tokens for one."""


@functools.cache
def lm_eval_model_class() -> Any:
    """Return lm_eval's model of Hugging Face."""
    import transformers  # noqa: F401  ahead of the stand-in: it looks for accelerate itself

    missing_modules = [] if importlib.util.find_spec("accelerate") else ["accelerate", "accelerate.utils"]
    for name in missing_modules:
        sys.modules[name] = EmptyModule(name)
    try:
        from lm_eval.models.huggingface import HFLM

        return HFLM
    finally:
        for name in missing_modules:
            del sys.modules[name]


class EmptyModule(ModuleType):
    """Has every name, and None behind it."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> None:
        return None


@pytest.fixture(scope="module", autouse=True)
def offline_datasets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import datasets
    import transformers

    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("datasets")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with (
        patch.object(datasets.config, "HF_DATASETS_CACHE", folder),
        patch.object(datasets.config, "HF_HUB_OFFLINE", True),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        monkeypatch.chdir(TASKS.parents[2])  # which the tasks' files are named from
        yield


RunDirOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def run_dir_of(tmp_path_factory: pytest.TempPathFactory) -> RunDirOf:
    """The run folder of a model, with the exported folder in it."""

    @functools.cache
    def make_run(name: str) -> Path:
        run_dir = tmp_path_factory.mktemp(name)
        family, values = MODELS[name]
        save_model(run_dir, family, max_position_embeddings=LENGTH, **values)
        export(open_folder(run_dir), run_dir / "hf")
        return run_dir

    return make_run


def make_reference_model(folder: Path, batch_size: int = 3, **options: Any) -> Any:
    """Return lm_eval's own model of an exported folder, in fp64."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, local_files_only=True)
    model_options = {
        "tokenizer": str(folder),
        "batch_size": batch_size,
        "max_length": LENGTH,
        "softmax_dtype": "float64",
    }
    return lm_eval_model_class()(pretrained=model.eval(), **model_options, **options)


def make_our_model(run_dir: Path, max_tokens: int = 200, *, is_chat: bool = False, **options: Any) -> Any:
    """Return our model of a run, in fp64, on this process."""
    from megatron.evaluation.lm import DecoderLM

    checkpoint = open_folder(run_dir)
    config = saved_config(checkpoint.metadata)
    vocabulary = vocabulary_of(config, None)
    assert vocabulary is not None
    stage = load(checkpoint, config, dtype=torch.float64)
    tokenizer = vocabulary.tokenizer
    model = DistributedModel(stage, Prompts(tokenizer, None), max_length=LENGTH, max_tokens=max_tokens)
    return DecoderLM(model, chat=find_template(tokenizer) if is_chat else None, **options)


def make_requests(request_type: str, *args: tuple[Any, ...]) -> list[Any]:
    """Return lm_eval's requests for these arguments."""
    from lm_eval.api.instance import Instance

    return [Instance(request_type, {}, arguments, idx, metadata=("t", idx, 1)) for idx, arguments in enumerate(args)]  # type: ignore[arg-type]


def assert_scores_equal(scores: list[tuple[float, bool]], expected_scores: list[tuple[float, bool]]) -> None:
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected_scores]
    for (logprob, _), (expected_logprob, _) in zip(scores, expected_scores, strict=True):
        assert abs(logprob - expected_logprob) <= ROUNDING * abs(expected_logprob), (logprob, expected_logprob)


@pytest.mark.parametrize("name", MODELS)
def test_log_likelihoods_equal_reference_model(name: str, run_dir_of: RunDirOf) -> None:
    pairs = make_requests("loglikelihood", *PAIRS)
    with disable_upcasts():
        expected = [
            make_reference_model(run_dir_of(name) / "hf", batch_size).loglikelihood(pairs, disable_tqdm=True)
            for batch_size in (1, 5)
        ]
    assert_scores_equal(*expected)
    for max_tokens in (1, 100, 10_000):
        assert_scores_equal(make_our_model(run_dir_of(name), max_tokens).loglikelihood(pairs), expected[0])
    assert len({round(logprob, 9) for logprob, _ in expected[0]}) >= len(PAIRS) - 2


@pytest.mark.parametrize("name", MODELS)
def test_greedy_continuation_is_greedy_for_both_models(name: str, run_dir_of: RunDirOf) -> None:
    contexts = [context for context, _ in PAIRS if context.strip() and len(context) < 40]
    lm = make_our_model(run_dir_of(name))
    options = {"until": [], "max_gen_toks": 3}
    answers = lm.generate_until(make_requests("generate_until", *((context.rstrip(), options) for context in contexts)))
    pairs = [(context.rstrip(), answer) for context, answer in zip(contexts, answers, strict=True) if answer.strip()]
    with disable_upcasts():
        expected = make_reference_model(run_dir_of(name) / "hf").loglikelihood(
            make_requests("loglikelihood", *pairs), disable_tqdm=True
        )
    assert_scores_equal(lm.loglikelihood(make_requests("loglikelihood", *pairs)), expected)
    assert any(greedy for _, greedy in expected)


@pytest.mark.parametrize("name", MODELS)
def test_rolling_log_likelihoods_equal_reference_model(name: str, run_dir_of: RunDirOf) -> None:
    texts = make_requests("loglikelihood_rolling", *((text,) for text in TEXTS))
    with disable_upcasts():
        expected = make_reference_model(run_dir_of(name) / "hf").loglikelihood_rolling(texts, disable_tqdm=True)
    for max_tokens in (1, 100, 10_000):
        scores = make_our_model(run_dir_of(name), max_tokens).loglikelihood_rolling(texts)
        assert_scores_equal([(value, True) for value in scores], [(value, True) for value in expected])
    assert len(set(expected)) == len(TEXTS)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{"until": ["e", "窗"]}, {"until": "the"}, {"until": []}, {}])
def test_generated_texts_equal_reference_model(name: str, options: dict[str, Any], run_dir_of: RunDirOf) -> None:
    contexts = [context.strip() for context, _ in PAIRS if context.strip()]
    requests = make_requests("generate_until", *((context, {**options, "max_gen_toks": 9}) for context in contexts))
    with disable_upcasts():
        expected = make_reference_model(run_dir_of(name) / "hf").generate_until(requests, disable_tqdm=True)
    for max_tokens in (1, 100):
        assert make_our_model(run_dir_of(name), max_tokens).generate_until(requests) == expected
    assert len(set(expected)) > 4


# Whole tasks, through simple_evaluate: those of examples/evaluation.


def evaluate_reference(lm: Any, **options: Any) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS))
    with disable_upcasts():
        return lm_eval.simple_evaluate(model=lm, tasks=["stories"], task_manager=manager, **options)  # type: ignore[no-any-return]


def responses_by_task(samples: dict[str, list[dict[str, Any]]]) -> dict[str, list[list[Any]]]:
    """Return what was answered to each question of each task, in order."""
    return {
        name: [sample["resps"] for sample in sorted(samples_of_task, key=lambda sample: sample["doc_id"])]
        for name, samples_of_task in samples.items()
    }


def assert_nested_equal(actual: Any, expected: Any) -> None:
    """Compare nested lists: numbers to their rounding, all else exactly."""
    if isinstance(expected, float):
        assert abs(actual - expected) <= ROUNDING * abs(expected), (actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_nested_equal(actual[key], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for actual_item, expected_item in zip(actual, expected, strict=True):
            assert_nested_equal(actual_item, expected_item)
    else:
        assert actual == expected


def float_metrics(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        name: {key: value for key, value in values.items() if isinstance(value, float)}
        for name, values in results.items()
    }


@functools.cache
def single_process_results(run_dir: Path) -> dict[str, Any]:
    return run_tool(0, run_dir, 1, 1)


def run_tool(rank: int, run_dir: Path, tensor: int, pipe: int, max_tokens: int = 500) -> dict[str, Any]:
    """Return what tools/evaluate.py writes, or nothing on ranks beyond 0."""
    arguments: list[Any] = ["--load", run_dir, "--tasks", "stories", "--include-path", TASKS, "--dtype", "fp64"]
    arguments += ["--device", "cpu", "--max-length", LENGTH, "--max-tokens", max_tokens, "--log-samples"]
    arguments += ["--model-parallel-size", tensor, "--pipe-parallel-size", pipe, "--num-fewshot", 1]
    output = run_dir / f"results-{tensor}-{pipe}-{max_tokens}.json"
    output_text = io.StringIO()
    with redirect_stdout(output_text):
        evaluate.run(parse_args("", [str(word) for word in [*arguments, "--output", output]]), {})
    assert bool(output_text.getvalue()) == (rank == 0)
    return json.loads(output.read_text(encoding="utf-8")) if rank == 0 else {}


@pytest.mark.parametrize("name", MODELS)
def test_task_responses_and_metrics_equal_reference_model(name: str, run_dir_of: RunDirOf) -> None:
    expected = evaluate_reference(make_reference_model(run_dir_of(name) / "hf", batch_size=4), num_fewshot=1)
    results = single_process_results(run_dir_of(name))
    assert_nested_equal(
        responses_by_task(results["samples"]),
        responses_by_task(json.loads(json.dumps(expected["samples"], default=str))),
    )
    assert {len(task_samples) for task_samples in results["samples"].values()} == {12, 24}
    for task, metrics in float_metrics(expected["results"]).items():
        for key, value in metrics.items():
            if "bootstrap" not in key and "_stderr" not in key:  # which is drawn
                assert_nested_equal(results["tasks"][task][key.removesuffix(",none")], value)
    assert {"acc", "acc_norm"} <= set(results["tasks"]["stories_zh"]) and "perplexity" in results["tasks"][
        "stories_next"
    ]
    assert "bits_per_byte" in results["tasks"]["stories_text"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_batch_size_equals_single_process(
    name: str, layout: tuple[int, int, int], run_dir_of: RunDirOf
) -> None:
    run_dir, (tensor, pipe, data) = run_dir_of(name), layout
    expected = single_process_results(run_dir)
    max_tokens = 60 if name == "gpt2" else 700
    first, *_ = run_ranks(tensor * pipe * data, run_tool, run_dir, tensor, pipe, max_tokens, deadline_s=110)
    assert_nested_equal(responses_by_task(first["samples"]), responses_by_task(expected["samples"]))
    assert_nested_equal(first["tasks"], expected["tasks"])


def make_chat_run(run_dir: Path) -> Path:
    """Return the run folder of a GPT-2 with a chat template and a token for the beginning of texts, as above."""
    tokenizer = build(tokenizer_path=write_tokenizer(run_dir / "words", MARKED) / "tokenizer.json")
    path = run_dir / "words" / "tokenizer.json"
    save_model(
        run_dir, "gpt2", max_position_embeddings=LENGTH, vocab_size=tokenizer.vocab_size, tokenizer_path=str(path)
    )
    export(open_folder(run_dir), run_dir / "hf")
    return run_dir


def test_chat_responses_equal_reference_model(tmp_path: Path) -> None:
    run_dir = make_chat_run(tmp_path)
    (run_dir / "hf" / "chat_template.jinja").write_text(MARKED)
    chat: dict[str, Any] = {"apply_chat_template": True, "system_instruction": "Be brief.", "num_fewshot": 2}
    for is_multiturn in (True, False):
        options = {**chat, "fewshot_as_multiturn": is_multiturn}
        expected = evaluate_reference(make_reference_model(run_dir / "hf"), **options)
        lm = make_our_model(run_dir, is_chat=True, add_bos_token=False)
        suite = Suite(("stories_en", "stories_zh", "stories_next", "stories_who"), TASKS, **options)
        results = LoadedTasks(suite).evaluate(lm, should_keep_samples=True)
        expected["samples"].pop("stories_text")
        assert_nested_equal(responses_by_task(results.samples), responses_by_task(expected["samples"]))
        contexts = [sample["arguments"][0][0] for sample in results.samples["stories_en"]]
        assert contexts == [sample["arguments"][0][0] for sample in expected["samples"]["stories_en"]]
        assert all(text.count("<|im_start|>user") == (3 if is_multiturn else 1) for text in contexts)


def test_bos_token_scores_equal_reference_model(tmp_path: Path) -> None:
    run_dir = make_chat_run(tmp_path)
    shutil.copy(
        run_dir / "words" / "tokenizer_config.json", run_dir / "hf"
    )  # an exported folder has the end of documents there
    texts = make_requests("loglikelihood_rolling", *((text,) for text in TEXTS))
    with disable_upcasts():
        expected = make_reference_model(run_dir / "hf").loglikelihood_rolling(texts, disable_tqdm=True)
    scores = make_our_model(run_dir, add_bos_token=True).loglikelihood_rolling(texts)
    assert_nested_equal(scores, expected)
    assert make_our_model(run_dir).loglikelihood_rolling(texts) != scores
