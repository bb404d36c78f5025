"""Defines the keys of configuration files (unit, default, checks), and reads the files. Does not import torch."""
