"""The generate stage, in which actors answer prepared shards, with its output columns, statistics and coordinator."""
