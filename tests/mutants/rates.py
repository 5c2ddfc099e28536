"""Rates by parameter, muP, MiniCPM's scalings, states of 16 bits and the z-loss, with a mistake in each rule."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_FILE = "tests/optim/test_param_rates.py"
LAST = f"{_FILE}::test_each_parameter_has_the_rate_of_the_last_pattern_that_fits_it"
COURSE = f"{_FILE}::test_all_rates_have_one_course_with_the_floor_in_the_ratio_of_the_peaks"
DECOUPLED = f"{_FILE}::test_decoupled_rates_are_megatrons"
LOGGED = f"{_FILE}::test_every_rank_logs_all_rates_as_groups_have_them"
TABLE = "megatron/optim/param_rates.py"
_Z = "tests/mpu/test_z_loss.py"
Z = f"{_Z}::test_loss_and_gradients_are_those_of_the_formula_on_any_ranks"
_ADAM, ADAM = "tests/optim/test_adam.py", "megatron/optim/adam.py"
FORMULA = f"{_ADAM}::test_steps_are_the_formula_to_the_bit"
COUNTED = "tests/training/test_zero_bytes.py::test_counted_bytes_of_a_rank_are_those_of_the_formulas"
BYTES = f"{_ADAM}::test_planner_and_start_table_count_two_bytes_a_state"
_MUP, _COORDINATES = "tests/models/common/test_mup.py", "tests/tools/test_coord_check.py"
VALUES = f"{_MUP}::test_matrices_of_layers_start_smaller_and_learn_slower_and_nothing_else_does"
LEVEL = f"{_COORDINATES}::test_activations_stay_level_over_widths_by_mup_alone"
FORMULAS = "tests/models/common/test_features.py::test_models_of_many_features_are_their_formulas"
WORDS = "megatron/models/common/language_model.py"

RATES = (
    Mutant("of two patterns the first counts", TABLE, "fitting[-1] if fitting", "fitting[0] if fitting", (LAST,)),
    Mutant("of two decays none counts", TABLE, "weight_decay=decays[-1])", "weight_decay=None)", (LAST,)),
    Mutant(
        "groups keep the rate of --lr",
        "megatron/optim/lr_scheduler.py",
        'if "peak_lr" in group else lr',
        "if not group else lr",
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
        "course.between(rate.lr, rate.min_lr).after(self._lr_position)",
        "course.between(rate.lr, rate.min_lr).after(self._lr_position + 1)",
        (LOGGED,),
    ),
    Mutant(
        "by muP matrices start as they do without",
        "megatron/models/common/parameters.py",
        "own / math.sqrt(width_multiplier) if",
        "own if",
        (LEVEL,),
    ),
    Mutant(
        "by muP embeddings start smaller, too",
        "megatron/models/common/parameters.py",
        'name.startswith("layers.") and len(shape) == 2',
        "len(shape) == 2",
        (VALUES,),
    ),
    Mutant(
        "by muP initial values are divided by m",
        "megatron/models/common/parameters.py",
        "own / math.sqrt(width_multiplier)",
        "own / width_multiplier",
        (LEVEL,),
    ),
    Mutant(
        "by muP matrices have the rate of --lr",
        TABLE,
        'ParamRate("hidden", settings.lr / m, settings.min_lr / m,',
        'ParamRate("hidden", settings.lr, settings.min_lr,',
        (LEVEL,),
    ),
    Mutant("by muP the floor stays", TABLE, "settings.min_lr / m,", "settings.min_lr,", (VALUES,)),
    Mutant("by muP epsilon stays", TABLE, "epsilon=settings.adam_eps / m)", "epsilon=settings.adam_eps)", (VALUES,)),
    Mutant(
        "by muP the head learns slower, too",
        TABLE,
        "is_hidden = parameter.dim() >= 2 and matrices_of(parameter) is not None",
        "is_hidden = parameter.dim() >= 2",
        (VALUES,),
    ),
    Mutant(
        "muP divides the rates of Muon's matrices",
        TABLE,
        'if m == 1.0 or settings.optimizer != "adamw":',
        "if m == 1.0:",
        (f"{_MUP}::test_muons_matrices_keep_their_rate_and_the_others_have_none_to_divide",),
    ),
    Mutant(
        "by muP logits are not divided",
        "megatron/config/decoder.py",
        "base = self.dim_model_base or self.mup_base_hidden_size",
        "base = self.dim_model_base",
        (LEVEL,),
    ),
    Mutant(
        "logits of the head are not scaled",
        WORDS,
        "x = x if sizes.logit_multiplier == 1.0 else x * sizes.logit_multiplier",
        "x = x",
        (FORMULAS,),
    ),
    Mutant(
        "text is generated from logits that are not scaled",
        WORDS,
        "entered = enter_tensor_region(x * sizes.logit_multiplier, **place.cut)",
        "entered = enter_tensor_region(x, **place.cut)",
        (f"{_MUP}::test_text_is_generated_from_the_same_logits",),
    ),
    Mutant(
        "the embedding is not multiplied",
        WORDS,
        "x = x if self.multiplier == 1.0 else x * self.multiplier",
        "x = x if self.multiplier else x * self.multiplier",
        (FORMULAS,),
    ),
    Mutant(
        "the residual scale is divided by the number of layers",
        "megatron/config/decoder.py",
        'self.residual_scale / math.sqrt(getattr(self, "num_layers", 1))',
        'self.residual_scale / getattr(self, "num_layers", 1)',
        (FORMULAS,),
    ),
    Mutant(
        "muP's scores are divided by the root of the head's size",
        "megatron/config/decoder.py",
        "math.sqrt(self.mup_base_head_dim) / size if",
        "math.sqrt(self.mup_base_head_dim / size) if",
        (FORMULAS,),
    ),
    Mutant(
        "a base that is the width makes another model",
        "megatron/config/config.py",
        "if values.get(name) == model.hidden_size}",
        "if values.get(name) is model}",
        (f"{_MUP}::test_weights_of_another_base_width_are_of_another_model",),
        refuses=True,
    ),
    Mutant(
        "Megatron's --use-mup leaves scores as they are",
        "megatron/arguments/translate.py",
        'values.setdefault("mup_base_head_dim", 1)',
        'values.setdefault("mup_base_head_dim", 0)',
        (f"{_MUP}::test_megatrons_names_mean_what_they_mean_there",),
    ),
    Mutant(
        "the update is made with rounded states",
        ADAM,
        "    w.mul_(1 - lr",
        "    m, v = m.to(mean.dtype).to(w.dtype), v.to(square.dtype).to(w.dtype)\n    w.mul_(1 - lr",
        (FORMULA,),
    ),
    Mutant(
        "moments are computed in bf16",
        ADAM,
        "m = mean.to(w.dtype).mul_(b1).add_(g * (1 - b1))",
        "m = mean.clone().mul_(b1).add_(g * (1 - b1)).to(w.dtype)",
        (FORMULA,),
    ),
    Mutant("the squares are not corrected", ADAM, ".mul_(1 / math.sqrt(1 - b2**number))", "", (FORMULA,)),
    Mutant(
        "decay comes behind the update", ADAM, 'w.mul_(1 - lr * group["weight_decay"]).sub_(', "w.sub_(", (FORMULA,)
    ),
    Mutant(
        "states in bf16 are fp32",
        ADAM,
        "dtype = self.state_dtypes.get(name, master.dtype)",
        "dtype = master.dtype",
        (COUNTED,),
    ),
    Mutant(
        "states in bf16 are counted as fp32",
        "megatron/models/common/memory.py",
        'moments = (2 - num_bf16_states) * wide + num_bf16_states * BYTES["bf16"]',
        "moments = 2 * wide",
        (COUNTED,),
    ),
    Mutant(
        "the planner forgets the format of states",
        "megatron/planner/layout.py",
        "num_bf16_states=len(optimizer.bf16_states),",
        "num_bf16_states=0,",
        (BYTES,),
    ),
    Mutant(
        "a state that is loaded has the type of its master",
        "megatron/optim/optimizer.py",
        "_beside(master, dtypes.get(key, master.dtype), value)",
        "_beside(master, master.dtype, value)",
        (f"{_ADAM}::test_a_state_of_torchs_form_goes_into_either_format",),
    ),
    Mutant(
        "the gradient of the z-loss is half as large",
        "megatron/mpu/cross_entropy.py",
        "return 1 + 2 * z_loss * log_z",
        "return 1 + z_loss * log_z",
        (Z,),
    ),
    Mutant(
        "log Z is that of a rank's largest logit",
        "megatron/mpu/cross_entropy.py",
        "losses, denominator.log() + largest, z_loss)",
        "losses, denominator.log(), z_loss)",
        (Z,),
    ),
    Mutant(
        "in chunks the z-loss has no gradient",
        "megatron/mpu/linear_cross_entropy.py",
        "of_softmax = factor * slopes_of_softmax(log_z, z_loss) if z_loss else factor",
        "of_softmax = factor",
        (Z,),
    ),
    Mutant(
        "in chunks tokens that do not count have a z-loss",
        "megatron/mpu/linear_cross_entropy.py",
        "self.squares += (z_loss * log_z.square() * weights).sum()",
        "self.squares += (z_loss * log_z.square()).sum()",
        (Z,),
    ),
    Mutant(
        "the z-loss is part of evaluations",
        WORDS,
        "z_loss = sizes.z_loss if torch.is_grad_enabled() else 0.0",
        "z_loss = sizes.z_loss",
        (Z,),
    ),
)
