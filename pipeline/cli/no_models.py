"""transformers without torch, in a process that runs no model: a driver needs configs and tokenizers alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.config.job import ModelConfig


def without_models(model: ModelConfig) -> None:
    """Have transformers find no torch in this process, which imports it in a quarter of the time; torch stays usable.

    For a process that never runs the model. Does nothing where transformers or torch has been imported, nor where the
    model's layers must be known: a speed adapter is checked against them, and weights of 8 bits are counted by them.
    """
    if model.speed_adapter is not None or model.weights is not None:
        return
    if "transformers" in sys.modules or "torch" in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # to be found nowhere
    try:
        from transformers.utils.import_utils import is_torch_available

        assert not is_torch_available()  # it remembers
    finally:
        del modules["torch"]
