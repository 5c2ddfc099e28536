"""Mistakes that a training code can make in silence, each as a change of one text, with the tests that must see it."""

from __future__ import annotations

from tests.mutants.data import DATA
from tests.mutants.dropout import DROPOUT
from tests.mutants.gradients import GRADIENTS
from tests.mutants.norms import NORMS
from tests.mutants.overlap import OVERLAP
from tests.mutants.resumed import RESUMED
from tests.mutants.sharing import SHARING
from tests.mutants.stages import STAGES
from tests.mutants.steps import STEPS
from tests.mutants.t5 import T5
from tests.mutants.tensor import TENSOR

IN_ARITHMETIC = (*GRADIENTS, *NORMS, *TENSOR, *DROPOUT, *SHARING)
IN_RUNS = (*RESUMED, *STEPS, *DATA, *STAGES, *OVERLAP, *T5)
MUTANTS = (*IN_ARITHMETIC, *IN_RUNS)
