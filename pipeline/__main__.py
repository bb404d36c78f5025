"""`python -m pipeline …` is `skipdecode …`."""

from pipeline.cli import main

main()
