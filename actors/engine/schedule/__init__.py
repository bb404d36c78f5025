"""Which layers run for which generated token: a schedule, its file in a checkpoint, and schedules to compare."""
