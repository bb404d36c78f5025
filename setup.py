"""Make links and pictures of the package's page absolute; everything else about the package is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
SOURCE = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["urls"]["Source"]
README = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{SOURCE}/raw/main/", (HERE / "README.md").read_text())
README = re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({SOURCE}/blob/main/\1)", README)

setup(long_description=README, long_description_content_type="text/markdown")
