"""OpenAI's HTTP interface over one engine: bodies in, answers and events out. Knows neither Ray nor the pipeline.

A request's body becomes rows of the engine (`bodies`, `model`), which `actors.engine.online` answers among those of
other requests (`calls`); `http` is the ASGI application around it.
"""
