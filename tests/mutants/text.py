"""Mutants of tokenizers, chat templates, generation and the scores of texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron.evaluation.scoring import Row
from megatron.evaluation.scoring import make_row as make_row
from tests.mutants.mutant import mutant

CHAT = "tests/tokenizer/test_chat.py"
CPM = "tests/tokenizer/test_cpm.py"
SAMPLING = "tests/generate/test_sampling.py"
LOOP = "tests/generate/test_loop.py"
SCORING = "tests/evaluation/test_scoring.py"
LM = "tests/evaluation/test_lm.py"
TEXTS = "tests/evaluation/test_texts.py"

LOSS_MASK = f"{CHAT}::test_loss_mask_of_marked_template_equals_transformers"
SCORES = f"{SCORING}::test_scores_equal_token_by_token_reference[gpt2]"
EACH_TOKEN_ONCE = f"{SCORING}::test_rolling_rows_score_each_token_once"
OTHER_WARPERS = f"{SAMPLING}::test_filtered_tokens_equal_hugging_face_warpers"


# Tokenizers and chat templates.


@mutant(
    "megatron.tokenizer.tokenizer:Tokenizer.sentinel_ids",
    "tests/tokenizer/test_t5.py::test_sentinels_equal_hugging_face_from_either_file",
)
def sentinels_have_the_reverse_order(original: Any) -> Any:
    return property(lambda self: original.__get__(self)[::-1])


@mutant("megatron.tokenizer.chinese_words:replace_spaces", f"{CPM}::test_cpm1_ids_equal_jieba_and_sentencepiece")
def line_ends_are_spaces(original: Any) -> Any:
    return lambda text: original(text.replace("\n", " "))


@mutant("megatron.tokenizer.cpm:_WordCache._longest_matches", f"{CPM}::test_cpm2_ids_are_longest_matches_of_each_word")
def words_are_matched_by_character(original: Any) -> Any:
    return lambda self, word: [token for character in word for token in original(self, character)]


@mutant(
    "megatron.tokenizer.identity:library_identity_values",
    "tests/tokenizer/test_identity.py::test_changed_ids_change_identity[a normalizer]",
)
def identity_ignores_the_normalizer(original: Any) -> Any:
    return lambda description, normalizer, pre_tokenizer: original(description, None, pre_tokenizer)


@mutant("megatron.tokenizer.chat:_overlap", LOSS_MASK)
def loss_mask_of_a_turn_starts_one_token_late(original: Any) -> Any:
    def overlap(offsets: Sequence[Any], spans: Sequence[Any]) -> list[bool]:
        has_loss = original(offsets, spans)
        return [now and before for before, now in zip([False, *has_loss], has_loss, strict=False)]

    return overlap


@mutant("megatron.tokenizer.chat:_block_has_loss", f"{CHAT}::test_zero_loss_turn_is_rendered_without_loss")
def turns_of_weight_zero_have_a_loss(original: Any) -> Any:
    return lambda context, has_loss: True


@mutant("megatron.tokenizer.huggingface:LibraryTokenizer.encode_rendered", f"{CHAT}::test_ids_equal_transformers")
def control_tokens_of_a_template_are_text(original: Any) -> Any:
    def encode_rendered(self: Any, text: str) -> Any:
        encoding = self._library.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    return encode_rendered


# Generation.


@mutant("megatron.generate.sampling:probabilities", OTHER_WARPERS)
def logits_are_multiplied_by_the_temperature(original: Any) -> Any:
    return lambda logits, sampling: original(logits, replace(sampling, temperature=1 / sampling.temperature))


@mutant("megatron.generate.sampling:probabilities", OTHER_WARPERS)
def top_k_keeps_one_more_token(original: Any) -> Any:
    return lambda logits, sampling: original(logits, replace(sampling, top_k=sampling.top_k and sampling.top_k + 1))


@mutant("megatron.generate.sampling:uniform", f"{SAMPLING}::test_uniform_numbers_depend_on_seed_row_and_step")
def every_step_draws_the_same_number(original: Any) -> Any:
    return lambda seed, key, step: original(seed, key, 0)


@mutant(
    "megatron.generate.sampling:_local_best",
    "tests/generate/test_likeliest.py::test_argmax_picks_lowest_of_ties_and_never_padding",
)
def tokens_of_each_rank_start_at_zero(original: Any) -> Any:
    return lambda logits, start: original(logits, 0)


@mutant("megatron.generate.decode:generate", f"{LOOP}::test_rows_stop_at_eos_or_limit_and_are_not_read_further")
def generation_continues_after_the_end_token(original: Any) -> Any:
    return lambda part, read, starts, **options: original(part, read, starts, **{**options, "eos_id": None})


# Scores of texts.


@mutant("megatron.evaluation.scoring:score_rows", SCORES)
def scores_have_the_order_of_their_lengths(original: Any) -> Any:
    def score_rows(stage: Any, rows: Sequence[Row], **options: Any) -> list[Any]:
        scores = original(stage, rows, **options)
        return [scores[idx] for idx in sorted(range(len(rows)), key=lambda idx: -len(rows[idx].tokens))]

    return score_rows


@mutant("megatron.evaluation.scoring:_score_positions", SCORES)
def tokens_are_predicted_from_the_position_before(original: Any) -> Any:
    def score_positions(stage: Any, reader: Any, x: Any, positions: list[int], *args: Any) -> torch.Tensor:
        return original(stage, reader, x, [max(position - 1, 0) for position in positions], *args)

    return score_positions


@mutant("megatron.evaluation.scoring:make_row", f"{SCORING}::test_long_context_is_truncated_from_left")
def long_contexts_lose_their_end(original: Any) -> Any:
    def shortened_row(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Row:
        return original(context[: max_length + 1 - len(continuation)], continuation, max_length)

    return shortened_row


@mutant("megatron.evaluation.scoring:rolling_rows", EACH_TOKEN_ONCE)
def last_window_of_a_text_scores_tokens_again(original: Any) -> Any:
    def rolling_rows(tokens: Sequence[int], prefix: int, max_length: int) -> list[Row]:
        *rows, last = original(tokens, prefix, max_length)
        return [*rows, Row(last.tokens, len(last.tokens) - 1)]

    return rolling_rows


@mutant("megatron.evaluation.lm:DecoderLM.request_row", f"{LM}::test_texts_can_be_split_anywhere", needs="lm_eval")
def continuation_is_encoded_without_its_context(original: Any) -> Any:
    def row(self: Any, context: str, continuation: str) -> Row:
        return make_row(self.encode(context), self.encode(continuation), self.model.max_length)

    return row


@mutant("megatron.evaluation.texts:TextScore.bits_per_byte", f"{TEXTS}::test_metrics_follow_from_nats_tokens_and_bytes")
def bits_per_byte_are_nats(original: Any) -> Any:
    return property(lambda self: self.nats / self.bytes if self.bytes else math.nan)


@mutant("megatron.evaluation.texts:read_documents", f"{TEXTS}::test_each_file_format_yields_its_documents")
def characters_are_counted_as_bytes(original: Any) -> Any:
    def documents(path: Any, tokenizer: Any, field: str = "text") -> Any:
        for document in original(path, tokenizer, field):
            yield replace(document, num_bytes=len(tokenizer.decode(list(document.tokens))))

    return documents
