"""Rates by parameter, muP, MiniCPM's scalings, states of 16 bits and the z-loss, with a mistake in each rule."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_FILE = "tests/optim/test_param_rates.py"
LAST = f"{_FILE}::test_each_parameter_has_the_rate_of_the_last_pattern_that_fits_it"
COURSE = f"{_FILE}::test_all_rates_have_one_course_with_the_floor_in_the_ratio_of_the_peaks"
DECOUPLED = f"{_FILE}::test_decoupled_rates_are_megatrons"
LOGGED = f"{_FILE}::test_every_rank_logs_all_rates_as_groups_have_them"
TABLE = "megatron/optim/param_rates.py"

RATES = (
    Mutant("of two patterns the first counts", TABLE, "fitting[-1] if fitting", "fitting[0] if fitting", (LAST,)),
    Mutant("of two decays none counts", TABLE, "weight_decay=decays[-1])", "weight_decay=None)", (LAST,)),
    Mutant(
        "groups keep the rate of --lr",
        "megatron/optim/lr_scheduler.py",
        'has_own = "peak_lr" in group',
        "has_own = False",
        (LAST,),
    ),
    Mutant(
        "every rate ends at --min-lr",
        TABLE,
        "    return settings.min_lr * (lr / settings.lr)",
        "    return settings.min_lr",
        (COURSE,),
    ),
    Mutant(
        "decoupled rates end in the ratio",
        TABLE,
        "settings.min_lr if floor is None else floor)",
        "_floor(settings, settings.decoupled_lr) if floor is None else floor)",
        (DECOUPLED,),
    ),
    Mutant(
        "--lr-embedding is of positions, too",
        TABLE,
        'WORD_TABLE, HEAD = "embedding.word.weight"',
        'WORD_TABLE, HEAD = "embedding.*"',
        (DECOUPLED,),
        refuses=True,
    ),
    Mutant(
        "a pattern that fits nothing is passed over",
        TABLE,
        "if not any(fnmatchcase(name, pattern) for name in every):",
        "if not every:",
        (f"{_FILE}::test_a_pattern_that_fits_nothing_is_refused_with_near_names",),
    ),
    Mutant(
        "a tied head has a rate of its own",
        "megatron/arguments/validate.py",
        "config.model.untie_embeddings or settings.lr_head == settings.lr_embedding",
        "True",
        (f"{_FILE}::test_what_cannot_be_is_refused",),
    ),
    Mutant(
        "the rate that is logged is that of the next step",
        "megatron/training/trainer.py",
        "course.between(rate.lr, rate.min_lr).at(self._updates)",
        "course.between(rate.lr, rate.min_lr).at(self.progress.updates)",
        (LOGGED,),
    ),
)
