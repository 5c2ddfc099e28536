"""Mistakes in what a run writes down of itself, in its profile, and in the page that tools/report.py makes of it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SEEN = "tests/training/test_seeing.py"
NORMS = f"{SEEN}::test_norms_of_layers_and_what_was_read_are_the_same_in_every_layout"
NUMBERS = f"{SEEN}::test_each_number_of_a_record_is_what_the_page_says"
EVENTS = f"{SEEN}::test_tensorboard_shows_each_number_of_the_file_under_kind_and_name"
WANDB = f"{SEEN}::test_wandb_gets_each_number_by_the_step_that_it_is_of"
PROFILE = "tests/training/test_profile.py"
PAGE = "tests/tools/test_report.py"

OF_REPORTS = (
    Mutant(
        "events of TensorBoard are a step late",
        "megatron/training/metrics.py",
        "self._events.add_scalar(name, number, step)",
        "self._events.add_scalar(name, number, step + 1)",
        (EVENTS,),
    ),
    Mutant(
        "TensorBoard gets the records of training alone",
        "megatron/training/metrics.py",
        "        numbers = dict(flat(kind, values))\n",
        '        numbers = dict(flat(kind, values)) if kind == "train" else {}\n',
        (EVENTS,),
    ),
    Mutant(
        "TensorBoard gets no numbers of layers and stages",
        "megatron/training/metrics.py",
        "if isinstance(value, dict) else",
        "if isinstance(value, list) else",
        (EVENTS,),
    ),
    Mutant(
        "norms of layers count what tensor ranks share on each",
        "megatron/training/layer_norms.py",
        "in optimizer.counted_gradients():",
        "in optimizer.gradients():",
        (NORMS,),
    ),
    Mutant(
        "norms of layers are of one stage",
        "megatron/training/layer_norms.py",
        "optimizer.gradient_holders), optimizer.model_group)",
        "optimizer.gradient_holders), optimizer.tensor_group)",
        (NORMS,),
    ),
    Mutant(
        "norms of layers are of a replica's parts",
        "megatron/training/layer_norms.py",
        "all_reduce(all_reduce(squares, optimizer.gradient_holders), optimizer.model_group)",
        "all_reduce(squares, optimizer.model_group)",
        (f"{SEEN}::test_norms_of_layers_are_the_same_in_more_layouts[data 2, ZeRO 2]",),
    ),
    Mutant(
        "tokens of a corpus are its samples",
        "megatron/training/data_order.py",
        "{name: tokens_per_sample * samples for",
        "{name: samples for",
        (NUMBERS,),
    ),
    Mutant(
        "waits for checkpoints are told again and again",
        "megatron/training/saves.py",
        "        stalled_s, self.stalled_s = self.stalled_s, 0.0\n",
        "        stalled_s = self.stalled_s\n",
        (f"{SEEN}::test_waits_for_saves_are_told_once",),
    ),
    Mutant(
        "memory is that of rank 0 alone",
        "megatron/training/of_ranks.py",
        '    return {f"stage {stage}": join([values[rank] for rank in each]) for stage, each in enumerate(ranks)}\n',
        '    return {"stage 0": join([values[rank] for rank in ranks[0]])}\n',
        (NUMBERS,),
    ),
    Mutant(
        "wandb draws over the order of records",
        "megatron/training/wandb_run.py",
        '{**numbers, f"{kind}/step": step}',
        "{**numbers}",
        (WANDB,),
    ),
    Mutant(
        "a run that goes on is a new one at wandb",
        "megatron/training/wandb_run.py",
        "            id=_id_in(folder),\n",
        "            id=None,\n",
        (f"{SEEN}::test_a_run_that_goes_on_is_the_same_at_wandb_and_has_the_folders_name",),
    ),
    Mutant(
        "the profile begins a step late",
        "megatron/training/profiling.py",
        "        if step + 1 not in self.steps:\n",
        "        if step not in self.steps:\n",
        (f"{PROFILE}::test_a_profile_holds_its_steps_of_every_rank_and_changes_no_bit",),
    ),
    Mutant(
        "steps of a profile are counted on after a way back",
        "megatron/training/profiling.py",
        "        made.start()\n        self._taken = 0\n",
        "        made.start()\n",
        (f"{PROFILE}::test_a_run_that_goes_back_has_a_profile_of_its_last_way_through",),
    ),
    Mutant(
        "the profile runs on when the run has gone back",
        "megatron/training/profiling.py",
        "            self._drop()",
        "            pass",
        (f"{PROFILE}::test_a_run_that_goes_back_has_a_profile_of_its_last_way_through",),
    ),
    Mutant(
        "a rank whose profile fails leaves the others waiting",
        "megatron/training/profiling.py",
        "    except Exception as error:\n",
        "    except (OSError, RuntimeError) as error:\n",
        (f"{PROFILE}::test_a_profile_that_fails_on_one_rank_is_that_of_the_others",),
        refuses=True,
    ),
    Mutant(
        "a run waits for wandb without an end",
        "megatron/training/wandb_run.py",
        "        ending.join(PATIENCE_S)\n",
        "        ending.join()\n",
        (f"{SEEN}::test_no_run_waits_for_wandb_without_an_end",),
    ),
    Mutant(
        "ranks leave while rank 0 sends its last numbers",
        "megatron/training/run.py",
        "    if this.world.grid.host.size > 1:\n",
        "    if this.world.grid.host.size > 2:\n",
        (f"{SEEN}::test_no_rank_leaves_while_rank_0_closes_its_reports",),
    ),
    Mutant(
        "norms of layers are told of gradients that were thrown away",
        "megatron/training/telling.py",
        "math.isfinite(result.loss) or not result.is_refused",
        "True",
        ("tests/training/test_guard.py::test_a_bad_step_is_left_out_on_all_ranks[replicas no number]",),
    ),
    Mutant(
        "every rank must have wandb",
        "megatron/config/seeing.py",
        ' and os.environ.get("RANK", "0") == "0"',
        "",
        ("tests/config/test_seeing.py::test_wandb_that_is_not_installed_is_told_with_all_other_problems",),
        refuses=True,
    ),
    Mutant(
        "a damaged run takes the page from others",
        "tools/report.py",
        "        return page([_drawable(run, points) for run in runs], title, points)\n",
        "        raise\n",
        (f"{PAGE}::test_a_damaged_run_does_not_take_the_page_from_others",),
        refuses=True,
    ),
    Mutant(
        "half a character of a run ends the page",
        "tools/report.py",
        ', errors="replace"',
        "",
        (f"{PAGE}::test_a_damaged_run_does_not_take_the_page_from_others",),
    ),
    Mutant(
        "operators of a profile are those of the last rank",
        "megatron/training/operators.py",
        "so_far.calls + calls, so_far.host_us + host_us,",
        "calls, host_us,",
        (f"{PROFILE}::test_times_of_ranks_add_up_and_devices_count_first",),
    ),
    Mutant(
        "text of a run is not escaped",
        "tools/report_parts/markup.py",
        'Html(escape("" if value is None else str(value)))',
        'Html("" if value is None else str(value))',
        (f"{PAGE}::test_text_of_a_run_cannot_act",),
    ),
    Mutant(
        "data can end their script",
        "tools/report_parts/page.py",
        '    return text.replace("<", "\\\\u003c").replace(',
        "    return text.replace(",
        (f"{PAGE}::test_text_of_a_run_cannot_act",),
    ),
    Mutant(
        "spikes of the norm are thinned away",
        "tools/report_parts/columns.py",
        'EXTREMES_OF = ("loss", "grad_norm")',
        'EXTREMES_OF = ("loss", "learning_rate")',
        (f"{PAGE}::test_thousands_of_steps_become_few_points_with_every_spike",),
    ),
    Mutant(
        "idle time of a stage leaves its work out",
        "tools/report_parts/stages.py",
        "max(1 - work_s / step_s, 0.0)",
        "max(work_s / step_s, 0.0)",
        (f"{PAGE}::test_idle_time_of_a_stage_is_what_its_work_leaves_of_the_step",),
    ),
    Mutant(
        "MFU counts the causal half in full",
        "megatron/cost/gpt2.py",
        "(6.0 if causal else 12.0) * scores",
        "12.0 * scores",
        ("tests/training/test_flops.py::test_flops_are_those_that_torch_counts[gpt2]",),
    ),
    Mutant(
        "the page draws no curves",
        "tools/report_parts/chart.js",
        "    pen.stroke();\n    if (drawn === 1)",
        "    if (drawn === 1)",
        ("tests/tools/test_report_picture.py",),
    ),
)
