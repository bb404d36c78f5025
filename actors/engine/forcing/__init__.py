"""Known texts through the layers of a schedule, without generating: for training, rankings and distances."""
