"""transformers without torch, in a process that runs no model: a driver needs configs and tokenizers alone."""

from __future__ import annotations

import sys
from typing import Any


def without_models() -> None:
    """Have transformers find no torch in this process, which imports it in a quarter of the time; torch stays usable.

    For a process that never runs a model. Does nothing where transformers or torch has been imported.
    """
    if "transformers" in sys.modules or "torch" in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # to be found nowhere
    try:
        from transformers.utils.import_utils import is_torch_available

        assert not is_torch_available()  # it remembers
    finally:
        del modules["torch"]
