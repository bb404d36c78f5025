"""The generate stage, in which actors answer prepared shards: its output, statistics, checks and coordinator."""
