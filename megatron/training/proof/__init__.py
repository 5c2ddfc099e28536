"""The proof of a run: the layout check at its start, proof.json at its end, and the repetition of both."""
