"""From text files to token files: sources -> chunks -> encoding in processes -> token writer."""

from megatron.data.preprocess.job import Job, Summary, run

__all__ = ["Job", "Summary", "run"]
