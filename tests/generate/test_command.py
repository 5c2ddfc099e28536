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
from megatron.generate.text import INPUT_POLL_S, Prompts
from megatron.mpu.groups import Group
from tests.helpers.harness import run_ranks
from tests.helpers.saved_models import save_model
from tools import generate

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["the lamp stood", "x", "of the house <extra_id_0> in the window", "灯在窗前"]
MAX_NEW_TOKENS = 10
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"activation": "gelu-tanh"}),
    "gpt2-untied": ("gpt2", {"untie_embeddings": True, "hidden_bias": True}),
    "llama": ("llama", {"hidden_bias": True}),
    "t5": ("t5", {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}),
    "t5-untied": ("t5", {"untie_embeddings": True, "activation": "gated-gelu"}),
    "t5-learned": ("t5", {"position_embedding_type": "learned", "hidden_bias": True}),
}
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
SAMPLING_FLAGS = ["--temperature", "1.5", "--top-k", "30", "--top-p", "0.9", "--seed", "3"]
RunDirOf = Callable[[str], Path]


def run_tool(arguments: list[Any]) -> str:
    """Return what the tool writes to standard output."""
    stdout = io.StringIO()
    with redirect_stdout(stdout):
        generate.run(parse_args("", [str(word) for word in arguments]), {})
    return stdout.getvalue()


def parse_answers(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def prompt_flags() -> list[str]:
    return [word for prompt in PROMPTS for word in ("--prompt", prompt)]


def default_arguments(run_dir: Path, *extra: Any) -> list[Any]:
    arguments = ["--load", run_dir, *prompt_flags(), "--json", "--dtype", "fp64", "--device", "cpu"]
    return [*arguments, "--max-new-tokens", MAX_NEW_TOKENS, *extra]


@pytest.fixture(scope="module")
def run_dir_of(tmp_path_factory: pytest.TempPathFactory) -> RunDirOf:
    """The run folder of a model; the checkpoints of two were saved by two ranks."""

    @functools.cache
    def make_run(name: str) -> Path:
        run_dir = tmp_path_factory.mktemp(name)
        family, values = MODELS[name]
        save_model(run_dir, family, num_ranks=2 if name in ("gpt2", "t5-untied") else 1, **values)
        return run_dir

    return make_run


@functools.cache
def single_prompt_answers(run_dir: Path, *extra: str) -> list[dict[str, Any]]:
    """Return the answers of one process to one prompt at a time."""
    return parse_answers(run_tool(default_arguments(run_dir, "--batch-size", 1, *extra)))


@pytest.mark.parametrize(
    "name",
    ["gpt2", "t5-untied", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2-untied", "t5", "llama"))],
)
def test_generated_tokens_equal_hugging_face_generate(name: str, run_dir_of: RunDirOf, tmp_path: Path) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    export(open_folder(run_dir_of(name)), tmp_path / "hf")
    model_class = transformers.AutoModelForSeq2SeqLM if name.startswith("t5") else transformers.AutoModelForCausalLM
    model: Any = model_class.from_pretrained(tmp_path / "hf", dtype=torch.float64, local_files_only=True).eval()
    answers_found = single_prompt_answers(run_dir_of(name))
    vocabulary = vocabulary_of(saved_config(open_folder(run_dir_of(name)).metadata), None)
    assert vocabulary is not None
    prompts = Prompts(vocabulary.tokenizer, vocabulary.t5)
    for prompt, answer in zip(PROMPTS, answers_found, strict=True):
        row = prompts.encode(prompt)
        tokens = torch.tensor([row])
        options = {
            "attention_mask": torch.ones_like(tokens),
            "do_sample": False,
            "num_beams": 1,
            "max_new_tokens": MAX_NEW_TOKENS,
        }
        options["use_cache"] = vocabulary.t5 is None  # theirs fails for a T5 whose sides have unequal numbers of layers
        expected = model.generate(tokens, eos_token_id=prompts.eos_id, pad_token_id=0, **options)[0].tolist()
        assert answer["tokens"] == expected[1 if vocabulary.t5 else len(row) :], prompt
        assert answer["text"] == prompts.decode(answer["tokens"], prompt=row)
        assert answer["num_prompt_tokens"] == len(row) and answer["prompt"] == prompt
    assert len({token for answer in answers_found for token in answer["tokens"]}) > 6
    assert len({tuple(answer["tokens"]) for answer in answers_found}) > 2


def run_tool_on_rank(rank: int, arguments: list[Any], tensor: int, pipe: int) -> str:
    return run_tool([*arguments, "--model-parallel-size", tensor, "--pipe-parallel-size", pipe])


SLOW_CASES = [(name, layout) for name in MODELS for layout in LAYOUTS if (name, layout[0]) != ("llama", 4)]  # 2 groups
QUICK_CASES = [
    ("gpt2", (2, 1, 1)),
    ("t5", (1, 2, 1)),
]


@pytest.mark.parametrize(
    ("name", "layout"),
    [*QUICK_CASES, *(pytest.param(n, x, marks=pytest.mark.slow) for n, x in SLOW_CASES if (n, x) not in QUICK_CASES)],
)
def test_every_layout_equals_single_process_answers(
    name: str, layout: tuple[int, int, int], run_dir_of: RunDirOf
) -> None:
    run_dir, (tensor, pipe, data) = run_dir_of(name), layout
    for extra in ([], SAMPLING_FLAGS):
        world_size = tensor * pipe * data
        first, *other_outputs = run_ranks(
            world_size, run_tool_on_rank, default_arguments(run_dir, "--batch-size", 3, *extra), tensor, pipe
        )
        assert parse_answers(first) == single_prompt_answers(run_dir, *extra) and not any(other_outputs)


@pytest.mark.parametrize("name", ["gpt2", "t5-learned"])
def test_batched_answers_equal_single_prompt_answers(name: str, run_dir_of: RunDirOf) -> None:
    for extra in ([], SAMPLING_FLAGS):
        assert parse_answers(run_tool(default_arguments(run_dir_of(name), *extra))) == single_prompt_answers(
            run_dir_of(name), *extra
        )
    sampled = [answer["tokens"] for answer in single_prompt_answers(run_dir_of(name), *SAMPLING_FLAGS)]
    assert sampled != [answer["tokens"] for answer in single_prompt_answers(run_dir_of(name))]


def test_each_rank_loads_only_its_shards(run_dir_of: RunDirOf) -> None:
    checkpoint = open_folder(run_dir_of("gpt2-untied"))
    full_stage = load(checkpoint, saved_config(checkpoint.metadata))
    groups = [Group((0, 1), rank) for rank in (0, 1)]
    stages = [load(checkpoint, saved_config(checkpoint.metadata), pipe=pipe) for pipe in groups]
    names = [set(dict(stage.module.named_parameters())) for stage in stages]
    assert not names[0] & names[1] and names[0] | names[1] == set(dict(full_stage.module.named_parameters()))
    sharded_stage = load(checkpoint, saved_config(checkpoint.metadata), tensor=groups[1])
    assert dict(sharded_stage.module.named_parameters())["layers.0.mlp.up.weight"].shape == (64, 32)


def test_prompts_are_read_from_lines_or_objects_and_answers_written_to_file(
    run_dir_of: RunDirOf, tmp_path: Path
) -> None:
    run_dir, out = run_dir_of("gpt2"), tmp_path / "out.jsonl"
    expected = [answer["text"] for answer in single_prompt_answers(run_dir)]
    (tmp_path / "lines.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS), encoding="utf-8")
    lines = [json.dumps({"id": idx, "q": prompt}) for idx, prompt in enumerate(PROMPTS)]
    (tmp_path / "objects.jsonl").write_text("\n".join(lines), encoding="utf-8")
    arguments = ["--load", run_dir, "--dtype", "fp64", "--max-new-tokens", MAX_NEW_TOKENS]
    assert run_tool([*arguments, "--input", tmp_path / "lines.txt", "--json", "--output", out]) == ""
    assert [answer["text"] for answer in parse_answers(out.read_text(encoding="utf-8"))] == expected
    output = run_tool([*arguments, "--input", tmp_path / "objects.jsonl", "--field", "q"])
    assert output == "".join(
        f"--- {idx}\n{prompt}{text}\n" for idx, (prompt, text) in enumerate(zip(PROMPTS, expected, strict=True), 1)
    )
    assert run_tool([*arguments, "--prompt", PROMPTS[0], "--greedy"]) == f"{PROMPTS[0]}{expected[0]}\n"


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_stdin_lines_are_answered_immediately_without_prompts(
    name: str, run_dir_of: RunDirOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{PROMPTS[0]}\r\n\n{PROMPTS[3]}".encode())))
    writes: list[str] = []
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "write", writes.append)
    arguments = ["--load", run_dir_of(name), "--dtype", "fp64", "--device", "cpu", "--max-new-tokens", MAX_NEW_TOKENS]
    generate.run(parse_args("", list(map(str, arguments))), {})
    texts = [answer["text"] for answer in single_prompt_answers(run_dir_of(name))]
    assert "".join(writes) == f"{texts[0]}\n{texts[3]}\n" and len(writes) > 4


def answer_stdin_lines(rank: int, run_dir: Path, lines: bytes) -> tuple[str, str]:
    """Return what a rank writes to standard output and standard error when rank 0 reads ``lines``."""
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"" if rank else lines))
    options._is_stdin_null = lambda: False  # that of the test
    arguments = [
        "--load",
        run_dir,
        "--dtype",
        "fp64",
        "--device",
        "cpu",
        "--max-new-tokens",
        MAX_NEW_TOKENS,
        "--pipe-parallel-size",
        2,
    ]
    stderr = io.StringIO()
    with redirect_stderr(stderr):
        return run_tool(arguments), stderr.getvalue()


def test_unanswerable_line_is_reported_and_next_line_answered(run_dir_of: RunDirOf) -> None:
    lines = f"{'x' * 60}\n{PROMPTS[0]}\n".encode() + b"ab\xff\n" + f"{PROMPTS[3]}\n".encode()
    (stdout, stderr), other_rank = run_ranks(2, answer_stdin_lines, run_dir_of("gpt2"), lines)
    texts = [answer["text"] for answer in single_prompt_answers(run_dir_of("gpt2"))]
    assert stdout == f"{texts[0]}\n{texts[3]}\n" and other_rank == ("", "")
    assert stderr.index("prompt 1 has 60 tokens") < stderr.index("a line must be UTF-8 text: ") and "0xff" in stderr


def test_pipeline_timeout_allows_slow_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person may take longer for a line than a step of training, and the first pass of a CPU too."""
    configs: list[Any] = []
    monkeypatch.setattr("megatron.training.initialize.start", lambda config: configs.append(config) or SimpleNamespace(
        rank=0, grid=None, device=None, name="rank 0"))  # fmt: skip
    monkeypatch.setenv("WORLD_SIZE", "2")
    generate.initialize_ranks(parse_args("", ["--load", "x", "--prompt", "y", "--pipe-parallel-size", "2"]))
    assert configs[0].parallel.phase_timeout_s == generate.TIMEOUT_S > 5 * INPUT_POLL_S
    assert configs[0].parallel.pipe_parallel_size == 2


def test_samples_of_a_prompt_are_its_repetitions(run_dir_of: RunDirOf) -> None:
    base = ["--load", run_dir_of("gpt2"), "--json", "--device", "cpu", "--max-new-tokens", 8, "--temperature", "1.5"]
    samples = run_tool([*base, "--prompt", PROMPTS[0], "--num-samples", "2"])
    assert samples == run_tool([*base, "--prompt", PROMPTS[0], "--prompt", PROMPTS[0]])
    first, second = parse_answers(samples)
    assert first["prompt"] == second["prompt"] and first["text"] != second["text"]


@pytest.mark.parametrize(("rank", "is_rejected"), [("0", True), ("1", False)])
def test_stdin_rank_requires_input(rank: str, is_rejected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("megatron.generate.options._is_stdin_null", lambda: True)
    expectation = (
        pytest.raises(ConfigError, match="Add --stdin to the launcher's flags") if is_rejected else nullcontext()
    )
    with expectation:
        parse_args("", ["--load", "x", "--pipe-parallel-size", "2"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--input", "b"], "got both"),
        (["--prompt", "a", "--field", "b"], "--field needs --input FILE.jsonl"),
        (["--json", "--batch-size", "2"], "--json, --batch-size cannot be used without --prompt or --input"),
        (["--greedy", "--top-k", "2"], "--greedy cannot be used with --top-k"),
        (["--seed", "2"], "--seed has no effect without --temperature"),
        (["--prompt", "a", "--max-new-tokens", "0", "--top-k", "0"], "--max-new-tokens .* got 0\n--top-k .* got 0"),
        (["--prompt", "a", "--num-samples", "2"], "--num-samples 2 needs --temperature"),
        (["--prompt", "a", "--num-samples", "0", "--top-k", "1"], "--num-samples must be at least 1, got 0"),
        (["--num-samples", "2", "--top-k", "1"], "--num-samples cannot be used without --prompt or --input"),
        (["--temperature", "0"], "above 0, got 0.0. For 0 use --greedy"),
        (["--temperature", "nan"], "above 0, got nan"),
        (["--top-p", "1.5"], "at most 1, got 1.5"),
        (["--pipe-parallel-size", "2"], "multiple of tensor x pipe, got 1, .* --nproc-per-node 2"),
        (["--model-parallel-size", "0"], "at least 1, got 0 and 1"),
        (["--prompt", "a", "--output", "/nowhere/x"], "folder of --output /nowhere/x must exist"),
        (["--prmpt", "a"], "unrecognized arguments: --prmpt"),
    ],
)
def test_invalid_options_are_reported_together(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        parse_args("", ["--load", "x", *arguments])


@pytest.mark.parametrize(
    ("arguments", "error_type", "message"),
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
def test_unanswerable_prompts_raise_on_all_ranks(
    arguments: list[str],
    error_type: type[JobError],
    message: str,
    run_dir_of: RunDirOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir = run_dir_of("gpt2")
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    Path("bad.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    with pytest.raises(error_type, match=message) as raised:
        run_tool(["--load", run_dir, *arguments])
    assert not raised.value.is_of_this_rank


def test_unsupported_layouts_are_rejected(run_dir_of: RunDirOf) -> None:
    checkpoint = open_folder(run_dir_of("gpt2"))
    config = saved_config(checkpoint.metadata)
    with pytest.raises(ConfigError, match="at most the 4 layers of the model, got 5"):
        load(checkpoint, config, pipe=Group((0, 1, 2, 3, 4), 2))
    with pytest.raises(ConfigError, match="--num-attention-heads must be a multiple of .*, got 4 and 3"):
        load(checkpoint, config, tensor=Group((0, 1, 2), 0))


def test_checkpoint_not_matching_configuration_is_rejected(run_dir_of: RunDirOf) -> None:
    checkpoint = open_folder(run_dir_of("gpt2-untied"))
    config = saved_config(checkpoint.metadata)
    tied_config = replace(config, model=replace(config.model, untie_embeddings=False))
    with pytest.raises(CheckpointError, match="contains weights .* not describe: weights/head.weight"):
        load(checkpoint, tied_config)


def run_with_launcher(
    *arguments: Any, flags: Sequence[str] = (), stdin_text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Start two ranks of the tool with the launcher, which reads ``stdin_text``."""
    launcher = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2", *flags]
    command = [*launcher, "tools/generate.py", *map(str, arguments)]
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    return subprocess.run(command, cwd=ROOT, env=env, input=stdin_text, capture_output=True, text=True, timeout=120)


@pytest.mark.slow  # two forked ranks answer lines above
def test_two_launched_ranks_answer_stdin_lines(run_dir_of: RunDirOf) -> None:
    arguments = [
        "--load",
        run_dir_of("gpt2"),
        "--dtype",
        "fp64",
        "--max-new-tokens",
        MAX_NEW_TOKENS,
        "--pipe-parallel-size",
        2,
    ]
    result = run_with_launcher(
        *arguments, flags=["--stdin", "--preload", "torch,deepspeed"], stdin_text=f"{PROMPTS[0]}\n{PROMPTS[3]}\n"
    )
    texts = [answer["text"] for answer in single_prompt_answers(run_dir_of("gpt2"))]
    assert (result.returncode, result.stdout) == (0, f"{texts[0]}\n{texts[3]}\n"), result.stderr


@pytest.mark.slow
def test_launched_tool_returns_error_code_and_single_message(run_dir_of: RunDirOf) -> None:
    run_dir = run_dir_of("gpt2")
    result = run_with_launcher(*default_arguments(run_dir, "--pipe-parallel-size", 2))
    assert result.returncode == 0 and parse_answers(result.stdout) == single_prompt_answers(run_dir)
    failed_result = run_with_launcher("--load", run_dir, "--prompt", "x" * 60, "--pipe-parallel-size", 2)
    assert failed_result.returncode == 2 and failed_result.stderr.count("prompt 1 has 60 tokens") == 1
    no_input_result = run_with_launcher("--load", run_dir, "--pipe-parallel-size", 2)
    assert (
        no_input_result.returncode == 2 and "the launcher passes none to rank 0. Add --stdin" in no_input_result.stderr
    )
