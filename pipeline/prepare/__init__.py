"""A row to token ids: templates, chat, own sampling parameters and labels; a bad row gets its error.

Imports read, checkpoints, config and messages; `stage` also imports runtime. Nothing here imports ray.
"""
