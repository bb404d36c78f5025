"""Defines the keys of configuration files (unit, default, checks), and reads the files. Fast: imports no torch."""
