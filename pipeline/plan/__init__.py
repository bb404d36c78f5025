"""Plans a job before anything runs: fixes its identity, shards and batching, and checks that there is enough memory."""
