"""``Scan``: the flags of the command line and of --config, and the notes and problems of all sources."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Scan:
    """Command-line values, notes and problems of a script that trains ``family``.

    Args:
        values: field -> value.
        spelling: field -> "--flag value" as typed.
        from_file: field -> "file:line: key" of each value that comes from the file of --config.
        repeated: flags given more than once.
        unknown_tokenizer_type: value of --tokenizer-type that is not a known type.
        unknown: problem about an unknown flag or key -> the flag as typed; ``--ignore-unknown-flags`` turns these
            problems into warnings.
        extra_words: words for the parser of ``extra_args_provider``.
        ignored: flag or JSON key -> reason why it has no effect.
        converted: flag in another trainer's units -> its value.
        implied: field -> DeepSpeed's default for a key that the JSON omits.
        schedule: field -> value of the checkpoint's schedule, with ``--use-checkpoint-opt_param-scheduler``.
        follows_megatron: the script was written for one of Megatron's programs.
    """

    family: str = "gpt2"
    values: dict[str, Any] = field(default_factory=dict)
    spelling: dict[str, str] = field(default_factory=dict)
    from_file: dict[str, str] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unknown_tokenizer_type: str = ""
    unknown: dict[str, str] = field(default_factory=dict)
    extra_words: list[str] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    converted: dict[str, Any] = field(default_factory=dict)
    implied: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    follows_megatron: bool = False

    def add_unknown(self, problem: str, typed: str) -> None:
        """Record an unknown flag or key as a problem.

        Args:
            typed: the flag with its values.
        """
        self.problems.append(problem)
        self.unknown[problem] = typed

    def drop_unknown(self) -> dict[str, str]:
        """Remove the problems about unknown flags, and return flag as typed -> warning."""
        self.problems = [problem for problem in self.problems if problem not in self.unknown]
        hints = {typed: problem.partition("; ")[2] for problem, typed in self.unknown.items()}
        return {
            typed: f"--ignore-unknown-flags dropped {typed}" + (f"; {hint}" if hint.startswith("did you mean") else "")
            for typed, hint in hints.items()
        }

    def drop_ignored_of_file(self) -> None:
        """Remove settings of a run's config.json from the ignored flags: the file lists unused settings, too."""
        written = {self.spelling[name] for name in self.from_file if name in self.spelling}
        self.ignored = {name: reason for name, reason in self.ignored.items() if name not in written}

    def set(self, field: str, value: Any, spelling: str) -> None:
        """Set ``field``, or add a problem if another flag has set a different value.

        Args:
            spelling: "--flag value" as typed.
        """
        if self.values.get(field, value) != value:
            self.problems.append(
                f"{spelling} must agree with {self.spelling[field]}, got {field.replace('_', ' ')} {value} and "
                f"{self.values[field]}. Remove one of them"
            )
            return
        self.values[field] = value
        self.spelling.setdefault(field, spelling)
