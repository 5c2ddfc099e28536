"""Mistakes in packing documents and in fill-in-the-middle."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLAN = "tests/data/test_packing.py::test_the_plan_is_best_fit_decreasing_and_holds_each_piece_once"
LABELS = "tests/data/test_packing.py::test_each_token_but_a_document_s_first_is_a_label_once_an_epoch"
EPOCHS = "tests/data/test_packing.py::test_epochs_differ_in_which_documents_meet_and_processes_agree"
SEGMENTS = "tests/data/test_fields.py::test_segments_keep_documents_apart_whatever_the_tokens_are"
UNDONE = "tests/data/test_fim.py::test_undoing_gives_each_document_but_for_its_last_three_tokens"
FIM = "tests/data/test_fim.py::test_equal_to_a_loop"

PACKING = (
    Mutant(
        "packing takes the first room that is larger, not the tightest",
        "megatron/data/packing.py",
        "length + (rooms & -rooms).bit_length() - 1",
        "length + rooms.bit_length() - 1",
        (PLAN,),
    ),
    Mutant(
        "a group that is split keeps the numbers of its first samples",
        "megatron/data/packing.py",
        "first=share.first + start * share.per_sample",
        "first=share.first",
        (PLAN,),
    ),
    Mutant(
        "a sample that took no piece is forgotten",
        "megatron/data/packing.py",
        "samples.add(room, group.part(whole, num))",
        "samples.add(room, group.part(whole, num - (num > whole)))",
        (PLAN,),
    ),
    Mutant(
        "the pieces of a long document share no token",
        "megatron/data/packing.py",
        "        return np.maximum(sizes - 2, 0) // (self.capacity - 1)\n",
        "        return np.maximum(sizes - 1, 0) // (self.capacity - 1)\n",
        (LABELS,),
    ),
    Mutant(
        "full pieces start one token late",
        "megatron/data/packing.py",
        "(place - before) * self.step\n",
        "(place - before) * (self.step + 1)\n",
        (LABELS,),
    ),
    Mutant(
        "blocks of documents are sorted into the places of the first",
        "megatron/data/packing.py",
        "            filled += here\n",
        "            filled += 0 * here\n",
        ("tests/data/test_packing.py::test_pieces_do_not_depend_on_the_blocks_they_are_sorted_in",),
    ),
    Mutant(
        "the same documents meet in every epoch",
        "megatron/data/packing.py",
        '"pieces", self.seed, epoch, length)',
        '"pieces", self.seed, length)',
        (EPOCHS,),
    ),
    Mutant(
        "splits share the documents that were sorted for one of them",
        "megatron/data/packing.py",
        "self.token_file.fingerprint, documents_key(self.documents), self.capacity)",
        "self.token_file.fingerprint, self.capacity)",
        ("tests/data/test_packing.py::test_processes_of_a_host_share_the_order_of_many_documents",),
    ),
    Mutant(
        "packed samples come in one order in every epoch",
        "megatron/data/packing.py",
        '"samples", self.seed, epoch)',
        '"samples", self.seed)',
        (EPOCHS, "tests/data/test_packing.py::test_the_order_is_the_same_for_ever"),
    ),
    Mutant(
        "a packed document's last token predicts the next document's first",
        "megatron/data/gpt_dataset.py",
        "has_loss = (segment_ids == label_segments) & (label_segments >= 0)",
        "has_loss = label_segments >= 0",
        (SEGMENTS,),
    ),
    Mutant(
        "padding of a packed sample has a loss",
        "megatron/data/gpt_dataset.py",
        "has_loss = (segment_ids == label_segments) & (label_segments >= 0)",
        "has_loss = segment_ids == label_segments",
        (SEGMENTS,),
    ),
    Mutant(
        "positions of packed documents run on",
        "megatron/data/gpt_dataset.py",
        "positions = positions_in_segments(segment_ids)",
        "positions = torch.arange(inputs.shape[1]).expand_as(inputs)",
        (SEGMENTS, "tests/data/test_fields.py::test_a_packed_sample_s_losses_are_those_of_each_document_alone"),
    ),
    Mutant(
        "padding is numbered as one more document",
        "megatron/data/gpt_dataset.py",
        "np.full(self.seq_length + 1, -1, np.int32)",
        "np.full(self.seq_length + 1, len(sizes), np.int32)",
        ("tests/data/test_gpt2_samples.py::test_best_fit_samples_are_the_documents_themselves",),
    ),
    Mutant(
        "the middle is put before the suffix",
        "megatron/data/gpt_dataset.py",
        "(moved, low, moved, kept - high, moved, high - low, ended)",
        "(moved, low, moved, high - low, moved, kept - high, ended)",
        (UNDONE, FIM),
        refuses=True,
    ),
    Mutant(
        "a rearranged document swallows its end",
        "megatron/data/gpt_dataset.py",
        "        return starts, last + 1 - starts - ended, ended\n",
        "        return starts, last + 1 - starts, 0 * ended\n",
        (UNDONE,),
    ),
    Mutant(
        "SPM keeps its prefix in front",
        "megatron/data/gpt_dataset.py",
        "        low[is_moved & (shares[:, 1] < self.spm_rate)] = 0",
        "        low[is_moved & (shares[:, 1] < 0 * self.spm_rate)] = 0",
        (FIM, "tests/data/test_fim.py::test_it_is_the_same_for_ever"),
    ),
    Mutant(
        "no cut falls at the end of a document",
        "megatron/data/gpt_dataset.py",
        "cuts = _below(kept + 1, words[:, 2:])",
        "cuts = _below(kept, words[:, 2:])",
        (FIM,),
    ),
    Mutant(
        "all documents of a sample draw the same",
        "megatron/data/gpt_dataset.py",
        '"fim", *key).reshape(-1, _WORDS_A_DOCUMENT)',
        '"fim", *key).reshape(-1, _WORDS_A_DOCUMENT)[:1].repeat(len(starts), 0)',
        (FIM,),
    ),
    Mutant(
        "fill-in-the-middle is the same in each epoch",
        "megatron/data/gpt_dataset.py",
        "*self._draws, int(index))",
        "*self._draws, int(index) % self.samples_per_epoch)",
        ("tests/data/test_gpt2_samples.py::test_fill_in_the_middle_keeps_lengths_and_rate_0_keeps_all",),
    ),
)
