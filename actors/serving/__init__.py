"""Serves one engine over OpenAI's HTTP interface. Read `loop` first, then `model` and `http`."""
