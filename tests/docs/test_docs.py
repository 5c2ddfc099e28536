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
FLAGS = ROOT / "docs" / "flags.md"
OTHER_FLAGS = ROOT / "docs" / "other_flags.md"
PAGES = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")} - {FLAGS, OTHER_FLAGS})
LEDGER = ROOT / "docs" / "experiments.md"
"""Its rows name programs and flags of former commits."""
MORE_IN_CHINESE = {"models.md": "it has what the three pages of examples/ say, which are English"}
"""Pages whose Chinese version has more commands than the English one, with the reason."""
FRONT = ("README.md", "docs/zh/README.md")
SIBLINGS = [
    (f"docs/{page.name}", f"docs/zh/{page.name}")
    for page in sorted((ROOT / "docs" / "zh").glob("*.md"))
    if page.name != "README.md"
]
PAIRS = [FRONT, *(pair for pair in SIBLINGS if Path(pair[0]).name not in MORE_IN_CHINESE)]
SCRIPTS = {"gpt2": "run_gpt2.sh", "t5": "run_t5.sh"}
OWN_OPTIONS = {"tools/generate.py": parse_generate, "tools/evaluate.py": parse_evaluate}
OF_THE_LAUNCHER = ("--max-restarts", "--stop-grace", "--exit-grace", "--init-timeout")
"""Flags that the run scripts hand to the launcher."""

MADE = (
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
MADE += (
    "megatron/models/kite/",
    "megatron/training/callbacks/weight_norm.py",
)  # CONTRIBUTING's recipes
MADE_FILES = {
    "config.json",
    "generation_config.json",
    "versions.json",
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
OF_DOCKER = {"--tag", "--rm", "--init", "--gpus", "--ipc", "--shm-size", "--ulimit", "--network", "--device"}
OF_DOCKER |= {"--stop-timeout", "--build-arg"}
OF_OTHERS = {
    "--help",
    "--help-all",
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
    *OF_DOCKER,
    "--model-path",
    "--outfile",
    "--dataset",
    "--array",
    "--cpus-per-task",
}
"""Flags of pytest's options here, of every parser, of srun and sbatch, pip, docker, SGLang, llama.cpp and ms-swift, and
what tools/convert_hf.py reads ahead of its parser."""

OF_THE_PROGRAMS = {"WANDB_MODE", "PYTHONPATH", "MEGATRON_ACCELERATOR", "TORCH_INDEX", "PIP_INDEX_URL"}
"""Variables that Python, packages and our programs read, and no run script."""

CURRENT_PAGES = [page for page in PAGES if page != LEDGER]


def prose(page: Path) -> str:
    """Return the text without its blocks of code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"^    .*$", "", text, flags=re.M)


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command in the indented blocks and in fences of a shell, without comments."""
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    text = re.sub(r"^```(?:sh|bash)\n(.*?)^```$", lambda fence: indent(fence[1], "    "), text, flags=re.M | re.S)
    for line in re.findall(r"^    (.*)$", text, flags=re.M):
        if re.match(r"([A-Za-z_]+=\S+ )*(bash|python|srun|torchrun) ", line):
            yield shlex.split(line, comments=True)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_links_lead_somewhere() -> None:
    def check(page: Path) -> None:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if target.startswith(("http:", "https:", "mailto:")):
                continue
            name, _, anchor = target.partition("#")
            aim = (page.parent / name).resolve() if name else page
            assert aim.exists(), f"{target} is not there"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", aim.read_text(encoding="utf-8"), flags=re.M)
                assert anchor in map(slug, headings), f"{target}: no such heading"

    check_rows(PAGES, check)


def test_paths_in_backticks_exist() -> None:
    def check(page: Path) -> None:
        for word in re.findall(r"`([^`\s]+)`", prose(page)):
            is_path = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)*/?", word) and re.search(
                r"(/|\.(py|sh|md|toml|json|cff))$", word
            )
            if not is_path or word in MADE_FILES or word.startswith(MADE):
                continue
            assert (ROOT / word).exists() or (page.parent / word).exists(), f"`{word}` is not there"

    check_rows(CURRENT_PAGES, check)


def settable_flags() -> set[str]:
    text = FLAGS.read_text(encoding="utf-8")
    table = text[text.index("## What can be set") : text.index("## Keys of DeepSpeed")]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `--")]
    return {flag for cells in rows for flag in re.findall(r"--[\w-]+", " ".join(cells))}


def tool_flags() -> set[str]:
    folders = (ROOT / "tools", ROOT / "benchmarks", ROOT / "benchmarks" / "gpu", ROOT / "megatron" / "planner")
    sources = [
        *(path for folder in folders for path in folder.glob("*.py")),
        ROOT / "megatron" / "launch" / "options.py",
        ROOT / "megatron" / "generate" / "options.py",
        ROOT / "megatron" / "evaluation" / "options.py",
        ROOT / "examples" / "own_model.py",
    ]
    return {flag for source in sources for flag in re.findall(r'"(--[a-z][\w-]*)"', source.read_text(encoding="utf-8"))}


OF_OTHER_CODE_BASES = {"data.md", "migration.md", "checkpoints.md", "moe.md", "tuning.md"}
"""Pages that name flags of other trainers; tests/docs/test_migration.py checks each of these flags."""


def test_flags_are_in_the_table_of_flags_or_a_tools_own() -> None:
    ours = settable_flags() | tool_flags() | OF_OTHERS

    def check(page: Path) -> None:
        known = ours | set(foreign_flags()) if page.name in OF_OTHER_CODE_BASES else ours
        unknown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*(?![\w/-])", page.read_text(encoding="utf-8"))) - known
        assert not unknown

    check_rows(CURRENT_PAGES, check)


def without_the_launchers(flags: list[str]) -> list[str]:
    """Return the flags that the training script gets."""
    launch = [i for i, flag in enumerate(flags) if flag in OF_THE_LAUNCHER]
    parse_launch(
        [*(word for i in launch for word in flags[i : i + 2]), "pretrain_gpt2.py"], env={"DS_ACCELERATOR": "cpu"}
    )
    return [flag for i, flag in enumerate(flags) if i not in launch and i - 1 not in launch]


def check_command(words: list[str]) -> None:
    """Fail unless this command line is one that its program takes."""
    variables = []
    while re.match(r"[A-Za-z_]+=", words[0]):
        variables.append(words.pop(0).partition("=")[0])
    program, script, *flags = words
    if "MEGATRON_ACCELERATOR" in variables:  # its device is none here: tests/test_accelerators.py has one
        flags = ["cpu" if before == "--device" else flag for before, flag in zip(["", *flags], flags, strict=False)]
    for variable in set(variables) - OF_THE_PROGRAMS:
        assert re.search(rf"\$\{{{variable}:[-?]", (ROOT / script).read_text()), f"{script} has no {variable}"
    family = next((name for name in FAMILIES if re.search(rf"(run|pretrain)_{name}\b", script)), "gpt2")
    if program in ("srun", "torchrun"):
        assert any((ROOT / word).is_file() for word in words)
    elif script == "-m" and flags[0] == "megatron.launch":
        options = parse_launch(flags[1:], env={"DS_ACCELERATOR": "cpu"})
        if options.script in OWN_OPTIONS:
            size = {"WORLD_SIZE": str(options.nproc_per_node)}
            asked = {"RANK": "1"} if options.stdin else {}  # rank 0 looks at its standard input, which a test has not
            with mock.patch.dict(os.environ, {**size, **asked}):
                OWN_OPTIONS[options.script]("", options.script_args)
        else:
            parse(options.script_args, world_size=options.nproc_per_node)
    elif script in OWN_OPTIONS:
        OWN_OPTIONS[script]("", flags)
    elif script == "-m":
        assert importlib.util.find_spec(flags[0])
    elif script.startswith("tools/"):
        tool = load(ROOT / script)
        if script == "tools/plan.py" and "--load" in flags:  # the folder of an example need not be there
            at = flags.index("--load")
            flags = [*flags[:at], *flags[at + 2 :], "--model", "llama", "--num-layers", "2", "--hidden-size", "64"]
        known, rest = (
            tool.own_parser().parse_known_args(flags) if hasattr(tool, "own_parser") else (tool.parse_args(flags), [])
        )
        is_t5 = getattr(known, "model", None) == "t5"  # other tools have a --model, too
        parse(rest, world_size=1, family="t5" if is_t5 else "gpt2")
    else:
        assert (ROOT / script).is_file(), f"{script} is not there"
        if Path(script).name.startswith("run_") and script != "run_tests.sh":
            with mock.patch.dict(os.environ, {"RANK": "1"} if "--eval-tasks" in flags else {}):  # 0 looks for lm_eval
                parse(without_the_launchers(flags), world_size=4, family=family, accepts_model=True)
        elif script == "examples/own_model.py" or Path(script).name.startswith("pretrain_"):
            said = [
                word for before, word in zip(["", *flags], flags, strict=False) if word != "..." or "data" in before
            ]
            # dry: the files of an example need not be there
            parse([*said, "--dry-run"], world_size=4, family=family, accepts_model="gpt2" in script)


def test_commands_are_taken_by_their_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))  # a command may want it, and it need not be here

    def check(page: Path) -> None:
        for words in commands(page):
            try:
                check_command(list(words))
            except (SystemExit, ValueError) as error:
                raise AssertionError(f"{shlex.join(words)}: {error}") from error

    check_rows(PAGES, check)


def test_python_blocks_are_python() -> None:
    def check(page: Path) -> None:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S):
            ast.parse(block)

    check_rows(PAGES, check)


@pytest.mark.parametrize("english, chinese", PAIRS)
def test_both_languages_have_the_same_commands_and_code_blocks(english: str, chinese: str) -> None:
    assert list(commands(ROOT / chinese)) == list(commands(ROOT / english))
    fences = [
        re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / name).read_text(encoding="utf-8"), flags=re.M | re.S)
        for name in (english, chinese)
    ]
    assert fences[1] == fences[0]


@pytest.mark.parametrize("name", MORE_IN_CHINESE)
def test_a_chinese_page_with_more_commands_has_the_english_ones(name: str) -> None:
    english, chinese = ([*commands(ROOT / "docs" / folder / name)] for folder in ("", "zh"))
    assert english and [words for words in english if words not in chinese] == []


def tables(text: str) -> list[list[str]]:
    """Return the data rows of every table outside of fences."""
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return [table.splitlines()[2:] for table in re.findall(r"(?:^\|.*\|(?:\n|\Z))+", plain, flags=re.M)]


@pytest.mark.parametrize("name, idx, columns", [("planner.md", 2, 4), ("scaling.md", 1, 13)])
def test_both_languages_have_the_same_generated_tables(name: str, idx: int, columns: int) -> None:
    english, chinese = (tables((ROOT / "docs" / folder / name).read_text("utf-8"))[idx] for folder in ("", "zh"))
    assert {row.count("|") - 1 for row in english} == {columns}
    assert chinese == english


def test_a_blank_line_keeps_a_table_and_what_follows_apart() -> None:
    """Without it the line becomes a row."""

    def check(page: Path) -> None:
        assert re.findall(r"^\|.*\|\n(?=[^|\n]).*", prose(page), flags=re.M) == []

    check_rows(PAGES, check)


@pytest.mark.parametrize("page", ["docs/running.md", "docs/zh/running.md"])
def test_the_exit_codes_are_those_of_the_code(page: str) -> None:
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", (ROOT / page).read_text(encoding="utf-8"), flags=re.M)}
    assert codes == {0, 1, *EXIT_CODES.values()}


@pytest.mark.parametrize("page", ["docs/run_scripts.md", "docs/zh/run_scripts.md"])
def test_the_tables_of_variables_and_keys_agree_with_the_code(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    scripts = [(ROOT / name).read_text() for name in SCRIPTS.values()]
    variables = {name for script in scripts for name in re.findall(r"^([A-Za-z_]+)=\$\{\1:-", script, flags=re.M)}
    rows = re.findall(r"^\| (`[A-Za-z_]+`(?:, `[A-Za-z_]+`)*) \|", text, flags=re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    keys = named - variables
    assert named >= variables
    assert keys <= set(KNOWN), f"neither a variable nor a key of the JSON: {keys - set(KNOWN)}"


@pytest.mark.parametrize("page", ["docs/run_scripts.md", "docs/zh/run_scripts.md"])
def test_the_defaults_in_the_table_are_those_of_each_script(page: str) -> None:
    """A cell of the column of T5 that is empty says that the default is the other's."""
    text = (ROOT / page).read_text(encoding="utf-8")
    number = r"^([A-Z_]+)=\$\{\1:-\} +# (\d+)\b(?!\.)"
    gpt2, t5 = (dict(re.findall(number, (ROOT / name).read_text(), flags=re.M)) for name in SCRIPTS.values())
    rows = re.findall(r"^\| (`[A-Z_]+`(?:, `[A-Z_]+`)*) \| ([^|]*)\| ([^|]*)\|", text, flags=re.M)
    of_gpt2, of_t5 = {}, {}
    for row, first, second in rows:
        names = re.findall(r"`(\w+)`", row)
        for documented, cell in ((of_gpt2, first), (of_t5, second.strip() or first)):
            documented.update(zip(names, re.split(r"[,;；] *", cell.strip()), strict=False))
    assert gpt2 and t5
    assert {name: of_gpt2[name] for name in gpt2} == gpt2
    assert {name: of_t5[name] for name in t5} == t5


def test_what_the_pages_let_a_user_write_is_no_change_to_the_repository(tmp_path: Path) -> None:
    """git does not list it: else what belongs to a user stands beside what he changed in the code."""
    option = re.compile(r"(?:--output-prefix|--output|--out|--save|-o|CHECKPOINT_PATH)(?: +|=)(?!\w+://)([\w./-]+)")
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines() if line[:4] == "    "]
    written = sorted({name for line in lines for name in option.findall(line)})
    assert {"data/corpus", "runs/mine", "my-model"} <= set(written)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_bytes((ROOT / ".gitignore").read_bytes())
    named = [name if Path(name).suffix else f"{name}/file" for name in written]
    asked = [*named, "report.html", "megatron/data/sample_index.py", "tests/data/test_split.py"]
    done = subprocess.run(["git", "-C", tmp_path, "check-ignore", *asked], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == asked[:-2]
