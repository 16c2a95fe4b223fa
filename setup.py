"""Write the long description of a build; all else is in `pyproject.toml`.

An index shows it away from the repository: README's pictures would be missing there and
its links into the repository broken, so the former go and the latter become text.
"""

import re
from pathlib import Path

import setuptools

readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
without_pictures = re.sub(r"(?m)^!\[[^\]]*\]\([^)]*\)\n+", "", readme)
description = re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", without_pictures)

setuptools.setup(
    long_description=description, long_description_content_type="text/markdown"
)
