"""A run, a token file and a tokenizer of commit 8c23b9e6 whose documents end with the HTML tag </s>.

The vocabulary has <eos>, and </s> as an added token that is not special. Commit 8c23b9e6 created ``corpus`` with
tools/preprocess_data.py, and ``run`` with pretrain_gpt2.py, ``FLAGS`` and ``--exit-interval 2``.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "training" / "end_of_document"
TOKENIZER_PATH = FOLDER / "tokenizer"
CORPUS_PREFIX = FOLDER / "corpus"
FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --max-position-embeddings 16 --seq-length 16 --batch-size "
    "2 --train-iters 4 --lr 1e-3 --device cpu --eval-iters 0 --eval-interval 0 --fp32 --log-interval 1"
).split()
EXPECTED_LOSSES = {3: 5.6592, 4: 5.6724}
"""Step -> loss if commit 8c23b9e6 resumes the run."""
OLD_IDENTITY = "ec694447ae7d20c01cb99901ce49e2cac805ad638a87d2bdfaebfe88b444027e"
