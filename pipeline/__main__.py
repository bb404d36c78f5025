"""Runs the `skipdecode` command for `python -m pipeline …`."""

from pipeline.cli.app import main

main()
