"""Tasks of lm_eval: which there are, files of one's own checked ahead, and the results of a run of them."""

from __future__ import annotations

import difflib
import importlib.util
import json
import random
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import ConfigError, DataError, JobError

if TYPE_CHECKING:
    from megatron.evaluation.lm import DecoderLM

OUTPUT_TYPES = ("loglikelihood", "loglikelihood_rolling", "generate_until", "multiple_choice")
"""How a task may ask a model."""
INSTALL = "pip install -e '.[eval]', or pip install 'lm_eval>=0.4.13,<0.5'"


@dataclass(frozen=True)
class Suite:
    """What is evaluated.

    Args:
        tasks: names of tasks, groups and tags.
        include_path: a folder of task files of one's own, beside those of lm_eval.
        num_fewshot: solved examples ahead of each question; None: what the task says.
        limit: of each task the first so many examples; None: all.
        apply_chat_template: render questions as a user's turns.
        system_instruction: with a chat template, the system message.
        fewshot_as_multiturn: with a chat template, solved examples are turns.
    """

    tasks: tuple[str, ...]
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    apply_chat_template: bool = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool = True


@dataclass(frozen=True)
class Results:
    """What was found.

    Args:
        metrics: of each task and group, in the order in which they were asked for; metric -> number, as "acc" or
            "acc,none_stderr".
        notes: of each task what lm_eval says of it: version, number of examples, of solved examples.
        samples: of each task the questions and answers one by one, where they were asked for.
    """

    metrics: dict[str, dict[str, float]]
    notes: dict[str, dict[str, Any]]
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def require_lm_eval(flag: str) -> None:
    """Check that lm_eval is installed.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"{flag} needs the package lm_eval, which is not installed here. Run {INSTALL}")


class LoadedTasks:
    """The tasks of a suite, opened: a task that cannot be read is an error ahead of the work.

    Args:
        kind: of the device whose random numbers are left as they are.

    Raises:
        ConfigError: lm_eval is missing, or has no such task.
        DataError: a task file, or the examples that it names, cannot be read.
    """

    def __init__(self, suite: Suite, kind: str = "cpu") -> None:
        require_lm_eval("--tasks")
        self.suite, self._kind = suite, kind
        check_task_folder(suite.include_path)
        with _quiet(), kept_random_state(self._kind):
            self._manager = self._opened()
            self._names = self._matched()
            try:
                loaded = self._manager.load(list(self._names))["tasks"]
            except Exception as error:  # whatever a task's own code raises
                raise DataError(
                    f"the tasks {', '.join(self._names)} cannot be opened: {type(error).__name__}: {error}. Their "
                    "examples come from the hub, unless the task file names files of your own"
                ) from error
        self.that_write = [name for name, task in loaded.items() if task.OUTPUT_TYPE == "generate_until"]
        """Names of the tasks that let the model write."""

    def _opened(self) -> Any:
        """Return the index of tasks: of the own folder alone where that has all, since thousands take long."""
        from lm_eval.tasks import TaskManager

        if self.suite.include_path is None:
            return TaskManager()
        own = str(self.suite.include_path)
        few = TaskManager(include_path=own, include_defaults=False)
        if all(few.match_tasks([name]) for name in self.suite.tasks) and not few.all_groups:  # they may hold theirs
            return few
        return TaskManager(include_path=own)

    def evaluate(self, lm: DecoderLM, *, keeps_samples: bool = False) -> Results:
        """Return what ``lm`` makes of the tasks.

        Random numbers of the process are left as they were: lm_eval sets all seeds.

        Raises:
            DataError: a task's own templates, functions or metrics fail; where is on standard error.
        """
        import lm_eval

        suite = self.suite
        with _quiet(), kept_random_state(self._kind):
            try:
                found = lm_eval.simple_evaluate(
                    model=lm,
                    tasks=list(self._names),
                    num_fewshot=suite.num_fewshot,
                    limit=suite.limit,
                    task_manager=self._manager,
                    apply_chat_template=suite.apply_chat_template,
                    system_instruction=suite.system_instruction,
                    fewshot_as_multiturn=suite.apply_chat_template and suite.fewshot_as_multiturn,
                    log_samples=keeps_samples,
                )
            except JobError:
                raise
            except Exception as error:  # whatever a task's own code raises
                traceback.print_exc()
                raise DataError(
                    f"the tasks {', '.join(self._names)} must run through, got {type(error).__name__}: {error}. "
                    "Correct their templates, functions or metrics"
                ) from error
        assert found is not None  # that is for ranks beyond 0
        return _results(found)

    def _matched(self) -> tuple[str, ...]:
        known = self._manager.all_tasks
        names = []
        for name in self.suite.tasks:
            if found := self._manager.match_tasks([name]):
                names += found
                continue
            near = difflib.get_close_matches(name, known, n=3)
            raise ConfigError(
                f"a task must be one of lm_eval's {len(known)} or of --include-path, got {name!r}. "
                + (f"Did you mean {' or '.join(near)}?" if near else "lm_eval ls tasks lists them")
            )
        return tuple(dict.fromkeys(names))


def _results(found: Mapping[str, Any]) -> Results:
    metrics, notes = dict[str, dict[str, float]](), dict[str, dict[str, Any]]()
    for name, values in {**found["results"], **found.get("groups", {})}.items():
        numbers = {key: float(value) for key, value in values.items() if _is_number(key, value)}
        metrics[name] = {key.removesuffix(",none"): value for key, value in numbers.items()}
        notes[name] = {
            "alias": str(values.get("alias", name)),
            "version": found.get("versions", {}).get(name),
            "num_fewshot": found.get("n-shot", {}).get(name),
            "num_samples": found.get("n-samples", {}).get(name, {}).get("effective"),
        }
    return Results(metrics, notes, dict(found.get("samples", {})))


def _is_number(key: str, value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and key not in ("sample_len", "sample_count")


@contextmanager
def kept_random_state(kind: str = "cpu") -> Iterator[None]:
    """Put the random states of Python, NumPy, torch's CPU and the device back afterwards."""
    import numpy as np

    from megatron import device

    states = random.getstate(), np.random.get_state(), device.rng_states(kind)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        device.set_rng_states(states[2])


@contextmanager
def _quiet() -> Iterator[None]:
    """Show of lm_eval's own log what is a warning or worse."""
    import logging

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "httpx")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)


# Task files of one's own, checked before lm_eval reads them: it names neither file nor line.


def check_task_folder(folder: Path | None) -> None:
    """Check the task files (.yaml) of ``folder`` and the JSONL files that they name.

    Raises:
        DataError: naming file and line of each thing that is wrong.
    """
    if folder is None:
        return
    if not folder.is_dir():
        raise DataError(f"--include-path must be a folder of task files, got {folder}, which is none")
    files = sorted(path for path in folder.rglob("*.yaml"))
    if not files:
        raise DataError(f"--include-path {folder} must hold task files that end in .yaml, got none")
    problems = [problem for path in files for problem in _problems_of_task(path)]
    if problems:
        raise DataError("\n".join(problems))


def _problems_of_task(path: Path) -> Iterator[str]:
    import yaml

    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        yield f"{path}:{mark.line + 1 if mark else 1}: must be YAML, got {error.problem or error.context}"
        return
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        yield f"{path}: must be YAML in UTF-8, got {error}"
        return
    if not isinstance(root, yaml.MappingNode):
        yield f"{path}:1: a task file must hold keys with values, as task: my_task, got none"
        return
    keys = {key.value: value for key, value in root.value if isinstance(key.value, str)}
    if not {"task", "group", "include"} & set(keys):
        yield f"{path}:{root.start_mark.line + 1}: a task file must name its task, got no key task (or group)"
    kind = keys.get("output_type")
    if kind is not None and kind.value not in OUTPUT_TYPES:
        at = f"{path}:{kind.start_mark.line + 1}"
        yield f"{at}: output_type must be one of {', '.join(OUTPUT_TYPES)}, got {kind.value!r}"
    source = keys.get("dataset_path")
    if source is not None and source.value == "json":
        yield from _problems_of_examples(path, keys.get("dataset_kwargs"))


def _problems_of_examples(path: Path, given: Any) -> Iterator[str]:
    """Yield what is wrong with the JSONL files of a task; other forms are left to the library ``datasets``."""
    import yaml

    inner = {key.value: value for key, value in given.value} if isinstance(given, yaml.MappingNode) else {}
    files = inner.get("data_files")
    if files is None:
        line = given.start_mark.line + 1 if given is not None else 1
        yield f"{path}:{line}: with dataset_path: json, dataset_kwargs must name data_files, got none"
        return
    for node in _scalars(files):
        place = Path(node.value)
        if "://" in node.value or "*" in node.value:
            continue
        if not place.is_file():
            yield (
                f"{path}:{node.start_mark.line + 1}: data_files must be there, got {node.value} (taken from the folder "
                "where the command runs). Correct the path"
            )
        elif place.suffix == ".jsonl":
            yield from _problems_of_lines(place)


def _scalars(node: Any) -> Iterator[Any]:
    if node.id == "scalar":
        yield node
        return
    for each in node.value:
        yield from _scalars(each[1] if isinstance(each, tuple) else each)


def _problems_of_lines(path: Path) -> Iterator[str]:
    first: set[str] | None = None
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                example = json.loads(line)
                problem = None if isinstance(example, dict) else f"a {type(example).__name__}"
            except ValueError as error:
                problem = str(error)
            if problem is not None:
                yield f"{path}:{number}: each line must be a JSON object, got {problem}. Correct it"
                return
            first = set(example) if first is None else first
            if missing := first - set(example):
                yield (
                    f"{path}:{number}: each example must have the fields of the first, got none for "
                    f"{', '.join(sorted(missing))}. Add them"
                )
                return


def read_suite(path: Path) -> Suite:
    """Return the suite that a YAML (or TOML, JSON) file describes; include_path is taken from the file's folder.

    Raises:
        ConfigError: naming file and line of what cannot be.
    """
    from megatron.arguments.config_file import read_file

    text = read_file(str(path))
    known = {each.name for each in fields(Suite)}
    for name in text.values:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{text.where(name)}: keys may be {', '.join(sorted(known))}, got {name}.{hint}")
    values = dict(text.values)
    tasks = values.pop("tasks", None)
    tasks = [tasks] if isinstance(tasks, str) else tasks
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, str) for task in tasks):
        raise ConfigError(f"{text.where('tasks')}: tasks must be a list of names, got {tasks!r}")
    for name, kind in _KINDS.items():
        value = values.get(name)
        if value is not None and (type(value) is not kind or (type(value) is int and value < 0)):
            raise ConfigError(f"{text.where(name)}: {name} must be of the kind {kind.__name__}, got {value!r}")
    if values.get("include_path") is not None:
        values["include_path"] = path.parent / values["include_path"]
    return Suite(tuple(tasks), **values)


_KINDS = {
    "num_fewshot": int, "limit": int, "apply_chat_template": bool, "fewshot_as_multiturn": bool,
    "system_instruction": str, "include_path": str,
}  # fmt: skip
