"""Handles signals, handles processes that die (quarantine, isolated calls), and prints progress lines."""
