"""Words that gave way to the field's: none of them names anything again. CHANGELOG.md has the table.

And a module is called by its own name: no import gives it another word.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORMER = (
    ("TokenFile", "IndexedDataset", "megatron/data/"),
    ("TokenFileWriter", "IndexedDatasetBuilder", "megatron/data/"),
    ("PreadReader", "FileBinReader", "megatron/data/"),
    ("MappedReader", "MMapBinReader", "megatron/data/"),
    ("Sidecar", "DatasetMetadata", "megatron/data/"),
    ("GPT2Samples", "GPTDataset", "megatron/data/"),
    ("MixedSamples", "BlendedDataset", "megatron/data/"),
    ("CorpusSamples", "MegatronDataset", "megatron/data/"),
    ("SampleOrder", "BlendSchedule", "megatron/data/"),
    ("Interleaving", "BlendIndex", "megatron/data/"),
    ("Windows", "SampleIndex", "megatron/data/"),
    ("PackedWindows", "PackedSampleIndex", "megatron/data/"),
    ("DocumentOrder", "DocumentIndex", "megatron/data/"),
    ("build_splits", "build_datasets", "megatron/data/"),
    ("Opened", "OpenCorpus", "megatron/data/"),
    ("ReplicaBatches", "DataLoader", "megatron/data/"),
    ("ReadAhead", "PrefetchWorkers", "megatron/data/"),
    ("Cache", "IndexCache", "megatron/data/"),
    ("DataPaths", "BlendPaths", "megatron/data/"),
    ("StandInTokenizer", "MockTokenizer", "megatron/data/"),
    ("RandomTokens", "MockTokens", "megatron/data/"),
    ("Tally", "JobProgress", "megatron/data/"),
    ("Limits", "ErrorLimits", "megatron/data/"),
    ("Parts", "ShardFolder", "megatron/data/preprocess/"),
    ("Plan", "JobPlan", "megatron/data/preprocess/"),
    ("Cut", "ParamPartition", "megatron/optim/"),
    ("cut_of", "partition_of", "megatron/optim/"),
    ("Masters", "MainParams", "megatron/optim/"),
    ("OverlappedGradients", "OverlappedMainGradients", "megatron/optim/"),
    ("WholeGradients", "MainGradients", "megatron/optim/"),
    ("GradientParts", "PartitionedGradients", "megatron/optim/"),
    ("PartialGradients", "SequenceParallelGradients", "megatron/optim/"),
    ("Share", "GradientShard", "megatron/optim/"),
    ("WeightUnits", "ParamUnits", "megatron/optim/"),
    ("CallOrder", "GatherOrder", "megatron/optim/"),
    ("Arrival", "ParamInit", "megatron/optim/"),
    ("Offload", "OffloadConfig", "megatron/optim/"),
    ("LossScaler", "GradScaler", "megatron/optim/"),
    ("LearningRate", "LRScheduler", "megatron/optim/"),
    ("Keeping", "ActivationOffload", "megatron/mpu/"),
    ("Keeper", "ActivationStorage", "megatron/mpu/"),
    ("is_unset", "is_uninitialized", "megatron/mpu/"),
    ("without_memory", "init_empty_weights", "megatron/mpu/"),
    ("give_memory", "materialize", "megatron/mpu/"),
    ("CountedDropout", "PhiloxDropout", "megatron/mpu/"),
    ("Position", "DropoutKey", "megatron/mpu/"),
    ("Underway", "AsyncHandle", "megatron/mpu/"),
    ("start_joining", "start_all_gather", "megatron/mpu/"),
    ("start_summing_parts", "start_reduce_scatter", "megatron/mpu/"),
    ("counts_here", "is_counted_in_norm", "tds/gradients"),
    ("Flight", "GradientBucket", "tds/gradients"),
    ("BucketOrder", "BucketSchedule", "tds/gradient_reducer"),
    ("Reduction", "GradientReducer", "tds/gradient_reducer"),
    ("Exchange", "P2PCommunicator", "tds/"),
    ("Crossing", "BoundaryTensors", "tds/p2p/"),
    ("Transfer", "P2PHandle", "tds/p2p/"),
    ("Links", "StageLinks", "tds/p2p/"),
    ("Layout", "PackedLayout", "tds/p2p/"),
    ("TensorSpec", "TensorMeta", "tds/p2p/"),
    ("waiting_together", "collective_scope", "tds/p2p/"),
    ("doing_together", "current_collective", "tds/p2p/"),
    ("Seeing", "EngineMonitor", "tds/engine/"),
    ("BubbleMeter", "BubbleTimer", "tds/"),
    ("Plan", "SchedulePlan", "tds/engine/"),
    ("nesting", "describe_structure", "tds/engine/"),
    ("DataAgreement", "DataConsistency", "tds/engine/"),
    ("Agreement", "LossReduction", "tds/loss"),
    ("agree_on_loss", "all_reduce_loss", "tds/loss"),
    ("Means", "MeanLosses", "tds/loss"),
    ("StockNames", "DeepSpeedAttributes", "tds/engine/"),
    ("forgetting", "discarding_gradients_on_error", "tds/engine/"),
    ("told_together", "all_ranks_problem", "tds/engine/"),
    ("announce", "log_rank_0", "tds/log"),
    ("Splitter", "WeightGradStore", "tds/engine/"),
    ("pieces_on", "chunks_on", "tds/partition"),
    ("layers_in_chunks", "partition_uniform_chunks", "tds/partition"),
    ("balanced_bounds", "partition_balanced", "tds/partition"),
    ("bounds_in_chunks", "partition_balanced_chunks", "tds/partition"),
    ("together", "gather_verdict", "megatron/checkpoint/"),
    ("Staging", "StagingBuffer", "megatron/checkpoint/"),
    ("BackgroundSaver", "AsyncSaver", "megatron/checkpoint/"),
    ("Durable", "Committed", "megatron/checkpoint/"),
    ("Keep", "RetentionPolicy", "megatron/checkpoint/"),
    ("Patience", "FileVisibility", "megatron/checkpoint/"),
    ("Found", "LegacyWeights", "megatron/checkpoint/legacy/"),
    ("Shell", "UnpickledStub", "megatron/checkpoint/legacy/"),
    ("talk", "interactive", "megatron/generate/"),
    ("likeliest", "vocab_parallel_argmax", "megatron/generate/"),
    ("Writer", "TextGenerator", "megatron/generate/"),
    ("chooser", "make_sampler", "megatron/generate/"),
    ("T5Samples", "T5Dataset", "megatron/models/t5/"),
    ("BertSamples", "BertDataset", "megatron/models/bert/"),
    ("SpanFileSamples", "SpanFilesDataset", "megatron/models/t5/"),
    ("apportion", "split_noise", "megatron/models/t5/"),
    ("Sizes", "ModelArgs", "megatron/models/common/model_args"),
    ("Sizes", "ModelDimensions", "megatron/models/common/dimensions"),
    ("T5Sizes", "T5ModelArgs", "megatron/models/t5/"),
    ("BertSizes", "BertModelArgs", "megatron/models/bert/"),
    ("Place", "ParallelContext", "megatron/models/common/model_args"),
    ("sizes_from", "model_args_from", "megatron/models/common/model_args"),
    ("t5_sizes_from", "t5_model_args_from", "megatron/models/t5/"),
    ("bert_sizes_from", "bert_model_args_from", "megatron/models/bert/"),
    ("LastMade", "LastValueCache", "megatron/models/common/"),
    ("LayerCache", "LayerKVCache", "megatron/models/common/"),
    ("Slots", "KVCacheSlots", "megatron/models/common/"),
    ("whole_logits", "materialize_logits", "megatron/models/common/"),
    ("stage_recompute", "recompute_of_stage", "megatron/models/common/"),
    ("Part", "ModelStage", "megatron/models/common/"),
    ("part_of", "stage_of", "megatron/models/common/"),
    ("relay", "forward_through_stages", "megatron/models/common/"),
    ("Reader", "CachedModel", "megatron/models/common/"),
    ("Form", "HFFormat", "megatron/models/common/"),
    ("Recipe", "WeightMapping", "megatron/models/common/"),
    ("T5Units", "T5LayerOrder", "megatron/models/t5/"),
    ("Waiting", "SavedActivations", "megatron/models/common/"),
    ("Flying", "CommunicationBuffers", "megatron/models/common/"),
    ("GPT2Costs", "DecoderCosts", "megatron/models/common/"),
    ("culprit", "root_cause", "megatron/launch/outcome"),
    ("Board", "NodeBoard", "megatron/launch/"),
    ("Attempt", "RankGroup", "megatron/launch/"),
    ("Found", "MeasuredMachine", "megatron/planner/calibrate"),
    ("Found", "RankedLayouts", "megatron/planner/search"),
    ("Tempo", "EfficiencyFactor", "megatron/planner/"),
    ("Timed", "LayerTimings", "megatron/planner/"),
    ("Marks", "EventMarks", "megatron/planner/"),
    ("Pace", "TimingBudget", "megatron/planner/"),
    ("Remedy", "LayoutChange", "megatron/planner/"),
    ("standing_in", "with_placeholder_sizes", "megatron/planner/"),
    ("Phases", "Sections", "megatron/training/"),
    ("PipelineEngine", "PipelineStepEngine", "megatron/training/"),
    ("FiniteOnly", "FiniteLossCheck", "megatron/training/"),
    ("Guard", "StabilityGuard", "megatron/training/"),
    ("Recent", "RunningStatistics", "megatron/training/"),
    ("find_drift", "check_replicas", "megatron/training/"),
    ("Drift", "ReplicaMismatch", "megatron/training/"),
    ("Copies", "ReplicaGroup", "megatron/training/"),
    ("Suspect", "StragglerDetector", "megatron/training/"),
    ("OfRanks", "RankMetrics", "megatron/training/"),
    ("Screen", "TrainingConsole", "megatron/training/"),
    ("Progress", "TrainState", "megatron/training/"),
    ("Taken", "RestoreOptions", "megatron/training/"),
    ("Branch", "CheckpointLineage", "megatron/training/"),
    ("Journal", "EventLog", "megatron/training/"),
    ("adopt", "set_rank_environment", "megatron/training/entrypoint"),
    ("compare_ranks", "check_ranks_identical", "megatron/training/"),
    ("by_rank_0", "run_on_rank_0", "megatron/training/"),
    ("stand_in_tokenizer", "mock_tokenizer", "megatron/training/"),
    ("SeeingConfig", "LoggingConfig", "megatron/config/"),
    ("resolve_batch", "resolve_batch_size", "megatron/arguments/"),
    ("to_bytes", "manifest_to_bytes", "megatron/checkpoint/metadata"),
    ("from_bytes", "manifest_from_bytes", "megatron/checkpoint/metadata"),
    ("NAME", "MANIFEST_NAME", "megatron/checkpoint/manifest"),
    ("name_of", "shard_file_name", "megatron/checkpoint/shard_file"),
    ("write", "write_shard_file", "megatron/checkpoint/shard_file"),
    ("named", "list_checkpoints", "megatron/checkpoint/folders"),
    ("commit", "commit_checkpoint", "megatron/checkpoint/folders"),
    ("find", "find_legacy_files", "megatron/checkpoint/legacy/files"),
    ("read", "unpickle_allowed", "megatron/checkpoint/legacy/files"),
    ("read", "read_legacy_weights", "megatron/checkpoint/legacy/weights"),
    ("note", "heartbeat_note", "megatron/training/failure"),
    ("now", "heartbeat_now", "megatron/training/failure"),
    ("values", "compile_metrics", "megatron/training/callbacks/compile_meter"),
    ("line", "compile_line", "megatron/training/callbacks/compile_meter"),
    ("problems", "unused_flag_problems", "megatron/arguments/unused_flags"),
    ("soft_values", "default_values", "megatron/arguments/"),
    ("FORM", "FORMAT", "megatron/models/"),
    ("form_of", "format_of", "megatron/checkpoint/huggingface/"),
    ("with_forms", "families_with_format", "megatron/checkpoint/huggingface/"),
    ("to_ours", "config_from_huggingface", "megatron/checkpoint/huggingface/"),
    ("to_theirs", "config_to_huggingface", "megatron/checkpoint/huggingface/"),
    ("own", "expected_weights", "megatron/checkpoint/huggingface/"),
    ("opened", "open_pretrained", "megatron/checkpoint/huggingface/"),
    ("difference", "tokenizer_difference", "megatron/checkpoint/huggingface/"),
    ("told_layers", "format_layers", "tds/engine/"),
    ("tell_what_acts_on_nothing", "log_unused_settings", "tds/engine/"),
    ("told", "format_operations", "tds/watchdog/diagnosis"),
    ("told_stack", "format_stack", "tds/watchdog/diagnosis"),
    ("told_place", "format_place", "tds/watchdog/diagnosis"),
    ("tell", "write_report", "tds/watchdog/alarm"),
    ("told", "format_tensor", "tds/p2p/boundary"),
    ("rows", "adaptor_rows", "megatron/accelerators"),
    ("tell", "report_failure", "megatron/training/failure"),
    ("told_by_launcher", "peer_failure", "megatron/training/failure"),
    ("is_first_to_tell", "is_first_to_report", "megatron/training/failure"),
    ("told_ranks", "format_ranks", "megatron/training/rendezvous"),
    ("Told", "RankData", "megatron/training/data"),
    ("told_too_large", "too_large_message", "megatron/files"),
    ("Tell", "Report", "megatron/planner/spawn_ranks"),
    ("rows", "statistics_rows", "megatron/data/inspect/statistics"),
    ("rows", "read_records", "megatron/data/preprocess/readers"),
    ("told", "explain_kill", "megatron/launch/attempt"),
    ("untouched", "preserve_training_state", "tds/engine/evaluate"),
    ("result", "evaluation_result", "tds/engine/evaluate"),
)
"""(former name, name, where it was defined): of one class or function, in the files whose paths begin so."""
ATTRIBUTES = {
    "take_activations": "recv_forward",
    "send_activations": "send_forward",
    "take_gradients": "recv_backward",
    "send_gradients": "send_backward",
    "putting_off": "deferring",
    "go_back": "truncate_to_step",
    "_noting": "_recording_losses",
    "council": "decision_group",
    "chunk_ready": "register_chunk_ready",
    "start_rest": "finish_launch",
    "fly": "start_all_reduce",
    "land": "wait",
}
"""Former methods and attributes -> their names."""
UNIQUE = {
    "BackgroundSaver",
    "BertSamples",
    "BertSizes",
    "BubbleMeter",
    "CallOrder",
    "CorpusSamples",
    "CountedDropout",
    "DataAgreement",
    "DataPaths",
    "DocumentOrder",
    "FiniteOnly",
    "GPT2Costs",
    "GPT2Samples",
    "GradientParts",
    "LastMade",
    "LayerCache",
    "LearningRate",
    "LlamaSizes",
    "MappedReader",
    "MixedSamples",
    "MptSizes",
    "OfRanks",
    "OverlappedGradients",
    "PackedWindows",
    "PartialGradients",
    "PreadReader",
    "RandomTokens",
    "ReadAhead",
    "ReplicaBatches",
    "SampleOrder",
    "SeeingConfig",
    "SpanFileSamples",
    "StandInTokenizer",
    "StockNames",
    "T5Samples",
    "T5Sizes",
    "T5Units",
    "TensorSpec",
    "TokenFile",
    "TokenFileWriter",
    "WeightUnits",
    "WholeGradients",
    "agree_on_loss",
    "balanced_bounds",
    "bert_sizes_from",
    "bounds_in_chunks",
    "build_splits",
    "by_rank_0",
    "compare_ranks",
    "counts_here",
    "cut_of",
    "doing_together",
    "find_drift",
    "form_of",
    "give_memory",
    "is_first_to_tell",
    "is_unset",
    "layers_in_chunks",
    "llama_sizes_from",
    "load_back",
    "mpt_sizes_from",
    "note_durable",
    "part_of",
    "pieces_on",
    "resolve_batch",
    "sizes_from",
    "stage_recompute",
    "stand_in_tokenizer",
    "standing_in",
    "soft_values",
    "start_joining",
    "start_summing_parts",
    "t5_sizes_from",
    "tell_step",
    "tell_what_acts_on_nothing",
    "told_by_launcher",
    "told_layers",
    "told_place",
    "told_ranks",
    "told_stack",
    "told_together",
    "told_too_large",
    "waiting_together",
    "whole_logits",
    "with_forms",
    "without_memory",
}
"""Former names that stood for one thing: nothing at all is called so."""
WORDS = {"firm", "say", "saying", "settle", "soft", "tell", "telling", "tempo", "tidy", "told", "unasked", "wants"}
"""Not in any name, a variable's neither: log, report, format; explicit, default."""
REPORTED = re.compile(r"\b(?!test_)(?:\w+_)?told(?:_\w+)?\b", re.IGNORECASE)


@pytest.fixture(scope="module")
def trees() -> Iterator[dict[str, ast.Module]]:
    """The syntax of each file of the source; a worker that runs other tests does not hold it."""
    paths = [path for folder in ("megatron", "tds") for path in sorted((ROOT / folder).rglob("*.py"))]
    gc.disable()  # what is made is kept: to look through it again and again takes longer than to make it
    yield {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    defined.cache_clear()
    gc.enable()


def identifiers(tree: ast.AST) -> set[str]:
    """All names that code has or reads; those of tables of former names are strings."""
    found = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                found.add(name)
    return found


@functools.cache
def defined(tree: ast.Module) -> frozenset[str]:
    targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    names = {t.id for t in targets if isinstance(t, ast.Name)}
    return frozenset(names | {n.name for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))})


def test_words_that_stood_for_one_thing_name_nothing(trees: dict[str, ast.Module]) -> None:
    assert not [
        (path, sorted(back))
        for path, tree in trees.items()
        if (back := identifiers(tree) & (UNIQUE | ATTRIBUTES.keys()))
    ]


@pytest.mark.parametrize(("former", "name", "where"), FORMER)
def test_a_former_name_is_defined_no_more(former: str, name: str, where: str, trees: dict[str, ast.Module]) -> None:
    names = [defined(tree) for path, tree in trees.items() if path.startswith(where)]
    assert not any(former in found for found in names)
    assert any(name in found for found in names)


def made_names(tree: ast.Module) -> set[str]:
    """All names that a file makes, those of arguments and of a function's own variables among them."""
    found = {*defined(tree)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_nothing_is_named_by_a_word_that_gave_way(trees: dict[str, ast.Module]) -> None:
    named = [(path, name) for path, tree in trees.items() for name in sorted(made_names(tree))]
    assert not [(path, name) for path, name in named if WORDS & set(name.lower().split("_"))]


def test_tests_and_tools_name_what_is_reported_by_another_word_than_told() -> None:
    """The names of tests are sentences, and may have it."""
    found = []
    for path in sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]):
        if ROOT / "tests" / "benchmarks" in path.parents:
            continue
        text = path.read_text(encoding="utf-8")
        names = made_names(ast.parse(text)) if REPORTED.search(text) else set()
        found += [(str(path), n) for n in names if not n.startswith("test_") and "told" in n.lower().split("_")]
    assert found == []


def other_words(text: str, modules: set[str]) -> list[str]:
    """The imports that call one of ``modules`` by another word than the end of its dotted name."""
    found = []
    for home, name, word in re.findall(r"^ *from ([\w.]+) import (\w+) as (\w+)$", text, re.MULTILINE):
        module = f"{home}.{name}"
        if module in modules and name != "__main__" and not f"_{module.replace('.', '_')}".endswith(f"_{word}"):
            found.append(f"{module} as {word}")
    return found


def test_a_module_is_called_by_its_name() -> None:
    texts = {
        path.relative_to(ROOT): path.read_text(encoding="utf-8")
        for folder in ("benchmarks", "examples", "megatron", "tds", "tests", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in texts}
    assert not [(str(path), words) for path, text in texts.items() if (words := other_words(text, modules))]
    text = "from megatron.data import cache as data_cache\nfrom megatron.data import cache as keeper\n"
    assert other_words(text, modules) == ["megatron.data.cache as keeper"]


def test_the_changelog_has_them_all() -> None:
    rows = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    wanted = [(name, former) for former, name, _ in FORMER] + [(name, former) for former, name in ATTRIBUTES.items()]
    assert not [pair for pair in wanted if not any(row.startswith(f"| `{pair[0]}` | `{pair[1]}` |") for row in rows)]
