"""tools/generate.py: what it writes is what Hugging Face's model says, in every layout; and what it refuses."""

from __future__ import annotations

import functools
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpoint.huggingface.config import saved_config
from megatron.checkpoint.huggingface.convert import export
from megatron.checkpoint.huggingface.tokenizer import vocabulary_of
from megatron.checkpoint.one_process import open_folder
from megatron.errors import CheckpointError, ConfigError, DataError, JobError
from megatron.generate import load, options
from megatron.generate.options import parse_args
from megatron.generate.text import ROUND_S, Prompts
from megatron.mpu.groups import Group
from tests.helpers.harness import run_ranks
from tests.helpers.saved_models import save_model
from tools import generate

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["the lamp stood", "x", "of the house <extra_id_0> in the window", "灯在窗前"]
NEW = 10
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"activation": "gelu-tanh"}),
    "gpt2-untied": ("gpt2", {"untie_embeddings": True, "hidden_bias": True}),
    "llama": ("llama", {"hidden_bias": True}),
    "t5": ("t5", {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}),
    "t5-untied": ("t5", {"untie_embeddings": True, "activation": "gated-gelu"}),
    "t5-learned": ("t5", {"position_embedding_type": "learned", "hidden_bias": True}),
}
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
DRAWING = ["--temperature", "1.5", "--top-k", "30", "--top-p", "0.9", "--seed", "3"]
Place = Callable[[str], Path]


def asked(words: list[Any]) -> str:
    """Return what the tool writes to standard output."""
    out = io.StringIO()
    with redirect_stdout(out):
        generate.run(parse_args("", [str(word) for word in words]), {})
    return out.getvalue()


def answers(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def prompts_as_flags() -> list[str]:
    return [word for prompt in PROMPTS for word in ("--prompt", prompt)]


def usual(run: Path, *more: Any) -> list[Any]:
    words = ["--load", run, *prompts_as_flags(), "--json", "--dtype", "fp64", "--device", "cpu"]
    return [*words, "--max-new-tokens", NEW, *more]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The run folder of a model; the checkpoints of two were saved by two ranks."""

    @functools.cache
    def run_of(name: str) -> Path:
        run = tmp_path_factory.mktemp(name)
        family, values = MODELS[name]
        save_model(run, family, ranks=2 if name in ("gpt2", "t5-untied") else 1, **values)
        return run

    return run_of


@functools.cache
def alone(run: Path, *more: str) -> list[dict[str, Any]]:
    """Return the answers of one process to one prompt at a time."""
    return answers(asked(usual(run, "--batch-size", 1, *more)))


@pytest.mark.parametrize(
    "name",
    ["gpt2", "t5-untied", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2-untied", "t5", "llama"))],
)
def test_it_writes_what_hugging_faces_generate_says_on_the_exported_model(
    name: str, run_of: Place, tmp_path: Path
) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    export(open_folder(run_of(name)), tmp_path / "hf")
    kind = transformers.AutoModelForSeq2SeqLM if name.startswith("t5") else transformers.AutoModelForCausalLM
    model: Any = kind.from_pretrained(tmp_path / "hf", dtype=torch.float64, local_files_only=True).eval()
    found = alone(run_of(name))
    vocabulary = vocabulary_of(saved_config(open_folder(run_of(name)).metadata), None)
    assert vocabulary is not None
    prompts = Prompts(vocabulary.tokenizer, vocabulary.t5)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        row = prompts.encode(prompt)
        tokens = torch.tensor([row])
        given = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "num_beams": 1, "max_new_tokens": NEW}
        given["use_cache"] = vocabulary.t5 is None  # theirs fails for a T5 whose sides have unequal numbers of layers
        said = model.generate(tokens, eos_token_id=prompts.eos_id, pad_token_id=0, **given)[0].tolist()
        assert answer["tokens"] == said[1 if vocabulary.t5 else len(row) :], prompt
        assert answer["text"] == prompts.decode(answer["tokens"], behind=row)
        assert answer["num_prompt_tokens"] == len(row) and answer["prompt"] == prompt
    assert len({token for answer in found for token in answer["tokens"]}) > 6
    assert len({tuple(answer["tokens"]) for answer in found}) > 2


def asked_of_ranks(rank: int, words: list[Any], tensor: int, pipe: int) -> str:
    return asked([*words, "--model-parallel-size", tensor, "--pipe-parallel-size", pipe])


LONG = [(name, layout) for name in MODELS for layout in LAYOUTS if (name, layout[0]) != ("llama", 4)]  # 2 groups
SHORT = [
    ("gpt2", (2, 1, 1)),
    ("t5", (1, 2, 1)),
]


@pytest.mark.parametrize(
    ("name", "layout"),
    [*SHORT, *(pytest.param(n, x, marks=pytest.mark.slow) for n, x in LONG if (n, x) not in SHORT)],
)
def test_every_layout_writes_what_one_process_writes_to_each_prompt_alone(
    name: str, layout: tuple[int, int, int], run_of: Place
) -> None:
    run, (tensor, pipe, data) = run_of(name), layout
    for more in ([], DRAWING):
        size = tensor * pipe * data
        first, *others = run_ranks(size, asked_of_ranks, usual(run, "--batch-size", 3, *more), tensor, pipe)
        assert answers(first) == alone(run, *more) and not any(others)


@pytest.mark.parametrize("name", ["gpt2", "t5-learned"])
def test_a_batch_gives_each_prompt_what_it_gets_alone(name: str, run_of: Place) -> None:
    for more in ([], DRAWING):
        assert answers(asked(usual(run_of(name), *more))) == alone(run_of(name), *more)
    drawn = [answer["tokens"] for answer in alone(run_of(name), *DRAWING)]
    assert drawn != [answer["tokens"] for answer in alone(run_of(name))]


def test_each_rank_reads_its_own_slices_only(run_of: Place) -> None:
    checkpoint = open_folder(run_of("gpt2-untied"))
    whole = load(checkpoint, saved_config(checkpoint.metadata))
    pairs = [Group((0, 1), rank) for rank in (0, 1)]
    parts = [load(checkpoint, saved_config(checkpoint.metadata), pipe=pipe) for pipe in pairs]
    names = [set(dict(part.module.named_parameters())) for part in parts]
    assert not names[0] & names[1] and names[0] | names[1] == set(dict(whole.module.named_parameters()))
    cut = load(checkpoint, saved_config(checkpoint.metadata), tensor=pairs[1])
    assert dict(cut.module.named_parameters())["layers.0.mlp.up.weight"].shape == (64, 32)


def test_prompts_come_from_lines_or_objects_and_answers_go_to_a_file(run_of: Place, tmp_path: Path) -> None:
    run, out = run_of("gpt2"), tmp_path / "out.jsonl"
    wanted = [answer["text"] for answer in alone(run)]
    (tmp_path / "lines.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS), encoding="utf-8")
    lines = [json.dumps({"id": n, "q": prompt}) for n, prompt in enumerate(PROMPTS)]
    (tmp_path / "objects.jsonl").write_text("\n".join(lines), encoding="utf-8")
    words = ["--load", run, "--dtype", "fp64", "--max-new-tokens", NEW]
    assert asked([*words, "--input", tmp_path / "lines.txt", "--json", "--output", out]) == ""
    assert [answer["text"] for answer in answers(out.read_text(encoding="utf-8"))] == wanted
    output = asked([*words, "--input", tmp_path / "objects.jsonl", "--field", "q"])
    assert output == "".join(f"--- {n}\n{p}{w}\n" for n, (p, w) in enumerate(zip(PROMPTS, wanted, strict=True), 1))
    assert asked([*words, "--prompt", PROMPTS[0], "--greedy"]) == f"{PROMPTS[0]}{wanted[0]}\n"


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_without_prompts_each_line_is_answered_as_it_comes(
    name: str, run_of: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{PROMPTS[0]}\r\n\n{PROMPTS[3]}".encode())))
    pieces: list[str] = []
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "write", pieces.append)
    words = ["--load", run_of(name), "--dtype", "fp64", "--device", "cpu", "--max-new-tokens", NEW]
    generate.run(parse_args("", list(map(str, words))), {})
    texts = [answer["text"] for answer in alone(run_of(name))]
    assert "".join(pieces) == f"{texts[0]}\n{texts[3]}\n" and len(pieces) > 4


def output_of_lines(rank: int, run: Path, lines: bytes) -> tuple[str, str]:
    """Return what a rank writes to standard output and standard error when rank 0 reads ``lines``."""
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"" if rank else lines))
    options._is_without_input = lambda: False  # that of the test
    words = ["--load", run, "--dtype", "fp64", "--device", "cpu", "--max-new-tokens", NEW, "--pipe-parallel-size", 2]
    err = io.StringIO()
    with redirect_stderr(err):
        return asked(words), err.getvalue()


def test_a_line_that_cannot_be_answered_is_told_and_the_next_one_is_answered(run_of: Place) -> None:
    lines = f"{'x' * 60}\n{PROMPTS[0]}\n".encode() + b"ab\xff\n" + f"{PROMPTS[3]}\n".encode()
    (out, err), other = run_ranks(2, output_of_lines, run_of("gpt2"), lines)
    texts = [answer["text"] for answer in alone(run_of("gpt2"))]
    assert out == f"{texts[0]}\n{texts[3]}\n" and other == ("", "")
    assert err.index("prompt 1 has 60 tokens") < err.index("a line must be UTF-8 text: ") and "0xff" in err


def test_ranks_wait_long_for_each_others_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person may take longer for a line than a step of training, and the first pass of a CPU too."""
    seen: list[Any] = []
    monkeypatch.setattr("megatron.training.initialize.start", lambda config: seen.append(config) or SimpleNamespace(
        rank=0, grid=None, device=None, name="rank 0"))  # fmt: skip
    monkeypatch.setenv("WORLD_SIZE", "2")
    generate.start(parse_args("", ["--load", "x", "--prompt", "y", "--pipe-parallel-size", "2"]))
    assert seen[0].parallel.phase_timeout_s == generate.TIMEOUT_S > 5 * ROUND_S
    assert seen[0].parallel.pipe_parallel_size == 2


@pytest.mark.parametrize(("rank", "is_refused"), [("0", True), ("1", False)])
def test_the_rank_that_reads_lines_alone_needs_an_input(
    rank: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("megatron.generate.options._is_without_input", lambda: True)
    refusal = pytest.raises(ConfigError, match="Add --stdin to the launcher's flags") if is_refused else nullcontext()
    with refusal:
        parse_args("", ["--load", "x", "--pipe-parallel-size", "2"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "a", "--input", "b"], "got both"),
        (["--prompt", "a", "--field", "b"], "--field needs --input FILE.jsonl"),
        (["--json", "--batch-size", "2"], "--json, --batch-size cannot be used without --prompt or --input"),
        (["--greedy", "--top-k", "2"], "--greedy cannot be used with --top-k"),
        (["--seed", "2"], "--seed has no effect without --temperature"),
        (["--prompt", "a", "--max-new-tokens", "0", "--top-k", "0"], "--max-new-tokens .* got 0\n--top-k .* got 0"),
        (["--temperature", "0"], "above 0, got 0.0. For 0 use --greedy"),
        (["--temperature", "nan"], "above 0, got nan"),
        (["--top-p", "1.5"], "at most 1, got 1.5"),
        (["--pipe-parallel-size", "2"], "multiple of tensor x pipe, got 1, .* --nproc-per-node 2"),
        (["--model-parallel-size", "0"], "at least 1, got 0 and 1"),
        (["--prompt", "a", "--output", "/nowhere/x"], "folder of --output /nowhere/x must exist"),
        (["--prmpt", "a"], "unrecognized arguments: --prmpt"),
    ],
)
def test_options_that_cannot_be_are_told_together(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        parse_args("", ["--load", "x", *words])


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["--prompt", "x" * 60], DataError, "prompt 1 has 60 tokens. .* 48 learned positions"),
        (["--prompt", "x", "--prompt", "xy", "--max-new-tokens", "48"], DataError, "prompt 2 .* at most 47 new tokens"),
        (["--prompt", "x", "--mode", "R"], DataError, "got R. This model has no modes"),
        (["--prompt", "x", "--tokenizer-path", "nowhere"], DataError, "nowhere"),
        (["--input", "nowhere"], DataError, "--input nowhere must be UTF-8 text"),
        (["--input", "empty.txt"], DataError, "must have a prompt on each line, got an empty file"),
        (["--input", "bad.jsonl"], DataError, "bad.jsonl:2: each line must be a JSON object with a string"),
        (["--load", "nowhere", "--prompt", "x"], CheckpointError, "nowhere"),
    ],
)
def test_what_cannot_be_answered_is_told(
    words: list[str], kind: type[JobError], message: str, run_of: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("gpt2")
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    Path("bad.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    with pytest.raises(kind, match=message) as raised:
        asked(["--load", run, *words])
    assert not raised.value.is_of_this_rank


def test_a_model_that_cannot_be_cut_so_is_refused(run_of: Place) -> None:
    checkpoint = open_folder(run_of("gpt2"))
    config = saved_config(checkpoint.metadata)
    with pytest.raises(ConfigError, match="at most the 4 layers of the model, got 5"):
        load(checkpoint, config, pipe=Group((0, 1, 2, 3, 4), 2))
    with pytest.raises(ConfigError, match="--num-attention-heads must be a multiple of .*, got 4 and 3"):
        load(checkpoint, config, tensor=Group((0, 1, 2), 0))


def test_a_checkpoint_with_other_weights_than_its_configuration_tells_of_is_refused(run_of: Place) -> None:
    checkpoint = open_folder(run_of("gpt2-untied"))
    config = saved_config(checkpoint.metadata)
    tied = replace(config, model=replace(config.model, untie_embeddings=False))
    with pytest.raises(CheckpointError, match="contains weights .* not describe: weights/head.weight"):
        load(checkpoint, tied)


def launched(*words: Any, flags: Sequence[str] = (), given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Start two ranks of the tool with the launcher, which reads ``given``."""
    launcher = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2", *flags]
    command = [*launcher, "tools/generate.py", *map(str, words)]
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    return subprocess.run(command, cwd=ROOT, env=env, input=given, capture_output=True, text=True, timeout=120)


@pytest.mark.slow  # two forked ranks answer lines above
def test_two_ranks_of_the_launcher_answer_lines(run_of: Place) -> None:
    words = ["--load", run_of("gpt2"), "--dtype", "fp64", "--max-new-tokens", NEW, "--pipe-parallel-size", 2]
    done = launched(*words, flags=["--stdin", "--preload", "torch,deepspeed"], given=f"{PROMPTS[0]}\n{PROMPTS[3]}\n")
    texts = [answer["text"] for answer in alone(run_of("gpt2"))]
    assert (done.returncode, done.stdout) == (0, f"{texts[0]}\n{texts[3]}\n"), done.stderr


@pytest.mark.slow
def test_the_launcher_starts_it_and_an_error_gives_its_code_and_one_line(run_of: Place) -> None:
    run = run_of("gpt2")
    done = launched(*usual(run, "--pipe-parallel-size", 2))
    assert done.returncode == 0 and answers(done.stdout) == alone(run)
    failed = launched("--load", run, "--prompt", "x" * 60, "--pipe-parallel-size", 2)
    assert failed.returncode == 2 and failed.stderr.count("prompt 1 has 60 tokens") == 1
    without = launched("--load", run, "--pipe-parallel-size", 2)
    assert without.returncode == 2 and "the launcher passes none to rank 0. Add --stdin" in without.stderr
