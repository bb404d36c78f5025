"""Train a checkpoint to skip layers (tune), measure every speed (evaluate), do both for a job's own rows (adapt)."""
