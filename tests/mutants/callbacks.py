"""Mistakes in when hooks are called, on which ranks, and in what a checkpoint keeps of callbacks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TESTS = "tests/training/callbacks/test_callback.py"
_TRAINER = "megatron/training/trainer.py"
_CHECKPOINTER = "megatron/training/callbacks/checkpointer.py"
_STATE = f"{_TESTS}::test_the_state_of_a_callback_goes_on_and_without_one_it_begins_anew"

IN_CALLBACKS = (
    Mutant(
        "a hook of a callback is called on one rank alone",
        _TRAINER,
        "        having = self._having[hook]\n",
        '        having = self._having[hook] if self.world.rank == 0 or hook != "on_step_end" else []\n',
        (f"{_TESTS}::test_every_rank_calls_the_same_hooks_in_one_order",),
    ),
    Mutant(
        "a callback of rank 0 is on all ranks",
        _TRAINER,
        "if each.on_all_ranks or world.rank == 0]",
        "]",
        (f"{_TESTS}::test_a_callback_of_rank_0_is_nowhere_else",),
    ),
    Mutant(
        "a hook is called in steps in which it is not due",
        _TRAINER,
        "if each.every and self.samples.step % each.every == 0]",
        "if each.every]",
        (f"{_TESTS}::test_callbacks_are_called_in_the_order_of_their_list_and_where_they_are_due",),
    ),
    Mutant(
        "hooks that a class leaves alone are called too",
        _TRAINER,
        "    return getattr(type(callback), hook) is not getattr(Callback, hook)\n",
        "    return True\n",
        (f"{_TESTS}::test_a_hook_that_a_class_leaves_alone_is_never_called",),
    ),
    Mutant(
        "a step from which a run goes back is ended all the same",
        _TRAINER,
        "            if self.progress.step < self.samples.step:\n",
        "            if self.progress.step < 0:\n",
        (f"{_TESTS}::test_a_step_from_which_a_run_goes_back_has_no_end",),
    ),
    Mutant(
        "an error in one callback hides the one that ends the run",
        _TRAINER,
        "            except Exception as another:\n",
        "            except OSError as another:\n",
        (f"{_TESTS}::test_an_error_comes_to_every_callback_and_is_the_one_that_is_raised",),
        refuses=True,  # the other error comes out
    ),
    Mutant(
        "the state of callbacks is not restored",
        _CHECKPOINTER,
        "            trainer.load_state_dict(callback_states(state))\n",
        "            pass\n",
        (_STATE,),
    ),
    Mutant(
        "the state of callbacks is not saved",
        _CHECKPOINTER,
        '            **({"callbacks": states} if states else {}),\n',
        "",
        (_STATE,),
    ),
    Mutant(
        "a callback of which a checkpoint knows nothing is given an empty state",
        _TRAINER,
        "            if callback.name in states:\n                callback.load_state_dict(states[callback.name])\n",
        "            callback.load_state_dict(states.get(callback.name, {}))\n",
        (_STATE,),
        refuses=True,
    ),
)
