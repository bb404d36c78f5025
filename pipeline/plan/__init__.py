"""Plans a job before anything runs: fixes its identity, shards and batching, and checks the memory that it needs."""
