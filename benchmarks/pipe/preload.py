"""What the server that forks the contenders imports once: a process is then ready in a fraction of a second."""

import torch.distributed.pipelining  # noqa: F401

import benchmarks.pipe.contenders  # noqa: F401
import benchmarks.pipe.memory  # noqa: F401
import benchmarks.pipe.t5_model  # noqa: F401
import benchmarks.pipe.tensor_model  # noqa: F401
import tds  # noqa: F401
