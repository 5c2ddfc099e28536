"""A run's proof: the layout check at the start, proof.json at the end, and the repetition of both."""
