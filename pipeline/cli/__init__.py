"""Defines the `skipdecode` commands and their exit statuses. Heavy libraries are imported only inside functions."""
