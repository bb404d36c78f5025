"""The generate stage: actors answer prepared shards. Also its output columns, statistics, and the run's coordinator."""
