"""Compare one training step of any trainer in a parallel layout with the same step in one process.

``dump_reader`` reads the dumps of ``tools/referee_hook.py``, ``placement`` finds each shard in the unsharded tensor,
``diagnosis`` names the fault in a gradient, ``scalars`` names faults in the loss and the gradient norm, and
``verdict`` combines them. ``tools/referee.py`` is the command line.
"""
