"""Evaluation: log-likelihoods in any layout, tasks of lm_eval, perplexity of texts."""
