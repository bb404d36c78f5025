"""A job file from an input's columns: `skipdecode init`."""
