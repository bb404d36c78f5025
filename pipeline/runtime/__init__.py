"""Handles signals, and processes that die (quarantine, isolated calls); prints progress lines.

Imports storage, config and messages; no ray.
"""
