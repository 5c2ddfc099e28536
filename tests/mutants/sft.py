"""Mistakes in fine-tuning on conversations, in exports beside checkpoints, in averages of them, and in a chat."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CHAT = "megatron/tokenizer/chat.py"
DATASET = "megatron/data/sft_dataset.py"
EXPORTER = "megatron/training/callbacks/hf_exporter.py"
AVERAGE = "megatron/checkpoint/average.py"
HAND = "tests/data/test_sft.py::test_packed_samples_by_hand"
DOCUMENT = "tests/data/test_sft.py::test_each_conversation_is_a_document_with_its_mask"
CUT = "tests/data/test_sft.py::test_long_ones_are_cut_from_the_end_and_counted"
PARTS = "tests/data/test_sft.py::test_parts_are_kept_for_other_processes"
PRINT = "tests/data/test_sft.py::test_the_fingerprint_covers_file_template_and_tokenizer"
BAD = "tests/data/test_sft.py::test_a_bad_line_is_named"
MASK = "tests/tokenizer/test_chat.py::test_the_loss_mask_of_a_marked_template_is_that_of_transformers"
IDS = "tests/tokenizer/test_chat.py::test_the_ids_are_those_of_transformers"
SAID = "tests/tokenizer/test_chat.py::test_what_is_said_is_the_answer_and_its_end"
PREFIX = "tests/tokenizer/test_chat.py::test_prefixes_that_are_none_are_refused_with_the_way_out"
KEY = "tests/tokenizer/test_chat.py::test_a_key_follows_from_text_and_names"
SANDBOX = "tests/tokenizer/test_chat.py::test_a_template_cannot_leave_its_sandbox"
DATE = "tests/tokenizer/test_chat.py::test_data_know_no_date_and_a_chat_does"
GRADIENT = "tests/parity/test_sft.py::test_prompts_have_no_gradient"
RUNS = "tests/training/test_sft_runs.py"
FOLDERS = f"{RUNS}::test_folders_appear_beside_checkpoints"
TURNS = f"{RUNS}::test_a_conversation_remembers_its_turns"
BY_HAND = "tests/tools/test_average.py::test_an_average_is_that_by_hand"
ONCE = "tests/tools/test_average.py::test_a_mean_is_rounded_once"
OTHERS = "tests/tools/test_average.py::test_other_models_are_refused"

SFT = (
    Mutant(
        "the user's tokens have a loss, the assistant's none",
        DATASET,
        "np.where(np.array(encoded.is_said, bool), ~ids, ids)",
        "np.where(np.array(encoded.is_said, bool), ids, ~ids)",
        (HAND, DOCUMENT),
    ),
    Mutant(
        "the loss mask of conversations is one token late",
        "megatron/data/gpt_dataset.py",
        "(loss_mask[:, 1:] > 0)",
        "(loss_mask[:, :-1] > 0)",
        (HAND,),
    ),
    Mutant(
        "prompts have a loss",
        "megatron/data/gpt_dataset.py",
        "has_loss = has_loss & (loss_mask[:, 1:] > 0)",
        "has_loss = has_loss & (loss_mask[:, 1:] > -1)",
        (GRADIENT,),
    ),
    Mutant(
        "scripts leave the loss mask of conversations out",
        "megatron/config/data.py",
        'return "segments", "loss_mask"',
        'return ("segments",)',
        (GRADIENT,),
    ),
    Mutant(
        "the end of a turn is not learned",
        CHAT,
        "        return kept if ends else turn\n",
        '        return kept[: kept.rfind("<|")] if ends else turn\n',
        (SAID,),
    ),
    Mutant(
        "white space behind a turn is learned",
        CHAT,
        "        return kept if ends else turn\n",
        "        return turn\n",
        (SAID,),
    ),
    Mutant(
        "the opening of a turn is learned",
        CHAT,
        "spans.append((len(ahead), len(ahead)",
        "spans.append((0, len(ahead)",
        (SAID,),
    ),
    Mutant(
        "prefixes are not compared with the whole",
        CHAT,
        "if not through.startswith(ahead) or not text.startswith(through):",
        "if not through.startswith(ahead):",
        (PREFIX,),
    ),
    Mutant(
        "marks of the assistant's turns are those of the turn's end alone",
        CHAT,
        "spans.append((begins.pop(), length))",
        "spans.append((length - 1, length))",
        (MASK,),
    ),
    Mutant(
        "a token that a turn cuts is not learned",
        CHAT,
        "end > spans[at][0])",
        "end > spans[at][0] and start >= spans[at][0])",
        (MASK,),
    ),
    Mutant(
        "control tokens of a template are text",
        "megatron/tokenizer/huggingface.py",
        "self._rendered.encode_special_tokens = False",
        "self._rendered.encode_special_tokens = True",
        (IDS,),
    ),
    Mutant(
        "a template's lines keep their blanks",
        CHAT,
        "trim_blocks=True, lstrip_blocks=True",
        "trim_blocks=False, lstrip_blocks=False",
        ("tests/tokenizer/test_chat.py::test_lines_of_a_template_lose_their_blanks",),
    ),
    Mutant(
        "JSON in a conversation is escaped for HTML",
        CHAT,
        '    environment.filters["tojson"] = _to_json\n',
        "",
        (MASK,),
    ),
    Mutant(
        "a template runs outside of the sandbox",
        CHAT,
        "jinja2.sandbox.ImmutableSandboxedEnvironment(",
        "jinja2.Environment(",
        (SANDBOX,),
    ),
    Mutant(
        "data know the day",
        CHAT,
        "        if knows_date:\n",
        "        if True:\n",
        (DATE,),
    ),
    Mutant(
        "the key of a template leaves its control tokens out",
        CHAT,
        "json.dumps([self.text, self.special], sort_keys=True)",
        "json.dumps([self.text], sort_keys=True)",
        (KEY,),
    ),
    Mutant(
        "positions go on from one conversation to the next",
        "megatron/data/gpt_dataset.py",
        "        positions = positions_in_segments(segment_ids)\n",
        "        positions = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs)\n",
        (HAND,),
    ),
    Mutant(
        "conversations are cut from their beginning",
        DATASET,
        "row = row[: self.capacity]",
        "row = row[-self.capacity :]",
        (CUT,),
    ),
    Mutant(
        "conversations without a loss stay",
        DATASET,
        "rows.append(row if has_loss else row[:0])",
        "rows.append(row)",
        (CUT,),
    ),
    Mutant(
        "the fingerprint of conversations leaves the template out",
        DATASET,
        '{self._digest}:{self.template.key}"',
        '{self._digest}"',
        (PRINT,),
    ),
    Mutant(
        "a bad line is counted without the blank ones",
        DATASET,
        "self._row(self._records.read(idx), number)",
        "self._row(self._records.read(idx), idx + 1)",
        (BAD,),
    ),
    Mutant(
        "tokens of a conversation are read from the first part",
        DATASET,
        "        return self._tokens[part][start : start + length].copy()\n",
        "        return self._tokens[0][start : start + length].copy()\n",
        (PARTS,),
    ),
    Mutant(
        "the mask of a sample is that of its signed tokens turned round",
        DATASET,
        '"loss_mask": is_said.astype(np.int32)}',
        '"loss_mask": (~is_said).astype(np.int32)}',
        (HAND,),
    ),
    Mutant(
        "exports beside checkpoints are those of the steps in between",
        EXPORTER,
        "        is_due = step % self.interval == 0 or",
        "        is_due = step % self.interval != 0 or",
        (FOLDERS,),
    ),
    Mutant(
        "an exported folder has no chat template",
        "megatron/checkpoint/huggingface/tokenizer.py",
        "            texts[TEMPLATE] = vocabulary.chat.text\n",
        "",
        (FOLDERS,),
    ),
    Mutant(
        "an exported folder ends a turn as a document",
        "megatron/checkpoint/huggingface/tokenizer.py",
        "            ends = (self.stop_id, ids",
        "            ends = (ids",
        (FOLDERS,),
        refuses=True,
    ),
    Mutant(
        "a conversation forgets its turns",
        "megatron/generate/text.py",
        "        self.history += [_turn",
        "        _ = [_turn",
        (TURNS,),
    ),
    Mutant(
        "a chat does not open the assistant's turn",
        CHAT,
        "text = self.render(messages, add_generation_prompt=True, knows_date=True",
        "text = self.render(messages, add_generation_prompt=False, knows_date=True",
        (IDS,),
    ),
    Mutant(
        "a chat ends with the document, not with the turn",
        "megatron/generate/text.py",
        "        return stop_id if stop_id is not None else super().eos_id\n",
        "        return super().eos_id\n",
        (TURNS,),
    ),
    Mutant(
        "the mean of checkpoints has one too many",
        AVERAGE,
        "total /= len(checkpoints)",
        "total /= len(checkpoints) + 1",
        (ONCE,),
    ),
    Mutant(
        "a moving average weighs the newest by its decay",
        AVERAGE,
        "total = ema * total + (1 - ema) * tensor",
        "total = (1 - ema) * total + ema * tensor",
        (BY_HAND,),
    ),
    Mutant(
        "checkpoints are added up in fp32",
        AVERAGE,
        "    total = read_whole(checkpoints[0], name).double()\n",
        "    total = read_whole(checkpoints[0], name)\n",
        (ONCE,),
    ),
    Mutant(
        "a moving average goes from the newest to the oldest",
        AVERAGE,
        "    return [open_checkpoint(path, SINGLE) for path in reversed(found[:count])]\n",
        "    return [open_checkpoint(path, SINGLE) for path in found[:count]]\n",
        (BY_HAND,),
    ),
    Mutant(
        "checkpoints of other models are averaged",
        AVERAGE,
        '        compare_model_config(one.state["model"], other.state["model"])\n',
        "        pass\n",
        (OTHERS,),
    ),
)
