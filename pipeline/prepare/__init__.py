"""Turns rows into token ids: templates, chats, a row's sampling parameters and labels. A bad row gets an error.

Imports read, checkpoints, config and messages; `stage` also imports runtime. Nothing here imports ray.
"""
