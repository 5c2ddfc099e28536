"""Launcher: start the ranks of one node, watch them, and exit with the code of the rank that caused the job to end.

| file | content |
|---|---|
| options | the launcher's flags |
| machine | detection of GPUs without importing torch; defaults for unset variables of the run scripts |
| agent | torch's elastic agent, adapted to start, watch and end the ranks of a node |
| attempt | one start of the ranks, from the first process to the root cause of its end; OOM kills |
| processes | start, signal and reap the rank processes; signals to the launcher |
| outcome | root cause over all nodes, exit code of the job, restarts |
| rendezvous | the port of the job, and the rendezvous of a fixed number of nodes |
| elastic | the rendezvous of an elastic job: the nodes of the next start, and their leader |
| control | messages between the launchers of an elastic job, and detection of lost nodes |

``python -m megatron.launch --help`` documents the flags. Plain ``torchrun`` can start the same scripts, but always
exits with code 1 after a failure, and waits for the ranks up to 30 s after one of them died.
"""
