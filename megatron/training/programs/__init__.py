"""The pretraining programs: data sets, batches, models and forward steps of the built-in families. No torch."""
