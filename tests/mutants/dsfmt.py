"""Mistakes in DeepSpeed's own layout and in reading files that may hold code."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FILES = "tests/training/test_deepspeed_format_files.py"
RUNS = "tests/training/test_deepspeed_format.py::test_a_killed_and_resumed_run_is_bit_for_bit_the_same"
SAFE = "tests/tds/engine/test_safe_loading.py"
CRASH = f"{FILES}::test_a_kill_ahead_of_any_file_operation_leaves_a_whole_checkpoint_for_both_loaders"
STATE = f"{FILES}::test_the_optimizer_goes_on_from_its_state_to_the_bit_and_refuses_another"

DSFMT = (
    Mutant(
        "`latest` names a checkpoint ahead of its commit",
        "megatron/training/deepspeed_checkpoint.py",
        "    folders.commit_checkpoint(temporary, target)\n    return target\n",
        "    files.replace_bytes(root / folders.LATEST, target.name.encode())\n"
        "    folders.commit_checkpoint(temporary, target)\n    return target\n",
        (CRASH,),
    ),
    Mutant(
        "`latest` is written in place",
        "megatron/training/deepspeed_checkpoint.py",
        "        files.replace_bytes(root / folders.LATEST, path.name.encode())\n",
        "        files.write_bytes(root / folders.LATEST, path.name.encode())\n",
        (CRASH,),
    ),
    Mutant(
        "old checkpoints go before the pointer has left them",
        "megatron/training/deepspeed_checkpoint.py",
        "        files.replace_bytes(root / folders.LATEST, path.name.encode())\n"
        "        remove_old(tags_in(root), keep)\n",
        "        remove_old(tags_in(root), keep)\n"
        "        files.replace_bytes(root / folders.LATEST, path.name.encode())\n",
        (CRASH,),
    ),
    Mutant(
        "the newest is the one of the highest step",
        "megatron/training/deepspeed_checkpoint.py",
        "    return folders.in_turn(path for",
        "    return list(path for",
        (f"{FILES}::test_damage_is_found_and_an_older_one_taken_loudly",),
    ),
    Mutant(
        "a killed save is left for ever",
        "megatron/training/deepspeed_checkpoint.py",
        "    folders.remove_stale(root, _STALE)\n",
        "",
        (CRASH,),
    ),
    Mutant(
        "a file that could not be written counts as written",
        "megatron/training/deepspeed_checkpoint.py",
        "        if self._error is not None:\n            raise self._error\n",
        "",
        (f"{FILES}::test_a_save_that_fails_on_one_rank_is_nobodys",),
    ),
    Mutant(
        "a file holds the generators of its writer alone",
        "megatron/training/deepspeed_checkpoint.py",
        "    return {rank: states[rank] for rank in world.grid.data_context.ranks}\n",
        "    return dict.fromkeys(world.grid.data_context.ranks, device.rng_states(world.kind))\n",
        (f"{RUNS}[1-1-2 bf16]",),
    ),
    Mutant(
        "generators start anew",
        "megatron/training/deepspeed_checkpoint.py",
        'if taken.generators and layout_text(checkpoint.state["layout"], topology) is None:',
        "if False:",
        (f"{RUNS}[1-1-2 bf16]",),
    ),
    Mutant(
        "optimizer states load on other stages",
        "megatron/training/deepspeed_checkpoint.py",
        '    if checkpoint.state["layout"]["pipe"] != now.pipe:\n',
        "    if False:\n",
        (f"{FILES}::test_another_layout_gets_weights_or_an_error_with_both",),
    ),
    Mutant(
        "slices of another tensor size are taken",
        "megatron/training/deepspeed_checkpoint.py",
        'layout["tensor"] != now.tensor or ',
        "",
        (f"{FILES}::test_another_layout_gets_weights_or_an_error_with_both",),
    ),
    Mutant(
        "masters are the rounded weights",
        "megatron/optim/optimizer.py",
        "        master.copy_(saved)\n",
        "        pass\n",
        (STATE,),
    ),
    Mutant(
        "moments are rounded to the step's type",
        "megatron/optim/optimizer.py",
        "dtype=dtype, copy=True)",
        "dtype=torch.bfloat16 if value.dim() else dtype, copy=True)",
        (STATE,),
        refuses=True,
    ),
    Mutant(
        "the loss scale starts anew",
        "megatron/optim/optimizer.py",
        '    optimizer.scaler.load(state["scaler"])\n',
        "",
        (STATE,),
    ),
    Mutant(
        "weights alone are loaded under the old masters",
        "megatron/optim/main_params.py",
        "                master.copy_(self.part(parameter, parameter) if home is None else home)\n",
        "                pass\n",
        (STATE,),
    ),
    Mutant(
        "a stage that holds a tied weight alone wants the whole layer",
        "tds/engine/checkpointing.py",
        "            if layer.is_elsewhere:\n",
        "            if False:\n",
        (f"{RUNS}[2-2-4]",),
        refuses=True,
    ),
    Mutant(
        "files are read as DeepSpeed reads them",
        "tds/engine/checkpointing.py",
        '    os.environ[_FORCE] = "1"\n',
        '    os.environ[_FORCE] = "0"\n',
        (f"{SAFE}::test_an_object_off_the_list_is_named_and_nothing_of_it_is_run",),
    ),
    Mutant(
        "a file once trusted is trusted for ever",
        "tds/engine/checkpointing.py",
        "        finally:\n            engine_load.is_trusted = False\n",
        "        finally:\n            pass\n",
        (f"{SAFE}::test_the_engine_refuses_such_a_file_on_every_rank_and_reads_a_trusted_one",),
    ),
    Mutant(
        "a rank whose file is damaged leaves the others waiting for its word",
        "tds/engine/checkpointing.py",
        "        except Exception as error:  # whatever a damaged file makes torch or",
        "        except UnsafeFileError as error:  # whatever a damaged file makes torch or",
        ("tests/tds/engine/test_saving.py::test_what_one_rank_alone_cannot_read_stops_every_rank_at_once",),
        refuses=True,
    ),
    Mutant(
        "ranks load the checkpoint that each of them finds",
        "tds/engine/checkpointing.py",
        "    if len(ranks) > 1:\n",
        "    if len(ranks) > dist.get_world_size():\n",
        ("tests/tds/engine/test_saving.py::test_what_one_rank_alone_cannot_read_stops_every_rank_at_once",),
        refuses=True,
    ),
    Mutant(
        "the run's own engine reads as DeepSpeed does",
        "megatron/training/deepspeed_checkpoint.py",
        "    make_safe(engine.checkpoint_engine)\n",
        "",
        (f"{FILES}::test_a_file_that_would_run_code_is_refused_without_a_switch",),
        refuses=True,
    ),
)
