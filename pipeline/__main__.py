"""`python -m pipeline …` is `skipdecode …`."""

from pipeline.cli.app import main

main()
