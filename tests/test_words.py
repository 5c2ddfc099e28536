"""Words that gave way to the field's: none of them names anything again. docs/glossary.md has the table."""

from __future__ import annotations

import ast
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
    ("counts_here", "is_counted_in_norm", "megatron/mpu/"),
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
    ("piece_of", "chunk_of", "tds/module"),
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
    ("Sizes", "ModelDimensions", "megatron/models/common/decoder_cost"),
    ("T5Sizes", "T5ModelArgs", "megatron/models/t5/"),
    ("LlamaSizes", "LlamaModelArgs", "megatron/models/llama/"),
    ("BertSizes", "BertModelArgs", "megatron/models/bert/"),
    ("MptSizes", "MptModelArgs", "megatron/models/mpt/"),
    ("Place", "ParallelContext", "megatron/models/common/model_args"),
    ("sizes_from", "model_args_from", "megatron/models/common/model_args"),
    ("t5_sizes_from", "t5_model_args_from", "megatron/models/t5/"),
    ("bert_sizes_from", "bert_model_args_from", "megatron/models/bert/"),
    ("llama_sizes_from", "llama_model_args_from", "megatron/models/llama/"),
    ("mpt_sizes_from", "mpt_model_args_from", "megatron/models/mpt/"),
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
    ("Vote", "StepDecision", "megatron/training/"),
    ("Guard", "StabilityGuard", "megatron/training/"),
    ("Recent", "RunningStatistics", "megatron/training/"),
    ("find_drift", "check_replicas", "megatron/training/"),
    ("Drift", "ReplicaMismatch", "megatron/training/"),
    ("Copies", "ReplicaGroup", "megatron/training/"),
    ("Suspect", "StragglerDetector", "megatron/training/"),
    ("OfRanks", "RankMetrics", "megatron/training/"),
    ("tell_step", "training_log", "megatron/training/"),
    ("Screen", "TrainingConsole", "megatron/training/"),
    ("Progress", "TrainState", "megatron/training/"),
    ("Taken", "RestoreOptions", "megatron/training/"),
    ("Branch", "CheckpointLineage", "megatron/training/"),
    ("Journal", "EventLog", "megatron/training/"),
    ("adopt", "set_rank_environment", "megatron/training/entrypoint"),
    ("compare_ranks", "check_ranks_identical", "megatron/training/"),
    ("by_rank_0", "run_on_rank_0", "megatron/training/"),
    ("stand_in_tokenizer", "mock_tokenizer", "megatron/training/"),
    ("load_back", "roll_back", "megatron/training/"),
    ("note_durable", "on_save_committed", "megatron/training/"),
    ("explained", "explain_nonfinite", "megatron/training/rollback"),
    ("SeeingConfig", "LoggingConfig", "megatron/config/"),
    ("resolve_batch", "resolve_batch_size", "megatron/arguments/"),
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
    "give_memory",
    "is_unset",
    "layers_in_chunks",
    "llama_sizes_from",
    "load_back",
    "mpt_sizes_from",
    "note_durable",
    "part_of",
    "piece_of",
    "pieces_on",
    "resolve_batch",
    "sizes_from",
    "stage_recompute",
    "stand_in_tokenizer",
    "standing_in",
    "start_joining",
    "start_summing_parts",
    "t5_sizes_from",
    "tell_step",
    "told_together",
    "waiting_together",
    "whole_logits",
    "without_memory",
}
"""Former names that stood for one thing: nothing at all is called so."""
FILES = {
    p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8")
    for folder in ("megatron", "tds")
    for p in sorted((ROOT / folder).rglob("*.py"))
}
TREES = {path: ast.parse(text) for path, text in FILES.items()}


def identifiers(tree: ast.AST) -> set[str]:
    """All names that code has or reads; those of tables of former names are strings."""
    found = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                found.add(name)
    return found


def defined(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


def test_words_that_stood_for_one_thing_name_nothing() -> None:
    assert not [
        (path, sorted(back))
        for path, tree in TREES.items()
        if (back := identifiers(tree) & (UNIQUE | ATTRIBUTES.keys()))
    ]


@pytest.mark.parametrize(("former", "name", "where"), FORMER)
def test_a_former_name_is_defined_no_more(former: str, name: str, where: str) -> None:
    names = [defined(tree) for path, tree in TREES.items() if path.startswith(where)]
    assert not any(former in found for found in names)
    assert any(name in found for found in names)


def test_the_glossary_has_them_all() -> None:
    rows = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    wanted = [(name, former) for former, name, _ in FORMER] + [(name, former) for former, name in ATTRIBUTES.items()]
    assert not [pair for pair in wanted if not any(row.startswith(f"| `{pair[0]}` | `{pair[1]}` |") for row in rows)]
