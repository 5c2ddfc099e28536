"""Predict memory, time and communication of a layout before a run is started, and find the best layout.

The planner only does arithmetic and imports neither torch nor DeepSpeed, except for the modules of the last row.
``tools/plan.py`` is the command.

| module | contents |
|---|---|
| ``machine`` | properties of a device and of the links between devices; known GPUs |
| ``layout`` | one way to distribute a model over a machine; the command for it; the training program's checks |
| ``time_model`` | time of the units of a model on one rank; bytes and time of the communication of a step |
| ``estimate`` | memory, step time and rates of one layout |
| ``search`` | the best layouts of a model on N devices; the smallest changes that make a layout fit |
| ``options``, ``report`` | flags of the command; its output |
| ``calibrate``, ``layer_benchmarks``, ``microbenchmarks``, ``reference``, ``spawn_ranks`` | measurement of a machine |
"""
