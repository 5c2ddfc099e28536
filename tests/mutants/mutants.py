"""Mistakes that a training code can make in silence, each as a change of one text, with the tests that must see it."""

from __future__ import annotations

from tests.mutants.bert import BERT
from tests.mutants.calibrate import CALIBRATION
from tests.mutants.callbacks import IN_CALLBACKS
from tests.mutants.causal_attention import CAUSAL_ATTENTION, COMPILED_LAYERS
from tests.mutants.causal_kernel import CAUSAL_KERNEL
from tests.mutants.chunked_loss import CHUNKED_LOSS
from tests.mutants.cluster import CLUSTER
from tests.mutants.config_file import CONFIG_FILE
from tests.mutants.context_parallel import CONTEXT_PARALLEL
from tests.mutants.contract import CONTRACT
from tests.mutants.convert import CONVERT
from tests.mutants.counted import COUNTED_MASKS
from tests.mutants.data import DATA
from tests.mutants.decoder import DECODER
from tests.mutants.device import DEVICE
from tests.mutants.docs import DOCS_MISTAKES
from tests.mutants.documents import DOCUMENTS
from tests.mutants.dropout import DROPOUT
from tests.mutants.dsfmt import DSFMT
from tests.mutants.dumps import DUMPS
from tests.mutants.elastic import ELASTIC
from tests.mutants.evaluation import EVALUATION
from tests.mutants.expert_costs import IN_EXPERT_COSTS
from tests.mutants.expert_metrics import OF_EXPERT_METRICS
from tests.mutants.experts import IN_EXPERTS
from tests.mutants.flags import FLAGS
from tests.mutants.flips import FLIPPED
from tests.mutants.fused_dropout import FUSED_DROPOUT
from tests.mutants.fused_linear import OF_FUSED_LINEAR
from tests.mutants.generate import GENERATE
from tests.mutants.gpu_runs import GPU_RUNS
from tests.mutants.gpu_speed import GPU_SPEED
from tests.mutants.grad_buffer import GRAD_BUFFER
from tests.mutants.gradients import GRADIENTS
from tests.mutants.guard import GUARDED
from tests.mutants.host_copies import HOST_COPIES
from tests.mutants.host_reads import HOST_READS
from tests.mutants.kills import KILLED_RUNS
from tests.mutants.launch import LAUNCH
from tests.mutants.leftovers import LEFTOVERS
from tests.mutants.legacy import LEGACY
from tests.mutants.llama import LLAMA
from tests.mutants.many_ranks import MANY_RANKS
from tests.mutants.migration import MIGRATION
from tests.mutants.mixture import MIXTURE
from tests.mutants.modern import MODERN_DECODERS
from tests.mutants.mpt import MPT
from tests.mutants.muon import MUON
from tests.mutants.norms import NORMS
from tests.mutants.on_a_device import ON_A_DEVICE
from tests.mutants.overlap import OVERLAP
from tests.mutants.overlapped_gradients import OVERLAPPED_GRADIENTS
from tests.mutants.overlapped_passes import OF_OVERLAPPED_PASSES
from tests.mutants.packing import PACKING
from tests.mutants.placements import IN_PLACEMENTS
from tests.mutants.plain_decoders import PLAIN_DECODERS
from tests.mutants.planner import PLANNER
from tests.mutants.preprocess import PREPROCESS
from tests.mutants.pretrained import PRETRAINED
from tests.mutants.put_off import OF_PUT_OFF
from tests.mutants.rates import RATES
from tests.mutants.reading import READING
from tests.mutants.reasons import ENDS
from tests.mutants.recompute import RECOMPUTE
from tests.mutants.report import OF_REPORTS
from tests.mutants.resumed import RESUMED
from tests.mutants.rows import ROWS
from tests.mutants.saves import SAVES
from tests.mutants.seq_length import SEQ_LENGTH
from tests.mutants.sequence_parallel import SEQUENCE_PARALLEL
from tests.mutants.sft import SFT
from tests.mutants.sharing import SHARING
from tests.mutants.side_effects import SIDE_EFFECTS
from tests.mutants.sources import SOURCES
from tests.mutants.stages import STAGES
from tests.mutants.steps import STEPS
from tests.mutants.store import STORE
from tests.mutants.stores import STORES
from tests.mutants.t5 import T5
from tests.mutants.tensor import TENSOR
from tests.mutants.tokenizers import TOKENIZERS
from tests.mutants.tools import TOOLS
from tests.mutants.train import TRAIN
from tests.mutants.uploads import UPLOADS
from tests.mutants.watch import WATCHED
from tests.mutants.wheels import GATHERED
from tests.mutants.without_a_gpu import WITHOUT_A_GPU
from tests.mutants.zero import ZERO_1
from tests.mutants.zero_parts import ZERO_PARTS

IN_ARITHMETIC = (*GRADIENTS, *NORMS, *TENSOR, *DROPOUT, *COUNTED_MASKS, *SHARING, *CONVERT)
IN_RUNS = (
    *RESUMED, *STEPS, *DATA, *STAGES, *IN_PLACEMENTS, *OF_PUT_OFF, *OF_OVERLAPPED_PASSES, *OVERLAP,
    *T5, *ZERO_1, *SIDE_EFFECTS,
)  # fmt: skip
IN_TEXT = (*SOURCES, *TOKENIZERS, *PREPROCESS, *CLUSTER, *STORES, *TOOLS, *LEGACY, *GENERATE)
IN_ORDER = (*READING, *MIXTURE, *PACKING, *TRAIN, *SEQ_LENGTH, *SFT)
IN_FAULTS = (
    *STORE, *SAVES, *MANY_RANKS, *GUARDED, *IN_CALLBACKS, *LAUNCH, *ELASTIC, *WATCHED, *DSFMT, *FLIPPED, *ROWS, *ENDS,
    *KILLED_RUNS,
)  # fmt: skip
IN_FAMILIES = (*DECODER, *IN_EXPERTS, *LLAMA, *MPT, *BERT, *PRETRAINED, *PLAIN_DECODERS, *MODERN_DECODERS)
IN_SYSTEMS = (
    *ZERO_PARTS,
    *MUON,
    *EVALUATION,
    *RATES,
    *RECOMPUTE,
    *DEVICE,
    *ON_A_DEVICE,
    *HOST_COPIES,
    *DUMPS,
    *CONTRACT,
    *GATHERED,
    *WITHOUT_A_GPU,
)
IN_SPEED = (
    *SEQUENCE_PARALLEL,
    *CONTEXT_PARALLEL,
    *CHUNKED_LOSS,
    *CAUSAL_ATTENTION,
    *CAUSAL_KERNEL,
    *DOCUMENTS,
    *COMPILED_LAYERS,
    *OVERLAPPED_GRADIENTS,
    *OF_FUSED_LINEAR,
    *GRAD_BUFFER,
    *HOST_READS,
    *UPLOADS,
    *FUSED_DROPOUT,
)
IN_SIGHT = (
    *PLANNER,
    *IN_EXPERT_COSTS,
    *CALIBRATION,
    *OF_REPORTS,
    *OF_EXPERT_METRICS,
    *DOCS_MISTAKES,
    *LEFTOVERS,
    *FLAGS,
    *CONFIG_FILE,
    *MIGRATION,
    *GPU_RUNS,
    *GPU_SPEED,
)
PARTS = {
    "arithmetic": IN_ARITHMETIC,
    "runs": IN_RUNS,
    "text": IN_TEXT,
    "order": IN_ORDER,
    "faults": IN_FAULTS,
    "families": IN_FAMILIES,
    "systems": IN_SYSTEMS,
    "speed": IN_SPEED,
    "sight": IN_SIGHT,
}
MUTANTS = tuple(mutant for part in PARTS.values() for mutant in part)
