"""Mistakes in generation: in the cache, the order of rows, the stages, drawing, and the texts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CACHE = "tests/models/common/test_cache.py"
CACHED_GPT2 = f"{CACHE}::test_a_decoder_with_a_cache_and_rows_of_any_length_equals_each_row_alone_without_one"
CACHED_T5 = f"{CACHE}::test_t5_with_a_cache_and_sources_of_any_length_equals_each_alone_without_one"
SAMPLING = "tests/generate/test_sampling.py"
COMMAND = "tests/generate/test_command.py"
LAYOUT = f"{COMMAND}::test_every_layout_writes_what_one_process_writes_to_each_prompt_alone"
BATCH = f"{COMMAND}::test_a_batch_gives_each_prompt_what_it_gets_alone"
LOADING = "tests/generate/test_loading.py"
LOOP = "tests/generate/test_loop.py"
PROMPTS = "tests/generate/test_prompts.py"
ENDS = f"{LOOP}::test_each_row_ends_with_its_own_end_or_limit_and_is_read_no_more"

GENERATE = (
    Mutant(
        "a prompt that is too long is found behind the training",
        "megatron/training/callbacks/text_samples.py",
        "        writer.encoded(self.prompts)\n",
        "",
        (
            "tests/training/callbacks/test_text_samples.py::"
            "test_a_prompt_that_the_model_cannot_take_is_an_error_ahead_of_the_first_step",
        ),
    ),
    Mutant(
        "a prompt of the recipe that cannot be read ends the run",
        "megatron/training/callbacks/text_samples.py",
        '            if "sample_prompts" in self.trainer.config.given:\n                raise\n',
        "            raise\n",
        (
            "tests/training/callbacks/test_text_samples.py::"
            "test_a_prompt_of_the_defaults_that_the_model_cannot_take_is_left_out_and_told",
        ),
        refuses=True,
    ),
    Mutant(
        "a text goes on where positions have learned nothing",
        "megatron/training/callbacks/text_samples.py",
        "    return min(room, MOST_TOKENS) if room > 0 else None\n",
        "    return MOST_TOKENS if room > 0 else None\n",
        ("tests/training/callbacks/test_text_samples.py::test_a_text_ends_where_a_training_sample_does",),
    ),
    Mutant(
        "weights that ZeRO 3 has freed write the text at the end of a training",
        "megatron/optim/zero/stage3.py",
        "            unit.calls += 1  # so that no call within frees it\n",
        "",
        ("tests/training/callbacks/test_text_samples.py::test_each_prompt_gets_the_same_text_in_every_layout[gpt2]",),
        refuses=True,
    ),
    Mutant(
        "a gap gets the words of the next one",
        "megatron/generate/text.py",
        "zip(said[1::2], (span.strip() for span in said[2::2])",
        "zip(said[1::2], (span.strip() for span in said[2::2][::-1])",
        ("tests/generate/test_prompts.py::test_what_t5_says_stands_in_the_gaps_of_its_text",),
    ),
    Mutant(
        "a query does not see its own position",
        "megatron/models/common/attention.py",
        "(slots <= positions.unsqueeze(2))",
        "(slots < positions.unsqueeze(2))",
        (f"{CACHED_GPT2}[gpt2]",),
    ),
    Mutant(
        "a shorter row's keys are put behind those of the longest",
        "megatron/models/common/attention.py",
        "            kept.scatter_(2, places, new)\n",
        "            kept.scatter_(2, places.amax(0, keepdim=True).expand_as(places), new)\n",
        (f"{CACHED_GPT2}[gpt2]",),
    ),
    Mutant(
        "rows that go on look at what other rows read of the source",
        "megatron/models/common/attention.py",
        "            self.cross = self.cross[0][rows], self.cross[1][rows]\n",
        "            self.cross = self.cross[0][: len(rows)], self.cross[1][: len(rows)]\n",
        (f"{CACHED_T5}[relative-a token a pass]",),
    ),
    Mutant(
        "rows that go on look at what other rows have read",
        "megatron/models/common/attention.py",
        "            self.own = self.own[0][rows], self.own[1][rows]\n",
        "            self.own = self.own[0][: len(rows)], self.own[1][: len(rows)]\n",
        (f"{CACHED_GPT2}[gpt2]",),
    ),
    Mutant(
        "the bias of a new query is that of the first position",
        "megatron/models/t5/layers.py",
        "windows[:, :num_queries].flip(1)",
        "windows[:, -num_queries:].flip(1)",
        (f"{CACHED_T5}[relative-a token a pass]",),
    ),
    Mutant(
        "tokens of one pass see later ones in it",
        "megatron/models/t5/layers.py",
        "            own = cache.slots.mask\n",
        "            own = None if cache.slots.mask is None else torch.ones_like(cache.slots.mask)\n",
        (f"{CACHED_T5}[relative-three tokens a pass]",),
    ),
    Mutant(
        "what fills a source up is read",
        "megatron/models/t5/generate.py",
        "        has_padding = bool(is_padding.any())\n",
        "        has_padding = False\n",
        (f"{CACHED_T5}[relative-a token a pass]", f"{BATCH}[t5-learned]"),
    ),
    Mutant(
        "each new token of a T5 stands at the first learned position",
        "megatron/models/t5/generate.py",
        "x + position(self.positions.t())",
        "x + position(self.positions.t() * 0)",
        (f"{CACHED_T5}[learned-a token a pass]",),
    ),
    Mutant(
        "the first new token follows the last place of the longest row",
        "megatron/models/common/generation.py",
        "x = x[last.to(x.device), torch.arange(len(last), device=x.device)]  # [b, h]",
        "x = x[last.to(x.device).amax(0, keepdim=True), torch.arange(len(last), device=x.device)]",
        (f"{CACHED_GPT2}[gpt2]", f"{BATCH}[gpt2]"),
    ),
    Mutant(
        "new tokens stand behind the longest row",
        "megatron/generate/decode.py",
        "torch.tensor([[len(starts[row]) + step] for row in rows])",
        "torch.tensor([[max(map(len, starts)) + step] for row in rows])",
        (ENDS, f"{BATCH}[gpt2]"),
    ),
    Mutant(
        "a row that has ended ends all",
        "megatron/generate/decode.py",
        "        if not still:\n",
        "        if len(still) < len(rows):\n",
        (ENDS,),
    ),
    Mutant(
        "the usual number of tokens ends a position early",
        "megatron/generate/decode.py",
        "positions - length + 1 if",
        "positions - length if",
        (f"{LOOP}::test_the_last_position_can_be_used_and_the_usual_number_ends_there[None-lengths1]",),
    ),
    Mutant(
        "a decoder's bias looks both ways",
        "megatron/generate/load_model.py",
        'RelativeBias(sizes, place, name == "encoder")',
        "RelativeBias(sizes, place, True)",
        (f"{LOADING}::test_a_stage_of_a_checkpoint_computes_what_the_whole_model_does[t5]",),
    ),
    Mutant(
        "the first stage hands its own states out as the encoder's output",
        "megatron/models/t5/generate.py",
        "part.stages[units.enc_norm])",
        "part.stages[0])",
        (f"{LOADING}::test_a_stage_of_a_checkpoint_computes_what_the_whole_model_does[t5]",),
    ),
    Mutant(
        "the decoder starts from the end token",
        "megatron/generate/text.py",
        "start_id=prompts.tokens.start_id",
        "start_id=prompts.tokens.eos_id",
        (f"{LOADING}::test_the_decoder_starts_from_its_start_token",),
    ),
    Mutant(
        "half a character is shown",
        "megatron/generate/text.py",
        ' and not text.endswith("\\N{REPLACEMENT CHARACTER}")',
        "",
        (f"{PROMPTS}::test_text_is_shown_as_soon_as_it_is_whole_characters",),
    ),
    Mutant(
        "numbers to draw with go by the place in the batch",
        "megatron/generate/sampling.py",
        "uniform(sampling.seed, keys[row], step) for row in rows",
        "uniform(sampling.seed, keys[place], step) for place, row in enumerate(rows)",
        ("tests/generate/test_sampling.py::test_rows_that_go_on_draw_as_before_when_another_has_ended",),
    ),
    Mutant(
        "equal prompts draw alike",
        "megatron/generate/sampling.py",
        "        seen[row] += 1\n",
        "        seen[row] += 0\n",
        (f"{SAMPLING}::test_numbers_are_even_and_differ_by_seed_row_and_step",),
    ),
    Mutant(
        "the token that reaches top-p is left out",
        "megatron/generate/sampling.py",
        "        falling = falling.masked_fill(before >= sampling.top_p, 0)\n",
        "        falling = falling.masked_fill(before + falling >= sampling.top_p, 0)\n",
        (f"{SAMPLING}::test_the_same_tokens_are_left_out_as_by_hugging_faces_warpers",),
    ),
    Mutant(
        "a vocabulary that is cut is drawn from in parts",
        "megatron/generate/sampling.py",
        "        dist.all_gather(parts, logits.contiguous(), group=group.handle)\n",
        "        parts = [logits] * group.size\n",
        (f"{LAYOUT}[gpt2-layout0]",),
    ),
    Mutant(
        "replicas answer each other's prompts",
        "megatron/generate/text.py",
        "self.data.gather_objects(found)",
        "self.data.gather_objects(dict(zip(sorted(found), found.values(), strict=True)))",
        (f"{LAYOUT}[gpt2-layout3]",),
    ),
    Mutant(
        "blanks before a span are read",
        "megatron/generate/text.py",
        r're.compile(r"\s*<extra_id_(\d+)>")',
        r're.compile(r"<extra_id_(\d+)>")',
        (f"{PROMPTS}::test_t5_reads_spans_by_their_sentinels_and_says_them_by_name",),
    ),
    Mutant(
        "every rank needs an input of its own",
        "megatron/generate/options.py",
        ' and os.environ.get("RANK", "0") == "0" and _is_without_input()',
        " and _is_without_input()",
        (f"{COMMAND}::test_the_rank_that_reads_lines_alone_needs_an_input",),
        refuses=True,
    ),
    Mutant(
        "ranks wait for a person as long as for a step",
        "tools/generate.py",
        '"phase_timeout_minutes": TIMEOUT_S / 60',
        '"phase_timeout_minutes": 1',
        (f"{COMMAND}::test_ranks_wait_long_for_each_others_layers",),
    ),
    Mutant(
        "a line that cannot be answered ends the session",
        "megatron/generate/text.py",
        "        except DataError as error:",
        "        except UnicodeError as error:",
        (f"{COMMAND}::test_a_line_that_cannot_be_answered_is_told_and_the_next_one_is_answered",),
        refuses=True,
    ),
    Mutant(
        "small temperatures make numbers that are none",
        "megatron/generate/sampling.py",
        "(logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature",
        "logits / sampling.temperature",
        (f"{SAMPLING}::test_any_temperature_gives_numbers",),
    ),
)
