"""Handles signals and processes that die (quarantine, isolated calls), and prints progress lines."""
