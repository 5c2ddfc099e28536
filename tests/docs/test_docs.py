"""The pages agree with the code: links, paths, flags, commands, code blocks and tables."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from types import ModuleType
from unittest import mock

import pytest

from examples.tour import tour
from examples.tour.sections import make_sections
from megatron.arguments.deepspeed_keys import KNOWN
from megatron.arguments.foreign_flags import foreign_flags
from megatron.config import parse
from megatron.errors import EXIT_CODES
from megatron.evaluation.options import parse_args as parse_evaluate
from megatron.generate.options import parse_args as parse_generate
from megatron.launch.options import parse as parse_launch
from megatron.models.registry import FAMILIES
from tests.helpers.rows import check_rows

ROOT = Path(__file__).resolve().parents[2]
FLAGS_PAGE = ROOT / "docs" / "flags.md"
OTHER_FLAGS_PAGE = ROOT / "docs" / "other_flags.md"
PAGES = sorted(
    {ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")} - {FLAGS_PAGE, OTHER_FLAGS_PAGE}
)
EXPERIMENTS_PAGE = ROOT / "docs" / "experiments.md"
"""Its rows name programs and flags of former commits."""
MORE_IN_CHINESE = {"models.md": "it has what the three pages of examples/ say, which are English"}
"""Pages whose Chinese version has more commands than the English one, with the reason."""
README_PAIR = ("README.md", "docs/zh/README.md")
PAGE_PAIRS = [
    (f"docs/{page.name}", f"docs/zh/{page.name}")
    for page in sorted((ROOT / "docs" / "zh").glob("*.md"))
    if page.name != "README.md"
]
COMPARED_PAIRS = [README_PAIR, *(pair for pair in PAGE_PAIRS if Path(pair[0]).name not in MORE_IN_CHINESE)]
SCRIPTS = {"gpt2": "run_gpt2.sh", "t5": "run_t5.sh"}
OPTION_PARSERS = {"tools/generate.py": parse_generate, "tools/evaluate.py": parse_evaluate}
LAUNCHER_FLAGS = ("--max-restarts", "--stop-grace", "--exit-grace", "--init-timeout")
"""Flags that the run scripts hand to the launcher."""

GENERATED_PREFIXES = (
    "additional_chat_templates/",
    "data/",
    "runs/",
    ".venv",
    "rank-0000",
    "step-0000",
    "tensorboard/",
    "profile/",
    "mycorpus/",
    "my-model",
)
GENERATED_PREFIXES += (
    "megatron/models/kite/",
    "megatron/training/callbacks/weight_norm.py",
)  # CONTRIBUTING's recipes
GENERATED_FILES = {
    "config.json",
    "generation_config.json",
    "versions.json",
    "proof.json",
    "manifest.json",
    "vocab.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "stages.json",
    "checkpoints/",
    "__init__.py",
    "executor.json",
}
"""What a run, a tool or the user makes, and a name that stands for many files."""
DOCKER_FLAGS = {"--tag", "--rm", "--init", "--gpus", "--ipc", "--shm-size", "--ulimit", "--network", "--device"}
DOCKER_FLAGS |= {"--stop-timeout", "--build-arg"}
EXTERNAL_FLAGS = {
    "--help",
    "--help-all",
    "--tour",
    "--local-dir",
    "--local_dir",
    "--all",
    "--every",
    "--gpu-device",
    "--ntasks-per-node",
    "--kill-on-bad-exit",
    "--bind-to",
    "--to",
    "--require-hashes",
    *DOCKER_FLAGS,
    "--model-path",
    "--outfile",
    "--dataset",
    "--array",
    "--cpus-per-task",
}
"""Flags of pytest's options here, of every parser, of tools/run.sh, of srun and sbatch, pip, docker, SGLang, llama.cpp
and ms-swift, and what tools/convert_hf.py reads ahead of its parser."""

PROGRAM_VARIABLES = {"WANDB_MODE", "PYTHONPATH", "MEGATRON_ACCELERATOR", "TORCH_INDEX", "PIP_INDEX_URL"}
PROGRAM_VARIABLES |= {"LC_ALL", "NODE_LIST", "TOUR_FAULT", "program"}
"""Variables that Python, packages and our programs read, and no run script."""

CURRENT_PAGES = [page for page in PAGES if page != EXPERIMENTS_PAGE]


def read_prose(page: Path) -> str:
    """Return the text without its blocks of code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"^    .*$", "", text, flags=re.M)


def iter_commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command in the indented blocks and in fences of a shell, without comments."""
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    text = re.sub(r"^```(?:sh|bash)\n(.*?)^```$", lambda fence: indent(fence[1], "    "), text, flags=re.M | re.S)
    for line in re.findall(r"^    (.*)$", text, flags=re.M):
        if re.match(r"([A-Za-z_]+=\S+ )*(bash|python|srun|torchrun) ", line):
            yield shlex.split(line, comments=True)


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def heading_anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_links_resolve() -> None:
    def check(page: Path) -> None:
        for target in re.findall(r"\]\(([^)\s]+)\)", read_prose(page)):
            if target.startswith(("http:", "https:", "mailto:")):
                continue
            name, _, anchor = target.partition("#")
            linked_path = (page.parent / name).resolve() if name else page
            assert linked_path.exists(), f"{target} is not there"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", linked_path.read_text(encoding="utf-8"), flags=re.M)
                assert anchor in map(heading_anchor, headings), f"{target}: no such heading"

    check_rows(PAGES, check)


def test_paths_in_backticks_exist() -> None:
    def check(page: Path) -> None:
        for word in re.findall(r"`([^`\s]+)`", read_prose(page)):
            is_path = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)*/?", word) and re.search(
                r"(/|\.(py|sh|md|toml|json|cff))$", word
            )
            if not is_path or word in GENERATED_FILES or word.startswith(GENERATED_PREFIXES):
                continue
            assert (ROOT / word).exists() or (page.parent / word).exists(), f"`{word}` is not there"

    check_rows(CURRENT_PAGES, check)


def read_settable_flags() -> set[str]:
    text = FLAGS_PAGE.read_text(encoding="utf-8")
    table = text[text.index("## What can be set") : text.index("## Keys of DeepSpeed")]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `--")]
    return {flag for cells in rows for flag in re.findall(r"--[\w-]+", " ".join(cells))}


def read_tool_flags() -> set[str]:
    folders = (ROOT / "tools", ROOT / "benchmarks", ROOT / "benchmarks" / "gpu", ROOT / "megatron" / "planner")
    sources = [
        *(path for folder in folders for path in folder.glob("*.py")),
        ROOT / "megatron" / "launch" / "options.py",
        ROOT / "megatron" / "generate" / "options.py",
        ROOT / "megatron" / "evaluation" / "options.py",
        ROOT / "examples" / "own_model.py",
        ROOT / "examples" / "tour" / "tour.py",
    ]
    return {flag for source in sources for flag in re.findall(r'"(--[a-z][\w-]*)"', source.read_text(encoding="utf-8"))}


FOREIGN_FLAG_PAGES = {"data.md", "migration.md", "checkpoints.md", "moe.md", "tuning.md"}
"""Pages that name flags of other trainers; tests/docs/test_migration.py checks each of these flags."""


def test_documented_flags_exist() -> None:
    own_flags = read_settable_flags() | read_tool_flags() | EXTERNAL_FLAGS

    def check(page: Path) -> None:
        known = own_flags | set(foreign_flags()) if page.name in FOREIGN_FLAG_PAGES else own_flags
        unknown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*(?![\w/-])", page.read_text(encoding="utf-8"))) - known
        assert not unknown

    check_rows(CURRENT_PAGES, check)


def drop_launcher_flags(flags: list[str]) -> list[str]:
    """Return the flags that the training script gets."""
    flag_idxs = [i for i, flag in enumerate(flags) if flag in LAUNCHER_FLAGS]
    parse_launch(
        [*(word for i in flag_idxs for word in flags[i : i + 2]), "pretrain_gpt2.py"], env={"DS_ACCELERATOR": "cpu"}
    )
    return [flag for i, flag in enumerate(flags) if i not in flag_idxs and i - 1 not in flag_idxs]


def check_command(args: list[str]) -> None:
    """Fail unless this command line is one that its program takes."""
    variables = []
    while re.match(r"[A-Za-z_]+=", args[0]):
        variables.append(args.pop(0).partition("=")[0])
    program, script, *flags = args
    if "MEGATRON_ACCELERATOR" in variables:  # its device is none here: tests/test_accelerators.py has one
        flags = ["cpu" if previous == "--device" else flag for previous, flag in zip(["", *flags], flags, strict=False)]
    for variable in set(variables) - PROGRAM_VARIABLES:
        assert re.search(rf"\$\{{{variable}:[-?]", (ROOT / script).read_text()), f"{script} has no {variable}"
    family = next((name for name in FAMILIES if re.search(rf"(run|pretrain)_{name}\b", script)), "gpt2")
    if program in ("srun", "torchrun"):
        assert any((ROOT / word).is_file() for word in args)
    elif script == "-m" and flags[0] == "megatron.launch":
        options = parse_launch(flags[1:], env={"DS_ACCELERATOR": "cpu"})
        if options.script in OPTION_PARSERS:
            world_size_env = {"WORLD_SIZE": str(options.nproc_per_node)}
            rank_env = (
                {"RANK": "1"} if options.stdin else {}
            )  # rank 0 looks at its standard input, which a test has not
            with mock.patch.dict(os.environ, {**world_size_env, **rank_env}):
                OPTION_PARSERS[options.script]("", options.script_args)
        else:
            parse(options.script_args, world_size=options.nproc_per_node)
    elif script in OPTION_PARSERS:
        OPTION_PARSERS[script]("", flags)
    elif script == "-m":
        assert importlib.util.find_spec(flags[0])
    elif script.startswith("tools/"):
        tool = load_module(ROOT / script)
        if script == "tools/plan.py" and "--load" in flags:  # the folder of an example need not be there
            idx = flags.index("--load")
            flags = [*flags[:idx], *flags[idx + 2 :], "--model", "llama", "--num-layers", "2", "--hidden-size", "64"]
        if hasattr(tool, "make_tool_parser"):
            tool_args, unknown_flags = tool.make_tool_parser().parse_known_args(flags)
        else:
            tool_args, unknown_flags = tool.parse_args(flags), []
        model = getattr(tool_args, "model", None)  # of other tools, a type that is no family
        parse(unknown_flags, world_size=1, family=model if model in FAMILIES else "gpt2")
    else:
        assert (ROOT / script).is_file(), f"{script} is not there"
        if flags[:1] == ["--tour"]:
            tour.parse_args(make_sections(), flags[1:])
            return
        if Path(script).name.startswith("run_") and script != "run_tests.sh":
            with mock.patch.dict(os.environ, {"RANK": "1"} if "--eval-tasks" in flags else {}):  # 0 looks for lm_eval
                parse(drop_launcher_flags(flags), world_size=4, family=family, accepts_model=True)
        elif script == "examples/own_model.py" or Path(script).name.startswith("pretrain_"):
            training_flags = [
                word for previous, word in zip(["", *flags], flags, strict=False) if word != "..." or "data" in previous
            ]
            # dry: the files of an example need not be there
            parse([*training_flags, "--dry-run"], world_size=4, family=family, accepts_model="gpt2" in script)


def test_documented_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("wandb", "swanlab", "mlflow"):  # a command may use them, but they need not be installed
        monkeypatch.setitem(sys.modules, name, ModuleType(name))

    def check(page: Path) -> None:
        for args in iter_commands(page):
            try:
                check_command(list(args))
            except (SystemExit, ValueError) as error:
                raise AssertionError(f"{shlex.join(args)}: {error}") from error

    check_rows(PAGES, check)


def test_python_blocks_parse() -> None:
    def check(page: Path) -> None:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S):
            ast.parse(block)

    check_rows(PAGES, check)


@pytest.mark.parametrize("english, chinese", COMPARED_PAIRS)
def test_languages_have_equal_commands_and_code_blocks(english: str, chinese: str) -> None:
    assert list(iter_commands(ROOT / chinese)) == list(iter_commands(ROOT / english))
    fences = [
        re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / name).read_text(encoding="utf-8"), flags=re.M | re.S)
        for name in (english, chinese)
    ]
    assert fences[1] == fences[0]


@pytest.mark.parametrize("name", MORE_IN_CHINESE)
def test_extended_chinese_page_has_english_commands(name: str) -> None:
    english, chinese = ([*iter_commands(ROOT / "docs" / folder / name)] for folder in ("", "zh"))
    assert english and [args for args in english if args not in chinese] == []


def parse_tables(text: str) -> list[list[str]]:
    """Return the data rows of every table outside of fences."""
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return [table.splitlines()[2:] for table in re.findall(r"(?:^\|.*\|(?:\n|\Z))+", plain, flags=re.M)]


@pytest.mark.parametrize("name, idx, columns", [("planner.md", 2, 4), ("scaling.md", 1, 13)])
def test_languages_have_equal_generated_tables(name: str, idx: int, columns: int) -> None:
    english, chinese = (parse_tables((ROOT / "docs" / folder / name).read_text("utf-8"))[idx] for folder in ("", "zh"))
    assert {row.count("|") - 1 for row in english} == {columns}
    assert chinese == english


def test_tables_are_followed_by_blank_line() -> None:
    """Without it the line becomes a row."""

    def check(page: Path) -> None:
        assert re.findall(r"^\|.*\|\n(?=[^|\n]).*", read_prose(page), flags=re.M) == []

    check_rows(PAGES, check)


@pytest.mark.parametrize("page", ["docs/running.md", "docs/zh/running.md"])
def test_documented_exit_codes_match_code(page: str) -> None:
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", (ROOT / page).read_text(encoding="utf-8"), flags=re.M)}
    assert codes == {0, 1, *EXIT_CODES.values()}


@pytest.mark.parametrize("page", ["docs/run_scripts.md", "docs/zh/run_scripts.md"])
def test_variable_and_key_tables_match_code(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    scripts = [(ROOT / name).read_text() for name in SCRIPTS.values()]
    variables = {name for script in scripts for name in re.findall(r"^([A-Za-z_]+)=\$\{\1:-", script, flags=re.M)}
    rows = re.findall(r"^\| (`[A-Za-z_]+`(?:, `[A-Za-z_]+`)*) \|", text, flags=re.M)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    keys = documented - variables
    assert documented >= variables
    assert keys <= set(KNOWN), f"neither a variable nor a key of the JSON: {keys - set(KNOWN)}"


@pytest.mark.parametrize("page", ["docs/run_scripts.md", "docs/zh/run_scripts.md"])
def test_documented_defaults_match_scripts(page: str) -> None:
    """A cell of the column of T5 that is empty says that the default is the other's."""
    text = (ROOT / page).read_text(encoding="utf-8")
    pattern = r"^([A-Z_]+)=\$\{\1:-\} +# (\d+)\b(?!\.)"
    gpt2, t5 = (dict(re.findall(pattern, (ROOT / name).read_text(), flags=re.M)) for name in SCRIPTS.values())
    rows = re.findall(r"^\| (`[A-Z_]+`(?:, `[A-Z_]+`)*) \| ([^|]*)\| ([^|]*)\|", text, flags=re.M)
    documented_gpt2, documented_t5 = {}, {}
    for row, first, second in rows:
        names = re.findall(r"`(\w+)`", row)
        for documented, cell in ((documented_gpt2, first), (documented_t5, second.strip() or first)):
            documented.update(zip(names, re.split(r"[,;；] *", cell.strip()), strict=False))
    assert gpt2 and t5
    assert {name: documented_gpt2[name] for name in gpt2} == gpt2
    assert {name: documented_t5[name] for name in t5} == t5


def test_documented_output_paths_are_ignored_by_git(tmp_path: Path) -> None:
    """git does not list it: else what belongs to a user stands beside what he changed in the code."""
    option = re.compile(r"(?:--output-prefix|--output|--out|--save|-o|CHECKPOINT_PATH)(?: +|=)(?!\w+://)([\w./-]+)")
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines() if line[:4] == "    "]
    written = sorted({name for line in lines for name in option.findall(line)})
    assert {"data/corpus", "runs/mine", "my-model"} <= set(written)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_bytes((ROOT / ".gitignore").read_bytes())
    output_files = [name if Path(name).suffix else f"{name}/file" for name in written]
    checked_paths = [*output_files, "report.html", "megatron/data/sample_index.py", "tests/data/test_split.py"]
    result = subprocess.run(
        ["git", "-C", tmp_path, "check-ignore", *checked_paths], capture_output=True, text=True, check=False
    )
    assert result.stdout.splitlines() == checked_paths[:-2]
