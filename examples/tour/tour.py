"""Train a small model, break the training in five ways, and show how each fault is detected (docs/tour.md).

    bash run_gpt2.sh --tour
    bash run_gpt2.sh --tour kill nan

Sections: train, kill, nan, leak, gradient, host. Without names, all sections run, in about two minutes on two CPU
cores. kill and host are compared with train, so train runs before them. The text is Chinese in a Chinese locale.

Exit code 0: all sections ended as expected. 1: a fault was not detected; the tour ends there. 2: invalid arguments.
130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from os import environ
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

from examples.tour.job import ROOT, LimitError, adopt_orphans, run_commands
from examples.tour.sections import RUNS, Command, NotDetectedError, Section, make_sections, select_sections
from examples.tour.texts import Texts, choose_language

NUM_LAST_LINES = 15
INTERRUPTED = 130


def parse_args(sections: Sequence[Section], argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of the tour."""
    parser = argparse.ArgumentParser(
        prog="bash run_gpt2.sh --tour", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    names = [section.name for section in sections]
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(names)} (default: all)")
    parser.add_argument(
        "--limit-s", type=float, metavar="S", help="time limit of each command (default: 120, for train 240)"
    )
    flags = parser.parse_args(argv)
    if unknown := [name for name in flags.sections if name not in names]:
        parser.error(f"SECTION must be one of {', '.join(names)}, got {', '.join(unknown)}")
    if flags.limit_s is not None and not flags.limit_s > 0:
        parser.error(f"--limit-s must be greater than 0, got {flags.limit_s:g}")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections of the command line; return the exit code."""
    sections = make_sections()
    flags = parse_args(sections, argv)
    texts = Texts(choose_language(environ))
    sys.stdout.reconfigure(errors="replace")  # a terminal may not support Chinese
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    adopt_orphans()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(signum, exit_by_signal)
    try:
        return run_tour(select_sections(sections, flags.sections), flags.sections, flags.limit_s, console, texts)
    except KeyboardInterrupt:
        console.print(f"\n{texts('stopped')}")
        return INTERRUPTED


def exit_by_signal(signum: int, frame: object) -> NoReturn:
    """Exit with code 128 + ``signum``. ``run_commands`` then kills its processes."""
    sys.exit(128 + signum)


def run_tour(
    sections: Sequence[Section], names: Sequence[str], limit_s: float | None, console: Console, texts: Texts
) -> int:
    """Run the sections until one fails; return the exit code.

    Args:
        names: sections that the user named; empty for all.
        limit_s: time limit that replaces those of the sections.
    """
    start = time.monotonic()
    (ROOT / RUNS).mkdir(parents=True, exist_ok=True)
    console.print(texts("intro"))
    for number, section in enumerate(sections, 1):
        section_start = time.monotonic()
        console.print(f"\n{number}/{len(sections)}  {texts(f'{section.name}.title')} ({section.name})", style="bold")
        if names and section.name not in names:
            others = [other.name for other in sections if other.needs == section.name]
            console.print(texts("needed", name=section.name, others=", ".join(others)))
        console.print(texts(f"{section.name}.before"))
        log = Path()
        try:
            for group_idx, commands in enumerate(section.groups):
                logs = [RUNS / f"{section.name}-{group_idx + 1}-{idx + 1}.log" for idx in range(len(commands))]
                log = logs[0]
                run_group(commands, logs, limit_s or section.limit_s, console, texts)
            if section.compare is not None:
                show_lines(section.compare(ROOT / RUNS, texts), console)
        except NotDetectedError as error:
            console.print(texts("failed", reason=error, log=log), style="bold red")
            show_lines(read_lines(ROOT / log)[-NUM_LAST_LINES:], console)
            return 1
        console.print(texts(f"{section.name}.after"))
        page = f"docs/{'zh/' if texts.language == 'zh' else ''}{section.page}"
        seconds = time.monotonic() - section_start
        console.print(f"{texts('detected', seconds=seconds)} {texts('link', page=page)}", style="green")
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    summary = texts("summary", num=len(sections), minutes=minutes, seconds=seconds, folder=RUNS)
    console.print(f"\n{summary}", style="bold")
    return 0


def run_group(
    commands: Sequence[Command], logs: Sequence[Path], limit_s: float, console: Console, texts: Texts
) -> None:
    """Print commands, run them at the same time, and print the expected lines of the first one's output.

    Raises:
        NotDetectedError: a command returns an unexpected exit code, lacks an expected line, or exceeds the limit.
    """
    for command in commands:
        console.print(f"\n$ {command.line}", style="cyan")
        for folder in re.findall(r"--save (\S+)", command.line):
            shutil.rmtree(ROOT / folder, ignore_errors=True)  # of an earlier tour
    start = time.monotonic()
    with console.status(texts("running")) as status:

        def show_progress(log: Path) -> None:
            last_line = next(reversed(read_lines(log)), "")
            status.update(f"{texts('running')}, {time.monotonic() - start:.0f} s  {escape(last_line[:80])}")

        try:
            codes = run_commands(
                [command.line for command in commands], [ROOT / log for log in logs], limit_s, show_progress
            )
        except LimitError as error:
            raise NotDetectedError(texts("timeout", limit=error)) from error
    for command, log, code in zip(commands, logs, codes, strict=True):
        if code != command.code:
            raise NotDetectedError(texts("wrong code", expected=command.code, code=code))
        show_lines(find_lines(read_lines(ROOT / log), command.patterns, texts), console)


def find_lines(lines: Sequence[str], patterns: Sequence[str], texts: Texts) -> list[str]:
    """Return the first line that matches each pattern.

    Raises:
        NotDetectedError: no line matches a pattern.
    """
    found = []
    for pattern in patterns:
        line = next((line for line in lines if re.search(pattern, line)), None)
        if line is None:
            raise NotDetectedError(texts("missing line", pattern=pattern))
        found.append(line)
    return found


def read_lines(log: Path) -> list[str]:
    """Return the lines of an output, with paths relative to the repository."""
    return log.read_text(encoding="utf-8", errors="replace").replace(f"{ROOT}/", "").splitlines()


def show_lines(lines: Sequence[str], console: Console) -> None:
    """Print lines of an output."""
    for line in lines:
        console.print(f"  {line}", style="yellow")


if __name__ == "__main__":
    sys.exit(main())
