"""Gradients of a step: accumulation over micro-batches and reduction over the replicas."""
