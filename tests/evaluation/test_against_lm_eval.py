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
from megatron.evaluation.all_ranks import ModelOfAllRanks
from megatron.evaluation.options import parse_args
from megatron.evaluation.tasks import LoadedTasks, Suite
from megatron.generate import load
from megatron.generate.text import Prompts
from megatron.tokenizer import build
from megatron.tokenizer.chat import find_template
from tests.helpers.chats import MARKED, write_tokenizer
from tests.helpers.harness import run_ranks
from tests.helpers.modern_decoders import in_its_own_dtype
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
def their_class() -> Any:
    """Return lm_eval's model of Hugging Face."""
    import transformers  # noqa: F401  ahead of the stand-in: it looks for accelerate itself

    lacking = [] if importlib.util.find_spec("accelerate") else ["accelerate", "accelerate.utils"]
    for name in lacking:
        sys.modules[name] = Nothing(name)
    try:
        from lm_eval.models.huggingface import HFLM

        return HFLM
    finally:
        for name in lacking:
            del sys.modules[name]


class Nothing(ModuleType):
    """Has every name, and None behind it."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> None:
        return None


@pytest.fixture(scope="module", autouse=True)
def without_a_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import datasets
    import transformers

    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("datasets")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with (
        patch.object(datasets.config, "HF_DATASETS_CACHE", folder),
        patch.object(datasets.config, "HF_HUB_OFFLINE", True),
        pytest.MonkeyPatch.context() as changed,
    ):
        changed.chdir(TASKS.parents[2])  # which the tasks' files are named from
        yield


Place = Callable[[str], Path]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The run folder of a model, with the exported folder in it."""

    @functools.cache
    def run_of(name: str) -> Path:
        run = tmp_path_factory.mktemp(name)
        family, values = MODELS[name]
        save_model(run, family, max_position_embeddings=LENGTH, **values)
        export(open_folder(run), run / "hf")
        return run

    return run_of


def theirs(folder: Path, batch_size: int = 3, **more: Any) -> Any:
    """Return lm_eval's own model of an exported folder, in fp64."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, local_files_only=True)
    given = {"tokenizer": str(folder), "batch_size": batch_size, "max_length": LENGTH, "softmax_dtype": "float64"}
    return their_class()(pretrained=model.eval(), **given, **more)


def ours(run: Path, max_tokens: int = 200, *, is_chat: bool = False, **more: Any) -> Any:
    """Return our model of a run, in fp64, on this process."""
    from megatron.evaluation.lm import DecoderLM

    checkpoint = open_folder(run)
    config = saved_config(checkpoint.metadata)
    vocabulary = vocabulary_of(config, None)
    assert vocabulary is not None
    part = load(checkpoint, config, dtype=torch.float64)
    tokenizer = vocabulary.tokenizer
    model = ModelOfAllRanks(part, Prompts(tokenizer, None), max_length=LENGTH, max_tokens=max_tokens)
    return DecoderLM(model, chat=find_template(tokenizer) if is_chat else None, **more)


def asked(kind: str, *args: tuple[Any, ...]) -> list[Any]:
    """Return lm_eval's requests for these arguments."""
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number, metadata=("t", number, 1)) for number, each in enumerate(args)]  # type: ignore[arg-type]


def assert_equal(found: list[tuple[float, bool]], wanted: list[tuple[float, bool]]) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    for (ours, _), (theirs, _) in zip(found, wanted, strict=True):
        assert abs(ours - theirs) <= ROUNDING * abs(theirs), (ours, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_log_likelihoods_are_those_of_lm_evals_own_model(name: str, run_of: Place) -> None:
    pairs = asked("loglikelihood", *PAIRS)
    with in_its_own_dtype():
        wanted = [theirs(run_of(name) / "hf", size).loglikelihood(pairs, disable_tqdm=True) for size in (1, 5)]
    assert_equal(*wanted)
    for max_tokens in (1, 100, 10_000):
        assert_equal(ours(run_of(name), max_tokens).loglikelihood(pairs), wanted[0])
    assert len({round(logprob, 9) for logprob, _ in wanted[0]}) >= len(PAIRS) - 2


@pytest.mark.parametrize("name", MODELS)
def test_a_likeliest_text_is_called_so_by_both(name: str, run_of: Place) -> None:
    contexts = [context for context, _ in PAIRS if context.strip() and len(context) < 40]
    lm = ours(run_of(name))
    how = {"until": [], "max_gen_toks": 3}
    answers = lm.generate_until(asked("generate_until", *((context.rstrip(), how) for context in contexts)))
    pairs = [(context.rstrip(), answer) for context, answer in zip(contexts, answers, strict=True) if answer.strip()]
    with in_its_own_dtype():
        wanted = theirs(run_of(name) / "hf").loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    assert_equal(lm.loglikelihood(asked("loglikelihood", *pairs)), wanted)
    assert any(greedy for _, greedy in wanted)


@pytest.mark.parametrize("name", MODELS)
def test_rolling_log_likelihoods_are_those_of_lm_evals_own_model(name: str, run_of: Place) -> None:
    texts = asked("loglikelihood_rolling", *((text,) for text in TEXTS))
    with in_its_own_dtype():
        wanted = theirs(run_of(name) / "hf").loglikelihood_rolling(texts, disable_tqdm=True)
    for max_tokens in (1, 100, 10_000):
        found = ours(run_of(name), max_tokens).loglikelihood_rolling(texts)
        assert_equal([(value, True) for value in found], [(value, True) for value in wanted])
    assert len(set(wanted)) == len(TEXTS)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", [{"until": ["e", "窗"]}, {"until": "the"}, {"until": []}, {}])
def test_written_texts_are_those_of_lm_evals_own_model(name: str, how: dict[str, Any], run_of: Place) -> None:
    contexts = [context.strip() for context, _ in PAIRS if context.strip()]
    requests = asked("generate_until", *((context, {**how, "max_gen_toks": 9}) for context in contexts))
    with in_its_own_dtype():
        wanted = theirs(run_of(name) / "hf").generate_until(requests, disable_tqdm=True)
    for max_tokens in (1, 100):
        assert ours(run_of(name), max_tokens).generate_until(requests) == wanted
    assert len(set(wanted)) > 4


# Whole tasks, through simple_evaluate: those of examples/evaluation.


def their_results(lm: Any, **how: Any) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS))
    with in_its_own_dtype():
        return lm_eval.simple_evaluate(model=lm, tasks=["stories"], task_manager=manager, **how)  # type: ignore[no-any-return]


def answers_of(samples: dict[str, list[dict[str, Any]]]) -> dict[str, list[list[Any]]]:
    """Return what was answered to each question of each task, in order."""
    return {
        name: [one["resps"] for one in sorted(each, key=lambda one: one["doc_id"])] for name, each in samples.items()
    }


def assert_same_answers(found: Any, wanted: Any) -> None:
    """Compare nested lists: numbers to their rounding, all else exactly."""
    if isinstance(wanted, float):
        assert abs(found - wanted) <= ROUNDING * abs(wanted), (found, wanted)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_same_answers(found[key], value)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same_answers(one, other)
    else:
        assert found == wanted


def numbers(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        name: {key: value for key, value in values.items() if isinstance(value, float)}
        for name, values in results.items()
    }


@functools.cache
def of_one_process(run: Path) -> dict[str, Any]:
    return results_of_tool(0, run, 1, 1)


def results_of_tool(rank: int, run: Path, tensor: int, pipe: int, max_tokens: int = 500) -> dict[str, Any]:
    """Return what tools/evaluate.py writes, or nothing on ranks beyond 0."""
    words: list[Any] = ["--load", run, "--tasks", "stories", "--include-path", TASKS, "--dtype", "fp64"]
    words += ["--device", "cpu", "--max-length", LENGTH, "--max-tokens", max_tokens, "--log-samples"]
    words += ["--model-parallel-size", tensor, "--pipe-parallel-size", pipe, "--num-fewshot", 1]
    output = run / f"results-{tensor}-{pipe}-{max_tokens}.json"
    shown = io.StringIO()
    with redirect_stdout(shown):
        evaluate.run(parse_args("", [str(word) for word in [*words, "--output", output]]), {})
    assert bool(shown.getvalue()) == (rank == 0)
    return json.loads(output.read_text(encoding="utf-8")) if rank == 0 else {}


@pytest.mark.parametrize("name", MODELS)
def test_tasks_have_the_answers_and_metrics_of_lm_evals_own_model(name: str, run_of: Place) -> None:
    wanted = their_results(theirs(run_of(name) / "hf", batch_size=4), num_fewshot=1)
    found = of_one_process(run_of(name))
    assert_same_answers(
        answers_of(found["samples"]), answers_of(json.loads(json.dumps(wanted["samples"], default=str)))
    )
    assert {len(each) for each in found["samples"].values()} == {12, 24}
    for task, metrics in numbers(wanted["results"]).items():
        for key, value in metrics.items():
            if "bootstrap" not in key and "_stderr" not in key:  # which is drawn
                assert_same_answers(found["tasks"][task][key.removesuffix(",none")], value)
    assert {"acc", "acc_norm"} <= set(found["tasks"]["stories_zh"]) and "perplexity" in found["tasks"]["stories_next"]
    assert "bits_per_byte" in found["tasks"]["stories_text"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_batch_size_has_the_results_of_one_process(
    name: str, layout: tuple[int, int, int], run_of: Place
) -> None:
    run, (tensor, pipe, data) = run_of(name), layout
    wanted = of_one_process(run)
    max_tokens = 60 if name == "gpt2" else 700
    first, *_ = run_ranks(tensor * pipe * data, results_of_tool, run, tensor, pipe, max_tokens, deadline_s=110)
    assert_same_answers(answers_of(first["samples"]), answers_of(wanted["samples"]))
    assert_same_answers(first["tasks"], wanted["tasks"])


def with_control_tokens(run: Path) -> Path:
    """Return the run folder of a GPT-2 with a chat template and a token for the beginning of texts, as above."""
    tokenizer = build(tokenizer_path=write_tokenizer(run / "words", MARKED) / "tokenizer.json")
    path = run / "words" / "tokenizer.json"
    save_model(run, "gpt2", max_position_embeddings=LENGTH, vocab_size=tokenizer.vocab_size, tokenizer_path=str(path))
    export(open_folder(run), run / "hf")
    return run


def test_conversations_have_the_answers_of_lm_evals_own_model(tmp_path: Path) -> None:
    run = with_control_tokens(tmp_path)
    (run / "hf" / "chat_template.jinja").write_text(MARKED)
    chat: dict[str, Any] = {"apply_chat_template": True, "system_instruction": "Be brief.", "num_fewshot": 2}
    for is_multiturn in (True, False):
        how = {**chat, "fewshot_as_multiturn": is_multiturn}
        wanted = their_results(theirs(run / "hf"), **how)
        lm = ours(run, is_chat=True, add_bos_token=False)
        suite = Suite(("stories_en", "stories_zh", "stories_next", "stories_who"), TASKS, **how)
        found = LoadedTasks(suite).evaluate(lm, keeps_samples=True)
        wanted["samples"].pop("stories_text")
        assert_same_answers(answers_of(found.samples), answers_of(wanted["samples"]))
        contexts = [one["arguments"][0][0] for one in found.samples["stories_en"]]
        assert contexts == [one["arguments"][0][0] for one in wanted["samples"]["stories_en"]]
        assert all(text.count("<|im_start|>user") == (3 if is_multiturn else 1) for text in contexts)


def test_a_beginning_of_texts_is_that_of_lm_evals_own_model(tmp_path: Path) -> None:
    run = with_control_tokens(tmp_path)
    shutil.copy(
        run / "words" / "tokenizer_config.json", run / "hf"
    )  # an exported folder has the end of documents there
    texts = asked("loglikelihood_rolling", *((text,) for text in TEXTS))
    with in_its_own_dtype():
        wanted = theirs(run / "hf").loglikelihood_rolling(texts, disable_tqdm=True)
    found = ours(run, add_bos_token=True).loglikelihood_rolling(texts)
    assert_same_answers(found, wanted)
    assert ours(run).loglikelihood_rolling(texts) != found
