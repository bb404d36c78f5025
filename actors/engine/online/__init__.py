"""Requests of many threads answered by one engine, one token a step: what a server needs of it. `loop` first."""
