"""Evaluation in any layout: log-likelihoods, lm_eval tasks, and perplexity on texts."""
