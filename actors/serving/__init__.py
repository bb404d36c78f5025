"""OpenAI's HTTP interface to one engine. Read `loop` first, then `model` and `http`."""
