"""Make the links of the package's page absolute; everything else about the package is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
SOURCE = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["urls"]["Source"]
README = re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({SOURCE}/blob/main/\1)", (HERE / "README.md").read_text())

setup(long_description=README, long_description_content_type="text/markdown")
