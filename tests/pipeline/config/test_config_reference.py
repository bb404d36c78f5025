"""configs/README.md lists every key as the models have it, and every file in configs/ is one of them."""

from __future__ import annotations

from pathlib import Path

import config_reference
import pytest
from pydantic import BaseModel

from pipeline.config.load import load_values, parse_yaml

CONFIGS = Path(__file__).parents[3] / "configs"


def test_the_readme_is_current() -> None:
    assert config_reference.README.read_text() == config_reference.current(), (
        "run .venv/bin/python tests/pipeline/config_reference.py"
    )


def leaves(model: type[BaseModel], path: str = "") -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for name, field in model.model_fields.items():
        section = config_reference.section_of(field.annotation)
        found += [(f"{path}{name}", field.description)] if section is None else leaves(section, f"{path}{name}.")
    return found


@pytest.mark.parametrize("model", config_reference.FILES.values(), ids=lambda model: model.__name__)
def test_every_key_has_a_meaning(model: type[BaseModel]) -> None:
    assert [path for path, description in leaves(model) if not description] == []


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_file_has_known_keys(path: Path) -> None:
    values = load_values(path)
    tops = [set(model.model_fields) for model in config_reference.FILES.values()]
    assert any(set(values) <= names for names in tops), set(values)


def test_the_readme_lists_every_recipe() -> None:
    text = config_reference.README.read_text()
    assert [path.name for path in CONFIGS.glob("*.yaml") if f"]({path.name})" not in text] == []


def test_the_example_of_a_budget_is_valid() -> None:
    from pipeline.config.job import JobConfig

    text = config_reference.README.read_text().partition("```yaml\n")[2].partition("```")[0]
    required = {"input": {"path": "in"}, "output": {"path": "out"}, "model": {"path": "m"}}
    config = JobConfig.model_validate({**required, **parse_yaml(text)})
    assert config.budget is not None and config.budget.tokens == 2_000_000_000
