"""The blocks of code in the wing's README."""

import re
from pathlib import Path

import replicator.launchpad_bridge as lp

README = Path(lp.__file__).with_name("README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def block_with(text):
    """Return the block that holds a text."""
    [block] = [block for block in BLOCKS if text in block]
    return block


def names_of(block):
    """Run a block; return what it defines."""
    names = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), names)
    return names
