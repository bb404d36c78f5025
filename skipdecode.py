"""`skipdecode …`, `python -m skipdecode …`, and `from skipdecode import Generator`.

A user's own folder `pipeline` or file `actors.py` may lie where Python looks first. The command imports the packages
beside this file all the same, in its own process and in Ray's workers.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
PACKAGES = ("actors", "pipeline")


def use_own_packages() -> None:
    """Import the packages beside this file; what is imported from them later is theirs too."""
    sys.path.insert(0, str(ROOT))
    for name in PACKAGES:
        importlib.import_module(name)


def worker_environment() -> dict[str, str] | None:
    """Return the runtime environment with which Ray's workers import them too; None where they do so without.

    A worker looks in the job's working directory first.
    """
    searched = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    found = [PathFinder.find_spec(name, searched) for name in PACKAGES]
    if all(one is None or (one.origin and ROOT in Path(one.origin).resolve().parents) for one in found):
        return None
    return {"worker_process_setup_hook": f"skipdecode.{use_own_packages.__name__}"}


def main() -> None:
    """Run the command line."""
    use_own_packages()
    from pipeline.cli.app import main

    main()


def __getattr__(name: str) -> Any:
    if name == "Generator":  # on first use: it brings torch along
        from actors.generator import Generator

        return Generator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    importlib.import_module("skipdecode").main()
