"""What happens when a process dies or is stopped: signals, quarantine, isolated calls; and progress lines.

Imports storage, config and messages; no ray.
"""
