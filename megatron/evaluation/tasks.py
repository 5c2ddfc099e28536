"""lm_eval tasks: available tasks, checks of the user's task files, and evaluation results."""

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
"""Request types of tasks."""
INSTALL_COMMAND = "pip install -e '.[eval]', or pip install 'lm_eval>=0.4.13,<0.5'"


@dataclass(frozen=True)
class Suite:
    """The tasks to evaluate and their settings.

    Args:
        tasks: names of tasks, groups and tags.
        include_path: a folder with the user's task files, in addition to lm_eval's.
        num_fewshot: solved examples before each question; None: the task's default.
        limit: examples per task, taken from the start; None: all.
        apply_chat_template: render questions as user turns.
        system_instruction: system message, used with a chat template.
        fewshot_as_multiturn: render solved examples as separate turns, used with a chat template.
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
    """Evaluation results.

    Args:
        metrics: for each task and group, in the requested order: metric -> value, such as "acc" or "acc,none_stderr".
        notes: for each task, lm_eval's description: version, example count and solved example count.
        samples: for each task, the individual questions and answers, if requested.
    """

    metrics: dict[str, dict[str, float]]
    notes: dict[str, dict[str, Any]]
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def require_lm_eval(flag: str) -> None:
    """Check that lm_eval is installed.

    Raises:
        ConfigError: lm_eval is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"{flag} needs the package lm_eval, which is not installed. Run {INSTALL_COMMAND}")


class LoadedTasks:
    """The loaded tasks of a suite; loading fails before the evaluation if a task cannot be read.

    Args:
        device_type: device type whose random state is preserved.

    Raises:
        ConfigError: lm_eval is missing, or has no such task.
        DataError: a task file, or the examples that it names, cannot be read.
    """

    def __init__(self, suite: Suite, device_type: str = "cpu") -> None:
        require_lm_eval("--tasks")
        self.suite, self._device_type = suite, device_type
        check_task_folder(suite.include_path)
        with _quiet_loggers(), preserve_random_state(self._device_type):
            self._manager = self._open_manager()
            self._names = self._match_names()
            try:
                loaded = self._manager.load(list(self._names))["tasks"]
            except Exception as error:  # a task's code can raise anything
                raise DataError(
                    f"the tasks {', '.join(self._names)} cannot be loaded: {type(error).__name__}: {error}. Their "
                    "examples are downloaded from the hub, unless the task file names local files"
                ) from error
        self.generating_tasks = [name for name, task in loaded.items() if task.OUTPUT_TYPE == "generate_until"]
        """Names of the tasks that generate text."""

    def _open_manager(self) -> Any:
        """Open lm_eval's task index.

        If the user's folder has all tasks, only this folder is indexed, because indexing lm_eval's tasks is slow.
        """
        from lm_eval.tasks import TaskManager

        if self.suite.include_path is None:
            return TaskManager()
        folder = str(self.suite.include_path)
        folder_manager = TaskManager(include_path=folder, include_defaults=False)
        if (
            all(folder_manager.match_tasks([name]) for name in self.suite.tasks) and not folder_manager.all_groups
        ):  # groups may refer to lm_eval's tasks
            return folder_manager
        return TaskManager(include_path=folder)

    def evaluate(self, lm: DecoderLM, *, should_keep_samples: bool = False) -> Results:
        """Evaluate ``lm`` on the tasks.

        The process's random states are preserved; lm_eval sets all seeds.

        Raises:
            DataError: a task's templates, functions or metrics fail; the traceback is on standard error.
        """
        import lm_eval

        suite = self.suite
        with _quiet_loggers(), preserve_random_state(self._device_type):
            try:
                lm_eval_results = lm_eval.simple_evaluate(
                    model=lm,
                    tasks=list(self._names),
                    num_fewshot=suite.num_fewshot,
                    limit=suite.limit,
                    task_manager=self._manager,
                    apply_chat_template=suite.apply_chat_template,
                    system_instruction=suite.system_instruction,
                    fewshot_as_multiturn=suite.apply_chat_template and suite.fewshot_as_multiturn,
                    log_samples=should_keep_samples,
                )
            except JobError:
                raise
            except Exception as error:  # a task's code can raise anything
                traceback.print_exc()
                raise DataError(
                    f"the tasks {', '.join(self._names)} failed: {type(error).__name__}: {error}. "
                    "Correct their templates, functions or metrics"
                ) from error
        assert lm_eval_results is not None  # lm_eval returns None only on ranks other than 0
        return _make_results(lm_eval_results)

    def _match_names(self) -> tuple[str, ...]:
        all_tasks = self._manager.all_tasks
        names = []
        for name in self.suite.tasks:
            if matches := self._manager.match_tasks([name]):
                names += matches
                continue
            suggestions = difflib.get_close_matches(name, all_tasks, n=3)
            raise ConfigError(
                f"a task must be one of lm_eval's {len(all_tasks)} or of --include-path, got {name!r}. "
                + (f"Did you mean {' or '.join(suggestions)}?" if suggestions else "Run lm_eval ls tasks to list them")
            )
        return tuple(dict.fromkeys(names))


def _make_results(lm_eval_results: Mapping[str, Any]) -> Results:
    metrics, notes = dict[str, dict[str, float]](), dict[str, dict[str, Any]]()
    for name, values in {**lm_eval_results["results"], **lm_eval_results.get("groups", {})}.items():
        numeric = {key: float(value) for key, value in values.items() if _is_number(key, value)}
        metrics[name] = {key.removesuffix(",none"): value for key, value in numeric.items()}
        notes[name] = {
            "alias": str(values.get("alias", name)),
            "version": lm_eval_results.get("versions", {}).get(name),
            "num_fewshot": lm_eval_results.get("n-shot", {}).get(name),
            "num_samples": lm_eval_results.get("n-samples", {}).get(name, {}).get("effective"),
        }
    return Results(metrics, notes, dict(lm_eval_results.get("samples", {})))


def _is_number(key: str, value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and key not in ("sample_len", "sample_count")


@contextmanager
def preserve_random_state(device_type: str = "cpu") -> Iterator[None]:
    """Restore random states for Python, NumPy, torch's CPU generator and the device on exit."""
    import numpy as np

    from megatron import device

    states = random.getstate(), np.random.get_state(), device.rng_states(device_type)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        device.set_rng_states(states[2])


@contextmanager
def _quiet_loggers() -> Iterator[None]:
    """Log only errors from lm_eval and its libraries."""
    import logging

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "httpx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# Checks of the user's task files before lm_eval reads them, because its errors name neither file nor line.


def check_task_folder(folder: Path | None) -> None:
    """Check the task files (.yaml) in ``folder`` and the JSONL files that they name.

    Raises:
        DataError: files are invalid; the message lists each problem with file and line.
    """
    if folder is None:
        return
    if not folder.is_dir():
        raise DataError(f"--include-path must be a folder of task files, got {folder}, which is not a folder")
    files = sorted(path for path in folder.rglob("*.yaml"))
    if not files:
        raise DataError(f"--include-path {folder} must contain task files that end in .yaml, got none")
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
        yield f"{path}:1: a task file must contain keys with values, such as task: my_task, got none"
        return
    keys = {key.value: value for key, value in root.value if isinstance(key.value, str)}
    if not {"task", "group", "include"} & set(keys):
        yield f"{path}:{root.start_mark.line + 1}: a task file must name its task, got no key task (or group)"
    output_type = keys.get("output_type")
    if output_type is not None and output_type.value not in OUTPUT_TYPES:
        location = f"{path}:{output_type.start_mark.line + 1}"
        yield f"{location}: output_type must be one of {', '.join(OUTPUT_TYPES)}, got {output_type.value!r}"
    source = keys.get("dataset_path")
    if source is not None and source.value == "json":
        yield from _problems_of_examples(path, keys.get("dataset_kwargs"))


def _problems_of_examples(path: Path, dataset_kwargs: Any) -> Iterator[str]:
    """Yield an error message for each problem in a task's JSONL files; ``datasets`` checks other formats."""
    import yaml

    options = (
        {key.value: value for key, value in dataset_kwargs.value}
        if isinstance(dataset_kwargs, yaml.MappingNode)
        else {}
    )
    files = options.get("data_files")
    if files is None:
        line = dataset_kwargs.start_mark.line + 1 if dataset_kwargs is not None else 1
        yield f"{path}:{line}: with dataset_path: json, dataset_kwargs must name data_files, got none"
        return
    for node in _scalar_nodes(files):
        data_path = Path(node.value)
        if "://" in node.value or "*" in node.value:
            continue
        if not data_path.is_file():
            yield (
                f"{path}:{node.start_mark.line + 1}: data_files must exist, got {node.value} (relative to the folder "
                "in which the command runs). Correct the path"
            )
        elif data_path.suffix == ".jsonl":
            yield from _problems_of_lines(data_path)


def _scalar_nodes(node: Any) -> Iterator[Any]:
    if node.id == "scalar":
        yield node
        return
    for child in node.value:
        yield from _scalar_nodes(child[1] if isinstance(child, tuple) else child)


def _problems_of_lines(path: Path) -> Iterator[str]:
    first_fields: set[str] | None = None
    with open(path, encoding="utf-8") as file:
        for line_number, line in enumerate(file, 1):
            try:
                example = json.loads(line)
                problem = None if isinstance(example, dict) else f"a {type(example).__name__}"
            except ValueError as error:
                problem = str(error)
            if problem is not None:
                yield f"{path}:{line_number}: each line must be a JSON object, got {problem}. Correct it"
                return
            first_fields = set(example) if first_fields is None else first_fields
            if missing_fields := first_fields - set(example):
                yield (
                    f"{path}:{line_number}: each example must have the fields of the first one, missing: "
                    f"{', '.join(sorted(missing_fields))}. Add them"
                )
                return


def read_suite(path: Path) -> Suite:
    """Read the suite in a YAML (or TOML, JSON) file; include_path is relative to the file's folder.

    Raises:
        ConfigError: a setting is invalid; the message names file and line.
    """
    from megatron.arguments.config_file import read_file

    config_file = read_file(str(path))
    names = {suite_field.name for suite_field in fields(Suite)}
    for name in config_file.values:
        if name not in names:
            matches = difflib.get_close_matches(name, sorted(names), n=1)
            hint = f" Did you mean {matches[0]}?" if matches else ""
            raise ConfigError(
                f"{config_file.location(name)}: keys may be {', '.join(sorted(names))}, got {name}.{hint}"
            )
    values = dict(config_file.values)
    tasks = values.pop("tasks", None)
    tasks = [tasks] if isinstance(tasks, str) else tasks
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, str) for task in tasks):
        raise ConfigError(f"{config_file.location('tasks')}: tasks must be a list of names, got {tasks!r}")
    for name, field_type in _SETTING_TYPES.items():
        value = values.get(name)
        if value is not None and (type(value) is not field_type or (type(value) is int and value < 0)):
            raise ConfigError(
                f"{config_file.location(name)}: {name} must be of type {field_type.__name__}, got {value!r}"
            )
    if values.get("include_path") is not None:
        values["include_path"] = path.parent / values["include_path"]
    return Suite(tuple(tasks), **values)


_SETTING_TYPES = {
    "num_fewshot": int, "limit": int, "apply_chat_template": bool, "fewshot_as_multiturn": bool,
    "system_instruction": str, "include_path": str,
}  # fmt: skip
