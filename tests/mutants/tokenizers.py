"""Mistakes in the tokenizers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_WORDS = "tests/tokenizer/test_word_cut.py::test_words_are_those_of_jieba"
_TIES = "tests/tokenizer/test_word_cut.py::test_equal_routes_are_decided_as_jieba_decides_them"
_CONTROL = "tests/tokenizer/test_control_tokens.py"
_CPM = "tests/tokenizer/test_cpm.py"
_NEIGHBOURS = "tests/tokenizer/test_neighbours.py"
_GIGA = "tests/tokenizer/test_gigatoken.py"
_TRAIN = "tests/tokenizer/test_train.py"

TOKENIZERS = (
    Mutant(
        "the word cut counts no word twice, so that equal routes are decided otherwise",
        "megatron/tokenizer/cpm.py",
        '_dictionary.add_word("\\0", 3, None)',
        '_dictionary.add_word("\\0", 1, None)',
        (_TIES,),
    ),
    Mutant(
        "routes go on over Chinese characters that jieba takes for marks",
        "megatron/tokenizer/cpm.py",
        "    if _OTHER_HAN.search(text) is None:\n",
        "    if True:\n",
        (_TIES,),
    ),
    Mutant(
        "a word of the dictionary that the route left in characters is joined",
        "megatron/tokenizer/cpm.py",
        "if not _dictionary.has_word(text)]",
        "]",
        (_WORDS,),
    ),
    Mutant(
        "a Chinese part of a mixed run decides how its text is cut elsewhere",
        "megatron/tokenizer/cpm.py",
        "return {run: MARK.join(",
        "return marked | {run: MARK.join(",
        (
            "tests/tokenizer/test_word_cut.py::test_a_word_left_in_characters_stays_so_beside_a_run_that_has_it",
            f"{_NEIGHBOURS}::test_ids_of_a_text_are_the_same_beside_any_others_and_behind_them[cpm1]",
        ),
    ),
    Mutant(
        "bytes of text cut by words depend on the units",
        "megatron/tokenizer/cpm.py",
        "return {run: MARK.join(",
        "return marked | {run: MARK.join(",
        (
            "tests/data/preprocess/test_preprocess.py::"
            "test_bytes_of_mixed_text_cut_by_words_do_not_depend_on_the_processes_nor_on_the_units",
        ),
    ),
    Mutant(
        "ids of mixed lines depend on their order",
        "megatron/tokenizer/cpm.py",
        "return {run: MARK.join(",
        "return marked | {run: MARK.join(",
        (f"{_CPM}::test_ids_of_mixed_lines_are_the_original_ones_in_any_order",),
    ),
    Mutant(
        "a vocabulary's dropout is drawn while text is encoded",
        "megatron/tokenizer/huggingface.py",
        "        library.model.dropout = None ",
        "        assert dropout ",
        (f"{_NEIGHBOURS}::test_dropout_of_a_vocabulary_is_said_and_not_done",),
    ),
    Mutant(
        "texts beside a giant one are encoded in pieces",
        "megatron/data/preprocess/encode.py",
        "        if len(text) > MAX_PIECE:\n            return",
        "        if text:\n            return",
        ("tests/data/preprocess/test_preprocess.py::test_a_text_has_the_same_ids_beside_a_giant_one",),
    ),
    Mutant(
        "of equal paths the first is taken",
        "megatron/tokenizer/cpm.py",
        "took_second[places] = second >= first\n",
        "took_second[places] = second > first\n",
        (_WORDS,),
    ),
    Mutant(
        "runs end with a word of several characters whatever is likelier",
        "megatron/tokenizer/cpm.py",
        "state = np.where(final_is_single, 3, 2)\n",
        "state = np.where(final_is_single, 2, 2)\n",
        (_WORDS,),
    ),
    Mutant(
        "spelled control tokens reach the library",
        "megatron/tokenizer/tokenizer.py",
        "if self._spellings else []\n",
        "if False else []\n",
        (f"{_CONTROL}::test_no_spelling_becomes_a_control_token_and_each_comes_back[added]",),
    ),
    Mutant(
        "the parts of a cut text go behind the next text",
        "megatron/tokenizer/tokenizer.py",
        "behind = np.cumsum(sizes)[spelled]\n        sizes[spelled] += added\n",
        "sizes[spelled] += added\n        behind = np.minimum(np.cumsum(sizes)[spelled], len(tokens))\n",
        (f"{_CONTROL}::test_arrays_hold_what_lists_hold_with_and_without_spellings[unigram]",),
    ),
    Mutant(
        "the second part of a cut word gets a space in front",
        "megatron/tokenizer/tokenizer.py",
        'never = {"prepend_scheme": "never", "add_prefix_space": False}',
        'never = {"add_prefix_space": False}',
        (f"{_CONTROL}::test_no_spelling_becomes_a_control_token_and_each_comes_back[unigram]",),
    ),
    Mutant(
        "overlapping spellings are cut once",
        "megatron/tokenizer/tokenizer.py",
        'self._each_start = re.compile(f"(?={any_name})")',
        "self._each_start = self._any",
        (f"{_CONTROL}::test_spellings_that_overlap_are_all_cut",),
    ),
    Mutant(
        "lower case is no part of the identity",
        "megatron/tokenizer/tokenizer.py",
        "for part in (self.settings, *beyond_eod):\n",
        "for part in beyond_eod:\n",
        ("tests/tokenizer/test_wordpiece.py::test_lower_case_is_part_of_the_identity",),
    ),
    Mutant(
        "T5's sentinels count up",
        "megatron/tokenizer/sentence_piece.py",
        "top - number for number in range(NUM_SENTINELS)",
        "top - 99 + number for number in range(NUM_SENTINELS)",
        ("tests/tokenizer/test_t5.py::test_sentinels_are_those_of_hugging_face_from_either_file",),
    ),
    Mutant(
        "CPM-2 takes the shortest match",
        "megatron/tokenizer/cpm.py",
        "stop = min(len(word), start + self._longest)",
        "stop = min(len(word), start + 2)",
        (f"{_CPM}::test_cpm2_ids_are_the_longest_matches_of_each_word",),
    ),
    Mutant(
        "CPM-1 loses line ends",
        "megatron/tokenizer/cpm.py",
        '.replace("\\n", _LINE_END)',
        "",
        (f"{_CPM}::test_cpm1_ids_are_those_of_jieba_and_sentencepiece",),
    ),
    Mutant(
        "gigatoken is trusted without a look",
        "megatron/tokenizer/build.py",
        "    if difference:\n",
        "    if difference is None:\n",
        (f"{_GIGA}::test_one_differing_id_is_named_and_gigatoken_is_dropped",),
    ),
    Mutant(
        "words are cut behind their space",
        "megatron/tokenizer/huggingface.py",
        'f" ?[^{SPACE}]+|[{SPACE}]+(?![^{SPACE}])|[{SPACE}]+"',
        'f"[^{SPACE}]+ ?|[{SPACE}]+"',
        ("tests/tokenizer/test_known_words.py::test_tokens_by_words_are_the_librarys",),
    ),
    Mutant(
        "words are looked up though a normaliser would change them",
        "megatron/tokenizer/huggingface.py",
        '        and fields.get("normalizer") is None\n',
        "",
        ("tests/tokenizer/test_known_words.py::test_only_gpt2s_pattern_and_nothing_besides_goes_by_words",),
    ),
    Mutant(
        "gigatoken without what it needs passes for one that cannot do a vocabulary",
        "megatron/tokenizer/gigatoken.py",
        "import awkward  # noqa: F401 - without it gigatoken gives lists that it says nothing of\n",
        "",
        (f"{_GIGA}::test_a_dependency_of_gigatokens_own_that_is_missing_is_named",),
    ),
    Mutant(
        "a trainer keeps every different word",
        "megatron/tokenizer/train.py",
        "                while self.held_bytes > bound:\n",
        "                while False:\n",
        (f"{_TRAIN}::test_words_that_do_not_fit_are_sampled_and_stand_for_all",),
    ),
    Mutant(
        "a sampled word stands for itself alone",
        "megatron/tokenizer/train.py",
        "unseen = round(1 / self.rate) - 1\n",
        "unseen = 0\n",
        (f"{_TRAIN}::test_words_that_do_not_fit_are_sampled_and_stand_for_all",),
    ),
    Mutant(
        "memory for a vocabulary grows past what is free",
        "megatron/tokenizer/train.py",
        "return min(self._most_bytes, max(self._least_bytes,",
        "return max(self._most_bytes, max(self._least_bytes,",
        (f"{_TRAIN}::test_the_bound_grows_with_the_text_between_the_least_and_the_most",),
    ),
    Mutant(
        "words are counted that the library does not have",
        "megatron/tokenizer/train.py",
        "|[{SPACE}]+(?![^{SPACE}])|[{SPACE}]+",
        "|[{SPACE}]+",
        (f"{_TRAIN}::test_words_that_are_counted_are_parted_by_the_library_as_the_text_is",),
    ),
    Mutant(
        "half of a Chinese WordPiece vocabulary stays empty",
        "megatron/tokenizer/train.py",
        "if num_missing <= 0 or num_characters == len(characters):\n",
        "if True:\n",
        (f"{_TRAIN}::test_wordpiece_on_chinese_fills_the_vocabulary_and_knows_the_characters",),
    ),
    Mutant(
        "words fill the half of a WordPiece vocabulary that its characters need",
        "megatron/tokenizer/train.py",
        "min(max(room // 2, num_needed), len(characters))",
        "min(room // 2, len(characters))",
        (f"{_TRAIN}::test_wordpiece_knows_the_characters_before_it_joins_words",),
    ),
)
