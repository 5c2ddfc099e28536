"""The pretraining programs: data sets, batches, models and forward steps for the built-in families. No torch."""
