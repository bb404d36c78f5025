"""Makes the demo's prompts: restaurants in the style of the E2E data set, drawn at random from slots and values.

    python -m pipeline.advise.demo_data FOLDER [--rows 2000] [--files 8] [--seed 0]

The slot values are from the E2E data set (CC BY-SA 4.0); no sentence of the data set is used.
"""

from __future__ import annotations

import random
from importlib.metadata import files
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from actors.engine.errors import UserError
from pipeline.config.load import dump_yaml, parse_yaml
from pipeline.messages import counted
from pipeline.runtime.announce import announce
from pipeline.storage.working_dir import check_outlives_job

# fmt: off
NAMES = [
    "Alimentum", "Aromi", "Bibimbap House", "Blue Spice", "Browns Cambridge", "Clowns", "Cocum", "Cotto",
    "Fitzbillies", "Giraffe", "Green Man", "Loch Fyne", "Midsummer House", "Strada", "Taste of Cambridge",
    "The Cambridge Blue", "The Cricketers", "The Dumpling Tree", "The Eagle", "The Golden Curry",
    "The Golden Palace", "The Mill", "The Olive Grove", "The Phoenix", "The Plough", "The Punter", "The Rice Boat",
    "The Twenty Two", "The Vaults", "The Waterman", "The Wrestlers", "Travellers Rest Beefeater", "Wildwood", "Zizzi",
]
FILES = 8  # number of files with the demo's prompts
OPTIONAL_SLOTS = {  # slot -> values, in the data set's order
    "eatType": ["coffee shop", "pub", "restaurant"],
    "food": ["Chinese", "English", "Fast food", "French", "Indian", "Italian", "Japanese"],
    "priceRange": ["cheap", "high", "less than £20", "moderate", "more than £30", "£20-25"],
    "customer rating": ["1 out of 5", "3 out of 5", "5 out of 5", "average", "high", "low"],
    "area": ["city centre", "riverside"],
    "familyFriendly": ["no", "yes"],
    "near": [
        "All Bar One", "Avalon", "Burger King", "Café Adriatic", "Café Brazil", "Café Rouge", "Café Sicilia",
        "Clare Hall", "Crowne Plaza Hotel", "Express by Holiday Inn", "Rainbow Vegetarian Café",
        "Raja Indian Cuisine", "Ranch", "The Bakers", "The Portland Arms", "The Six Bells", "The Sorrento",
        "Yippee Noodle Bar",
    ],
}
SLOT_COUNTS, SLOT_WEIGHTS = [2, 3, 4, 5, 6, 7], [4, 15, 30, 30, 16, 5]
# fmt: on


def make_prompt(rng: random.Random) -> str:
    """Draw a restaurant's name and two to seven other attributes at random. Return them as text."""
    slots = {"name": rng.choice(NAMES)}
    chosen = set(rng.sample(list(OPTIONAL_SLOTS), rng.choices(SLOT_COUNTS, SLOT_WEIGHTS)[0]))
    slots |= {slot: rng.choice(values) for slot, values in OPTIONAL_SLOTS.items() if slot in chosen}
    return ", ".join(f"{slot}[{value}]" for slot, value in slots.items())


def write_prompts(folder: Path, rows: int, files: int, seed: int) -> None:
    """Write `rows` rows with the columns id and prompt to `files` Parquet files. Keep files that hold these rows.

    Raises UserError if a file with the name of one of ours holds other rows.
    """
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    prompts = [make_prompt(rng) for _ in range(rows)]
    tables = {}
    for number in range(files):
        first, end = rows * number // files, rows * (number + 1) // files
        ids = [f"demo-{row:05d}" for row in range(first, end)]
        tables[folder / f"restaurants-{number:02d}.parquet"] = pa.table({"id": ids, "prompt": prompts[first:end]})
    held = set(folder.glob("restaurants-*.parquet"))
    for path in sorted(held):
        if path not in tables or not _holds(path, tables[path]):
            raise UserError(f"{path}: exists with other prompts; repeat the earlier command, or name another folder")
    for path, table in tables.items():
        if path not in held:
            temporary = path.with_suffix(".tmp")
            pq.write_table(table, temporary)
            temporary.replace(path)


def _holds(path: Path, table: pa.Table) -> bool:
    """Return whether a Parquet file holds this table."""
    try:
        return bool(pq.ParquetFile(path).read().equals(table))
    except (pa.ArrowException, OSError):  # damaged, or not a Parquet file
        return False


def write_demo(folder: Path, rows: int = 2000) -> Path:
    """Write the demo's prompts, and a job file for the included checkpoint. Return the job file's path."""
    jobs = Path(__file__).parents[2] / "configs" / "demo.yaml"
    checkpoint = jobs.parent / "demo" / "checkpoint"
    if not jobs.is_file():  # the program is installed from a wheel
        jobs = next(Path(str(file.locate())) for file in files("skipdecode") or () if file.name == jobs.name).resolve()
        checkpoint = jobs.parent / "checkpoint"
    check_outlives_job("FOLDER", folder)
    job = folder / jobs.name
    values = parse_yaml(jobs.read_text())
    for section, path in ("input", folder / "prompts"), ("output", folder / "answers"), ("model", checkpoint):
        values[section]["path"] = str(path)
    text = dump_yaml(values)
    try:
        write_prompts(folder / "prompts", rows, FILES, 0)
        if job.exists() and job.read_text() != text:
            announce(f"{job}: kept, although it differs from the demo's job file; remove it to get that")
        else:
            job.write_text(text)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}; name another folder") from None
    return job


def main(folder: Path, rows: int = 2000, files: int = FILES, seed: int = 0) -> None:
    """Write the demo's prompts to Parquet files in a folder."""
    try:
        write_prompts(folder, rows, files, seed)
    except UserError as error:
        raise SystemExit(str(error)) from None
    print(f"{counted(rows, 'prompt')} in {counted(files, 'file')}: {folder}")


if __name__ == "__main__":
    typer.run(main)
