"""Mistakes in what is said of flags that are not ours."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DEFAULTS = "tests/arguments/test_defaults.py"
PARSE = "tests/arguments/test_parse.py"
SHORT = "test_help_shows_in_a_line_each_the_flags_that_people_set_and_where_the_rest_is[gpt2]"
TABLE = "tests/arguments/test_flags_table.py"
PIPELINES = "tests/training/test_pipelines.py"
FIELDS = "tests/config/test_every_field.py"
ACTS = f"{FIELDS}::test_every_field_changes_what_it_is_named_for"
REGISTRY = "tests/models/test_registry.py"
SCHEDULES = "tests/optim/test_schedules.py"

FLAGS = (
    Mutant(
        "--help shows every flag",
        "megatron/arguments/parser.py",
        "if is_whole or option.short]",
        "]",
        (f"{PARSE}::{SHORT}",),
    ),
    Mutant(
        "--help does not say where the rest is",
        "megatron/arguments/parser.py",
        "epilog=SOURCES if is_whole else REST,",
        "epilog=SOURCES,",
        (f"{PARSE}::{SHORT}",),
    ),
    Mutant(
        "a family's section has another name in checkpoints",
        "megatron/config/config.py",
        "own = {self.family: self.own} if",
        'own = {"own": self.own} if',
        (f"{REGISTRY}::test_sections_in_a_checkpoint_have_the_names_that_they_always_had[t5]",),
    ),
    Mutant(
        "a family takes a flag that it says does not act",
        "megatron/config/model.py",
        "return option.name not in self.config.ADVICE and option",
        "return option",
        (f"{REGISTRY}::test_a_family_from_outside_has_flags_checks_and_costs",),
    ),
    Mutant(
        "what a family checks of its own is not asked",
        "megatron/arguments/validate.py",
        "    yield from config.own.check(config)\n",
        "",
        (f"{REGISTRY}::test_a_family_from_outside_has_flags_checks_and_costs",),
    ),
    Mutant(
        "flags of the families are those of the first call",
        "megatron/arguments/flag_values.py",
        "    return _options(tuple(FAMILIES.values()))",
        "    return _options(tuple(FAMILIES.values())[:5])",
        (f"{REGISTRY}::test_a_family_from_outside_has_flags_checks_and_costs",),
        refuses=True,
    ),
    Mutant(
        "a field is there that nothing reads",
        "megatron/config/optimizer.py",
        "    weight_decay: float = option(",
        '    lr_decay_power: float = option(1.0, "power of the decay", above=0)\n    weight_decay: float = option(',
        (f"{FIELDS}::test_every_field_is_named_once",),
    ),
    Mutant(
        "the part in which wsd decays is not handed to the schedule",
        "megatron/training/setup.py",
        "        wsd_decay_fraction=settings.wsd_decay_fraction,\n",
        "",
        (ACTS,),
    ),
    Mutant(
        "the base of rotary positions is not handed to the model",
        "megatron/models/common/model_args.py",
        "            base=self.rotary_base,\n",
        "            base=10000.0,\n",
        (ACTS,),
    ),
    Mutant(
        "the split into documents is not handed to the data",
        "megatron/training/global_vars.py",
        "        split_by=settings.split_by,\n",
        "",
        (ACTS,),
    ),
    Mutant(
        "the team at Weights & Biases is not handed on",
        "megatron/training/callbacks/wandb.py",
        "            entity=seeing.wandb_entity,\n",
        "",
        (f"{FIELDS}::test_a_field_that_acts_in_a_run_is_read_there",),
    ),
    Mutant(
        "the limit of a step is always the default",
        "megatron/config/parallel.py",
        "        return self.step_timeout or STEP_TIMEOUT_S\n",
        "        return STEP_TIMEOUT_S\n",
        (f"{FIELDS}::test_a_field_that_acts_in_a_run_is_read_there",),
    ),
    Mutant(
        "a style of decay takes no notice of its own parameter",
        "megatron/optim/lr_scheduler.py",
        "            return self.wsd_decay_fraction\n",
        "            return 0.1\n",
        (f"{SCHEDULES}::test_a_style_depends_on_what_its_formula_names_and_on_nothing_else",),
    ),
    Mutant(
        "a style of decay stands in no test of its own",
        "megatron/optim/lr_scheduler.py",
        '    "linear": _linear,\n',
        '    "linear": _linear,\n    "polynomial": _linear,\n',
        (f"{SCHEDULES}::test_every_style_is_a_choice_of_the_flag_has_a_formula_and_is_tried_half_way",),
    ),
    Mutant(
        "prompts of the recipe refuse a flag of the user",
        "megatron/arguments/flag_values.py",
        '        del defaults["sample_prompts"]\n',
        "",
        (f"{DEFAULTS}::test_default_prompts_step_back_where_none_can_be_read_and_are_told",),
        refuses=True,
    ),
    Mutant(
        "a rate of Adafactor's is given to AdamW",
        "megatron/arguments/flag_values.py",
        '        for name in ("optimizer", "lr"):  # a rate',
        '        for name in ("optimizer",):  # a rate',
        (
            f"{DEFAULTS}::"
            "test_an_optimizer_of_the_defaults_that_does_not_go_with_what_was_given_steps_back_with_its_rate",
        ),
    ),
    Mutant(
        "spans of the recipe refuse a length of the user",
        "megatron/arguments/flag_values.py",
        '    if "dec_seq_length" in explicit:  # the targets of the defaults may be longer\n',
        "    if False:\n",
        (f"{DEFAULTS}::test_a_given_length_of_targets_is_not_too_short_for_spans_that_are_defaults",),
        refuses=True,
    ),
    Mutant(
        "names that are half alike are guessed",
        "megatron/arguments/flag_values.py",
        "ALIKE = 0.8\n",
        "ALIKE = 0.55\n",
        (f"{PARSE}::test_a_name_that_is_no_slip_of_the_hand_gets_no_guess",),
    ),
    Mutant(
        "dashes make names alike",
        "megatron/arguments/flag_values.py",
        '{other.lstrip("-"): other for other in names}  # the dashes are no likeness\n'
        '    close = difflib.get_close_matches(name.lower().lstrip("-"), bare,',
        "{other: other for other in names}\n    close = difflib.get_close_matches(name.lower(), bare,",
        (f"{PARSE}::test_a_name_that_is_no_slip_of_the_hand_gets_no_guess",),
    ),
    Mutant(
        "slips of the hand are not guessed",
        "megatron/arguments/flag_values.py",
        "ALIKE = 0.8\n",
        "ALIKE = 0.9\n",
        (f"{PARSE}::test_a_value_that_cannot_be_used_is_told_with_its_cure",),
    ),
    Mutant(
        "a reason names a flag that is not there",
        "megatron/arguments/megatron_flags.py",
        "use --activation gated-gelu or gated-silu",
        "use --activation gated-gelu or --gated-silu",
        (f"{TABLE}::test_what_to_use_instead_is_there",),
    ),
    Mutant(
        "a flag that people use is known no more",
        "megatron/arguments/megatron_flags.py",
        "        --loss-on-targets-only",
        "        --losss-on-targets-only",
        (f"{TABLE}::test_the_document_is_what_the_table_says",),
    ),
    Mutant(
        "a flag has two rows",
        "megatron/arguments/neutral_flags.py",
        "--no-pin-cpu-grads --no-pin-cpu-params",
        "--no-pin-cpu-grads --no-pin-cpu-params --tp-comm-overlap",
        (f"{TABLE}::test_a_flag_has_one_row",),
    ),
    Mutant(
        "a flag that is refused is suggested",
        "megatron/arguments/flag_values.py",
        "[*known, *extras, *accepted_rows()], known)",
        "[*known, *extras, *accepted_rows(), *refused], known)",
        (f"{PARSE}::test_only_what_is_accepted_is_suggested",),
    ),
    Mutant(
        "sizes that a global batch changes are not said",
        "megatron/arguments/flag_values.py",
        "    if (size, samples // size) != usual:\n",
        "    if size * (samples // size) != samples:\n",
        (f"{PARSE}::test_a_global_batch_that_changes_the_recipes_sizes_is_said",),
    ),
    Mutant(
        "a trace that nobody named a folder for lies beside the run",
        "megatron/training/train.py",
        'pipeline_trace=str(place.folder / "trace")',
        'pipeline_trace=str(place.folder.with_name("trace"))',
        (f"{PIPELINES}::test_a_run_with_a_trace_leaves_its_picture_and_writes_the_bubble_of_each_interval",),
    ),
)
