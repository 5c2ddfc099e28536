"""What a run will take before it is started: memory, time and traffic of a layout, and which layout is best.

Arithmetic alone: neither torch nor DeepSpeed is imported. ``tools/plan.py`` is the command. From below:

| module | holds |
|---|---|
| ``machine``, ``devices`` | what a device and the wires between devices can do; known GPUs |
| ``layout`` | one way to lay a model over a machine |
| ``work`` | seconds of the units of a model on one rank |
| ``traffic`` | bytes and seconds of the messages of a step |
| ``estimate`` | memory, step time and rates of one layout |
| ``search`` | the best layouts of a model on so many devices |
| ``remedies`` | what is too large, and the smallest change that makes a layout fit |
| ``lines`` | what to paste into the run script |
| ``checks`` | what the training says against a layout |
| ``own_flags``, ``options``, ``telling`` | from the command line to a question, and its answer in words |

``calibrate`` measures a machine; it imports torch, and nothing here imports it.
"""
