"""The process of a rank: environment, rendezvous, signals, exit code, and the files shared with the launcher."""
