"""Mistakes in evaluation: tokens scored behind others, twice or not at all, results in another order, other units."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SCORING, LM, TEXTS, TASKS, TOOL = (
    f"tests/evaluation/test_{name}.py" for name in ("scoring", "lm", "texts", "tasks", "tool")
)
ALL_RANKS, SCORES, OURS = (f"megatron/evaluation/{name}.py" for name in ("all_ranks", "scoring", "lm"))
OF_TEXTS, OF_TASKS = (f"megatron/evaluation/{name}.py" for name in ("texts", "tasks"))
WRITING = "tests/evaluation/test_writing.py"
IN_RUNS = "tests/training/callbacks/test_task_evaluator.py"
IN_A_RUN = (
    f"{IN_RUNS}::test_every_layout_has_the_results_of_one_process"
    "[2---model-parallel-size 2 --sequence-parallel --gas 2]"
)
ONE = f"{SCORING}::test_scores_are_those_of_one_token_at_a_time[gpt2]"
CUT = f"{SCORING}::test_with_sequence_parallel_scores_are_those_of_one_process[gpt2]"
SHARED = f"{SCORING}::test_every_layout_has_the_scores_of_one_process[gpt2-layout2]"
PIPE = f"{SCORING}::test_every_layout_has_the_scores_of_one_process[llama-layout9]"
ROLLING = f"{SCORING}::test_each_token_of_a_text_is_scored_once"
ORDER = f"{LM}::test_results_come_in_the_order_of_requests_and_go_to_the_cache"

EVALUATION = (
    Mutant(
        "scores come in the order of their lengths",
        SCORES,
        "return [every[place] for place in range(len(rows))]",
        "return list(every.values())",
        (ONE,),
    ),
    Mutant(
        "a token is predicted from itself",
        SCORES,
        "picked += range(stop - row.num_scored, stop)",
        "picked += range(stop - row.num_scored + 1, stop + 1)",
        (ONE,),
        refuses=True,
    ),
    Mutant(
        "further choices are scored as the first",
        SCORES,
        "targets += row.tokens[-row.num_scored :]",
        "targets += rows[places.index(place)].tokens[-row.num_scored :]",
        (ONE,),
    ),
    Mutant(
        "the first scored token alone says whether a row is the likeliest",
        SCORES,
        "best[own] == targets[own]",
        "best[own][:1] == targets[own][:1]",
        (f"{SCORING}::test_a_likeliest_continuation_is_said_to_be_one",),
    ),
    Mutant(
        "each replica scores all rows",
        SCORES,
        "if number % data.size != data.rank:",
        "if data.size < 0:",
        (SHARED,),
    ),
    Mutant(
        "scores stay on the last stage",
        SCORES,
        "    if part.pipe.size > 1:\n        dist.broadcast(found,",
        "    if part.pipe.size > 9:\n        dist.broadcast(found,",
        (PIPE,),
        refuses=True,
    ),
    Mutant(
        "positions are picked from a rank's part of the sequence",
        SCORES,
        "    if x is not None and part.place.sequence_parallel:",
        "    if x is not None and part.place.sequence_parallel and part.pipe.size > 1:",
        (CUT,),
        refuses=True,
    ),
    Mutant(
        "hidden states of a cut sequence are counted as whole",
        "megatron/models/common/generation.py",
        "        return forward_through_stages(part, self.body, self._apply, (s // parts, b, part.sizes.hidden_size))",
        "        return forward_through_stages(part, self.body, self._apply, (b, s, part.sizes.hidden_size))",
        (PIPE, f"{SCORING}::test_every_layout_has_the_scores_of_one_process[mpt-layout20]"),
        refuses=True,
    ),
    Mutant(
        "a context loses its end",
        SCORES,
        "return Row((*context, *continuation)[-(max_length + 1) :], len(continuation))",
        "return Row((*context[: max_length + 1 - len(continuation)], *continuation), len(continuation))",
        (f"{SCORING}::test_a_context_that_is_too_long_loses_its_beginning",),
    ),
    Mutant(
        "a context is a token shorter than it may be",
        SCORES,
        "(*context, *continuation)[-(max_length + 1) :]",
        "(*context, *continuation)[-max_length:]",
        (f"{SCORING}::test_a_context_that_is_too_long_loses_its_beginning",),
        refuses=True,
    ),
    Mutant(
        "the last window of a text scores all that it reads",
        SCORES,
        "rows.append(Row(tuple(read), stop - first))",
        "rows.append(Row(tuple(read), len(read) - 1))",
        (ROLLING,),
    ),
    Mutant(
        "each window of a text begins with the prefix",
        SCORES,
        "if first == 0 else tokens[stop - max_length - 1 : stop]",
        "if first == 0 else (prefix, *tokens[first:stop])",
        (ROLLING,),
    ),
    Mutant(
        "a batch may be larger than it should",
        SCORES,
        "(len(batch) + 1) * lengths[batch[0]] > max_tokens",
        "len(batch) * lengths[batch[0]] > max_tokens",
        (f"{SCORING}::test_batches_are_full_and_the_longest_row_is_in_the_first",),
    ),
    Mutant(
        "spaces stay at the end of a context",
        OURS,
        "kept = context.rstrip()",
        "kept = context",
        (f"{LM}::test_spaces_at_the_end_of_a_context_belong_to_the_continuation",),
    ),
    Mutant(
        "a continuation is encoded without its context",
        OURS,
        "self.encode(context + continuation)[len(own) :] or self.encode(continuation)",
        "self.encode(continuation)",
        (f"{LM}::test_words_may_be_cut_anywhere",),
    ),
    Mutant(
        "an empty context is nothing",
        OURS,
        "return row_of(self._opened(own) or [self.prefix], tokens, self.model.max_length)",
        "return row_of(self._opened(own) or [1], tokens, self.model.max_length)",
        (f"{LM}::test_an_empty_context_is_the_token_behind_which_documents_begin",),
    ),
    Mutant(
        "texts come in the order of their kinds",
        OURS,
        "texts = [found[place] for place in range(len(requests))]",
        "texts = list(found.values())",
        (f"{LM}::test_texts_are_written_as_the_task_says",),
    ),
    Mutant(
        "prompts lose their end",
        OURS,
        "[prompt[-room:] for prompt in prompts]",
        "[prompt[:room] for prompt in prompts]",
        (f"{LM}::test_texts_are_written_as_the_task_says",),
    ),
    Mutant(
        "a greedy task is drawn",
        OURS,
        "bool(is_asked) and temperature != 0",
        "temperature != 0",
        (f"{LM}::test_texts_are_written_as_the_task_says",),
    ),
    Mutant(
        "what a conversation spells stays text",
        OURS,
        "        if self.chat is None:\n            return self.tokenizer.encode(text)",
        "        if self.chat is None or text:\n            return self.tokenizer.encode(text)",
        (f"{LM}::test_a_conversation_is_rendered_and_its_control_tokens_are_tokens",),
    ),
    Mutant(
        "a text goes on to its last stop",
        ALL_RANKS,
        "text = text.split(stop, 1)[0] if stop else text",
        "text = text.rsplit(stop, 1)[0] if stop else text",
        (f"{LM}::test_what_lies_behind_the_first_stop_is_cut",),
    ),
    Mutant(
        "a text goes on behind the end of a turn",
        ALL_RANKS,
        "ends=lambda row, tokens: tokens[-1] == how.end_id or self._is_stopped(tokens, how.stops),",
        "ends=lambda row, tokens: self._is_stopped(tokens, how.stops),",
        (f"{WRITING}::test_a_turns_end_ends_a_text_and_no_control_token_is_part_of_it",),
    ),
    Mutant(
        "the end of a document alone ends an answer in a conversation",
        OURS,
        "end_id = None if self.chat is None else self.chat.stop_id",
        "end_id = None",
        (f"{WRITING}::test_a_conversation_has_its_templates_end_of_turns",),
    ),
    Mutant(
        "control tokens are part of a text",
        ALL_RANKS,
        "said = [token for token in tokens if token not in control]",
        "said = tokens",
        (f"{WRITING}::test_a_turns_end_ends_a_text_and_no_control_token_is_part_of_it",),
    ),
    Mutant(
        "an error of rank 0 stays there",
        ALL_RANKS,
        '                self.world.broadcast_object(("raise", (sent,)))',
        '                self.world.broadcast_object(("end", ()))',
        (f"{TOOL}::test_an_error_of_rank_0_is_one_of_all",),
    ),
    Mutant(
        "characters are counted for bytes",
        OF_TEXTS,
        "yield Document(tokenizer.encode(text), len(text.encode()))",
        "yield Document(tokenizer.encode(text), len(text))",
        (f"{TEXTS}::test_each_kind_of_file_has_its_documents",),
    ),
    Mutant(
        "the ends of a token file's documents count",
        OF_TEXTS,
        "        while tokens and tokens[-1] == eod:",
        "        while not tokens:",
        (f"{TEXTS}::test_each_kind_of_file_has_its_documents",),
    ),
    Mutant(
        "nats are called bits",
        OF_TEXTS,
        "return self.nats / math.log(2) / self.bytes if self.bytes",
        "return self.nats / self.bytes if self.bytes",
        (f"{TEXTS}::test_numbers_follow_from_nats_tokens_and_bytes",),
    ),
    Mutant(
        "domains count alike in the whole, not bytes",
        OF_TEXTS,
        "        sum(one.bytes for one in scores),\n        math.fsum(one.nats for one in scores),",
        "        sum(one.bytes for one in scores),\n        math.fsum(one.nats for one in scores) / len(scores),",
        (f"{TEXTS}::test_numbers_follow_from_nats_tokens_and_bytes",),
    ),
    Mutant(
        "evaluating draws numbers of the training",
        OF_TASKS,
        "        device.set_rng_states(states[2])",
        "        pass",
        (f"{TASKS}::test_random_numbers_are_those_of_a_run_that_evaluates_nothing",),
    ),
    Mutant(
        "the last evaluation comes twice",
        "megatron/training/callbacks/task_evaluator.py",
        "        self._evaluated = step\n",
        "",
        (IN_A_RUN,),
    ),
    Mutant(
        "what came of a portion goes to the first rows",
        ALL_RANKS,
        "            found.update(zip(places, results, strict=True))",
        "            found.update(zip(sorted(places), results, strict=True))",
        (f"{WRITING}::test_some_batches_are_asked_for_at_a_time_and_results_come_in_order",),
    ),
    Mutant(
        "only rank 0 is asked whether to stop",
        ALL_RANKS,
        "any(self.world.gather_objects(self._is_stopping()))",
        "self._is_stopping()",
        (f"{IN_RUNS}::test_a_signal_breaks_it_off",),
    ),
    Mutant(
        "a task that fails ends the run",
        "megatron/training/callbacks/task_evaluator.py",
        "            except DataError as error:\n                if world",
        "            except KeyError as error:\n                if world",
        (f"{IN_RUNS}::test_a_task_that_fails_is_told_and_the_run_goes_on",),
        refuses=True,
    ),
)
