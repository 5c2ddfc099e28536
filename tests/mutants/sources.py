"""Mistakes in reading corpora and in training vocabularies."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BORDERS = "tests/data/preprocess/test_sources.py::test_records_do_not_depend_on_where_units_begin"
PACKED = "tests/data/preprocess/test_sources.py::test_files_compressed_or_cut_anywhere_give_the_same_texts"
CUT_OFF = "tests/data/preprocess/test_sources_streams.py::test_a_damaged_or_cut_off_stream_is_an_error_with_its_place"
_STREAMS = "tests/data/preprocess/test_sources_streams.py"
PARSED = "tests/data/preprocess/test_parse.py"
TRAINED = "tests/tools/test_train_tokenizer.py"

SOURCES = (
    Mutant(
        "a unit that begins at a line start leaves that line to nobody",
        "megatron/data/preprocess/readers.py",
        "    place = unit.start - 1\n",
        "    place = unit.start\n",
        (BORDERS,),
    ),
    Mutant(
        "a line that begins where a unit ends is read by both",
        "megatron/data/preprocess/readers.py",
        "record.byte_offset < unit.stop)",
        "record.byte_offset <= unit.stop)",
        (BORDERS,),
        refuses=True,
    ),
    Mutant(
        "a text between blank lines is read by the unit that holds its second half",
        "megatron/data/preprocess/readers.py",
        "    is_ours = not unit.start  #",
        "    is_ours = True  #",
        (BORDERS,),
    ),
    Mutant(
        "a line loses what stood in the block before",
        "megatron/data/preprocess/readers.py",
        '            ended[0] = b"".join([*rest, ended[0]])\n',
        "",
        (PACKED,),
    ),
    Mutant(
        "the mark at the beginning of a file shifts all places",
        "megatron/data/preprocess/readers.py",
        "        return start, chain([head[start:]], stream)\n",
        "        return 0, chain([head[start:]], stream)\n",
        (BORDERS,),
    ),
    Mutant(
        "the second member of a .gz is lost",
        "megatron/data/preprocess/readers.py",
        "            in_stream, piece = not stream.eof, stream.unused_data\n",
        '            in_stream, piece = not stream.eof, b""\n',
        (CUT_OFF,),
    ),
    Mutant(
        "a stream that was cut off passes for a whole one",
        "megatron/data/preprocess/readers.py",
        "    if in_stream:\n",
        "    if in_stream and not unpacked:\n",
        (CUT_OFF,),
    ),
    Mutant(
        "an array over several lines is told line by line",
        "megatron/data/preprocess/readers.py",
        '    if line in (b"[", b"[{") or (line.startswith(b"[") and line.endswith(b",")):',
        '    if line in (b"x",):',
        (f"{_STREAMS}::test_json_that_is_not_one_object_a_line_is_told_once_with_its_cure",),
    ),
    Mutant(
        "a first line in brackets is taken for an array",
        "megatron/data/preprocess/readers.py",
        'line.startswith(b"[") and line.endswith(b",")',
        'line.startswith(b"[")',
        (f"{_STREAMS}::test_a_first_line_that_is_bad_in_another_way_stays_a_bad_line",),
        refuses=True,
    ),
    Mutant(
        "arrays are known in plain files alone",
        "megatron/data/preprocess/readers.py",
        '        if unit.format == "jsonl":\n',
        "        if False:\n",
        (f"{_STREAMS}::test_json_that_is_not_one_object_a_line_is_told_once_with_its_cure",),
    ),
    Mutant(
        "rubbish behind a flipped bit is a bad line",
        "megatron/data/preprocess/workers.py",
        "            if encoded.bad and not is_checked:",
        "            if False and not is_checked:",
        (f"{_STREAMS}::test_a_flipped_bit_is_a_damaged_file_and_no_bad_line",),
    ),
    Mutant(
        "rubbish behind a flipped bit is a bad line of a vocabulary's text",
        "megatron/data/preprocess/corpus.py",
        "            if not is_checked:  # what looks",
        "            if False:  # what looks",
        (f"{_STREAMS}::test_a_flipped_bit_is_a_damaged_file_and_no_bad_line",),
    ),
    Mutant(
        "a mark that cat left makes its line bad",
        "megatron/data/preprocess/encode.py",
        "        if marks := _MARKS.match(data):",
        "        if marks := None:",
        (f"{PARSED}::test_byte_order_marks_before_json_are_taken_off",),
    ),
    Mutant(
        "a mark that cat left begins a line of text",
        "megatron/data/preprocess/readers.py",
        "        data = record.data.removeprefix(BOM)  #",
        "        data = record.data  #",
        ("tests/data/preprocess/test_sources.py::test_marks_that_cat_left_between_files_go_wherever_units_begin",),
    ),
    Mutant(
        "a row that is no UTF-8 is told without the name of its column",
        "megatron/data/preprocess/readers.py",
        'b",".join(orjson.dumps(key) + b":"',
        """b",".join(b'"":'""",
        (
            "tests/data/preprocess/test_sources_parquet.py::test_a_row_that_is_no_utf8_is_told_with_the_names_of_its_columns",
        ),
    ),
    Mutant(
        "a NUL passes",
        "megatron/data/preprocess/encode.py",
        '    if "\\x00" in text:\n',
        '    if text == "\\x00":\n',
        (f"{PARSED}::test_parsing_agrees_with_pythons_json_on_any_value", f"{PARSED}::test_a_bad_record_says_why"),
    ),
    Mutant(
        "a key with a dot that is there is looked for deeper",
        "megatron/data/preprocess/encode.py",
        "    if key in value:\n",
        '    if key in value and "." not in key:\n',
        (f"{PARSED}::test_keys_are_nested_or_several",),
    ),
    Mutant(
        "rows of later row groups are counted from the group's beginning",
        "megatron/data/preprocess/readers.py",
        "        number = sum(group.num_rows for group in groups[: unit.start])\n",
        "        number = 0\n",
        ("tests/data/preprocess/test_sources_parquet.py::test_parquet_row_groups_are_units_and_places_are_rows",),
    ),
    Mutant(
        "of a compressed file the sample is its beginning",
        "megatron/data/preprocess/tokenizer_corpus.py",
        "                due += share * drawn.passed_bytes\n",
        "                due += drawn.passed_bytes\n",
        (f"{TRAINED}::test_a_sample_is_of_its_size_even_and_always_the_same",),
    ),
    Mutant(
        "documents that are kept apart are trained on too",
        "megatron/data/preprocess/tokenizer_corpus.py",
        "        return True\n",
        "        return False\n",
        (f"{TRAINED}::test_what_is_kept_apart_is_not_trained_on",),
    ),
    Mutant(
        "documents that are kept apart are counted as trained on",
        "tools/train_tokenizer.py",
        "trained on {text.num_documents - len(held_out)} documents",
        "trained on {text.num_documents} documents",
        (f"{TRAINED}::test_control_tokens_come_first_and_the_same_text_gives_the_same_file",),
    ),
    Mutant(
        "a vocabulary smaller than asked for is not told",
        "tools/train_tokenizer.py",
        "    if built.vocab_size < args.vocab_size:\n",
        "    if False:\n",
        (f"{TRAINED}::test_a_vocabulary_smaller_than_asked_for_is_told",),
    ),
)
