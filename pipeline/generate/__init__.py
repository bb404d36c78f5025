"""The generate stage, in which actors answer prepared shards; its output columns, statistics and coordinator."""
