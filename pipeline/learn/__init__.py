"""Train a checkpoint to skip layers (tune), measure it at each speed (evaluate), do both on a job's rows (adapt)."""
