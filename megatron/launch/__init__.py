"""Start the ranks of one node, watch them, and end with the exit code of the rank that caused the end.

| file | holds |
|---|---|
| options | the launcher's flags |
| machine | GPUs without importing torch; what unset variables of the run scripts become |
| signals | SIGTERM, Ctrl-C, SLURM's warning and the end of ranks, as news to wait for |
| rendezvous | the port, and how several nodes become one job |
| elastic | the same where nodes are lost and come: who is in the next start, who leads it |
| control | what the launchers of an elastic job tell each other, and who is lost |
| board | what the nodes of a job tell each other about its end |
| ranks | starting, signalling and reaping the processes |
| verdict | which rank is the culprit, and the job's exit code |
| ending | what becomes of the job where no other start follows: its code and a line |
| remains | what a rank that has ended left in files |
| memory | what can be known of the OOM killer |
| attempt | one start of the ranks, from the first process to the verdict |
| restarts | whether a job that failed starts again |
| agent | torch's elastic agent, told how to do these things |

``python -m megatron.launch --help`` says how to use it. Plain ``torchrun`` can start the same scripts; it ends with
code 1 whatever happened, and gives the ranks up to 30 s after one of them died.
"""
