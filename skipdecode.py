"""`skipdecode …`, `python -m skipdecode …`, and `from skipdecode import EngineSettings, Generator`.

The folder in which a user works may hold a `pipeline` or an `actors.py` of its own, which Python would import first.
The command always imports the packages beside this file, in its own process and in Ray's workers.
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
    """Import the packages beside this file. Later imports of their modules then use these packages too."""
    sys.path.insert(0, str(ROOT))
    for name in PACKAGES:
        importlib.import_module(name)


def worker_environment() -> dict[str, str] | None:
    """Return a Ray runtime environment that makes workers import these packages; None if workers find them anyway.

    A worker searches the working directory of the job first.
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
    if name == "Generator":  # imported on first use, because it imports torch
        from actors.generator import Generator

        return Generator
    if name == "EngineSettings":
        from actors.settings import EngineSettings

        return EngineSettings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    importlib.import_module("skipdecode").main()
