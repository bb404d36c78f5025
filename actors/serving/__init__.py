"""OpenAI's HTTP interface over one engine; `loop` first, then `model` and `http`."""
