"""Handles signals, and processes that die (quarantine, isolated calls); prints progress lines."""
