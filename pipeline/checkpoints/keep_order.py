"""`keep_order: measured`: the order in which a checkpoint needs its layers, measured once and kept in the cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.engine.checkpoint.file_digests import cache_record, write_record
from actors.engine.decoder import Decoder
from actors.engine.errors import UserError
from actors.engine.forcing.layer_ranking import Row, rank_layers
from actors.engine.schedules.schedule import Schedule

log = logging.getLogger(__name__)
ROWS = 32  # prompts and responses that an order is measured on, at most
VERSION = 1  # of the algorithm; another one measures again


def measured_order(
    identity: Mapping[str, Any],
    load: Callable[[], Decoder],
    rows: Sequence[Row],
    warmup: int | None,
    cache: str | None,
    report: Callable[[str], None],
) -> tuple[tuple[int, ...], int]:
    """Keep order and warm-up of a checkpoint, measured on prompts and full-depth responses; see `rank_layers`.

    Args:
        identity: Digests or versions of the checkpoint's files.
        load: The checkpoint's model; not called if the order is in the cache.
        rows: Prompts and responses; `ROWS` of them, evenly spaced, are used.
        warmup: Lowest layers that must always run; None: as many as begin the order, at most an eighth of all.
        cache: Folder of `model.cache`; None is the default one.
        report: Receives the stages of the work.

    Raises:
        UserError: No row has a prompt and a response.
    """
    kept = min(ROWS, len(rows))
    chosen = [(list(prompt), list(response)) for prompt, response in (rows[n * len(rows) // kept] for n in range(kept))]
    record = cache_record(cache, "keep-orders", [VERSION, identity, chosen, warmup])
    found = _read(record)
    if found is not None:
        report(f"keep order: {list(found[0])}, warmup {found[1]}, measured before ({record})")
        return found
    report(f"measuring the keep order on {kept} answers")
    ranking = rank_layers(load(), chosen, warmup=warmup or 0, report=report)
    layers = len(ranking.keep_order)
    found = ranking.keep_order, ranking.warmup(max(1, layers // 8)) if warmup is None else warmup
    write_record(record, {"keep_order": found[0], "warmup": found[1], "divergence": ranking.divergence})
    report(f"keep order: {list(found[0])}, warmup {found[1]}")
    return found


def _read(record: Path) -> tuple[tuple[int, ...], int] | None:
    """Order and warm-up of a record; None without one, or if it is damaged."""
    try:
        values = json.loads(record.read_text())
        order, warmup = tuple(values["keep_order"]), values["warmup"]
        Schedule(len(order), (len(order),), order, warmup)  # raises if the list is no permutation
        return order, warmup
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, UserError) as error:
        log.warning("%s: not a keep order (%s); measuring it again", record, error)
        return None
