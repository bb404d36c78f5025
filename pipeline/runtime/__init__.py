"""Which processes run, and what happens when one dies or is stopped: Ray, signals, quarantine, isolated calls.

Imports storage and config; ray in `ray_session`, `ray_head` and `ray_metrics` only.
"""
