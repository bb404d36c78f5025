"""configs/README.md lists every key as the models have it, and every file in configs/ is one of them."""

from __future__ import annotations

from pathlib import Path

import config_reference
import pytest
from pydantic import BaseModel

from actors.engine.errors import UserError
from pipeline.config.load import load_values
from pipeline.config.reference import FILES, described, leaves

CONFIGS = Path(__file__).parents[3] / "configs"


def test_the_readme_is_current() -> None:
    assert config_reference.README.read_text() == config_reference.current(), (
        "run .venv/bin/python tests/pipeline/config_reference.py"
    )


@pytest.mark.parametrize("model", FILES.values(), ids=lambda model: model.__name__)
def test_every_key_has_a_meaning(model: type[BaseModel]) -> None:
    assert [key for key, field in leaves(model) if not field.description] == []


def test_keys_shows_a_section_a_key_or_all_of_them() -> None:
    assert described("schedule.speedup").startswith("schedule.speedup  (number)\n    nominal")
    assert "input.examples[].user  (text)  required" in described("input")
    assert described("price_per_hour") in described()
    for name, said in (
        ("xyz", "sections: actors, .*, input, "),
        ("inputs", r"did you mean input\?"),
        ("input.choic", r"did you mean input\.choices\?"),
        ("choic", r"did you mean choices\?"),
    ):
        with pytest.raises(UserError, match=f"^{name}: no such section or key; {said}"):
            described(name)


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_file_has_known_keys(path: Path) -> None:
    values = load_values(path)
    tops = [set(model.model_fields) for model in FILES.values()]
    assert any(set(values) <= names for names in tops), set(values)


def test_the_readme_lists_every_recipe() -> None:
    text = config_reference.README.read_text()
    assert [path.name for path in CONFIGS.glob("*.yaml") if f"]({path.name})" not in text] == []
