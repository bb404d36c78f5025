"""What an actor does with a prepared shard: the stage, its output columns, statistics, the run's coordinator."""
