"""The reading of pages: blocks, marks, links; and kept outputs of notebooks."""

import pytest

from benchmarks.docs import pages

PAGE = """\
# A page

<!-- setup
x = 1
-->
```python
print(x)
```

<!-- fragment: not whole -->
```python
print(y)
```

- in a list

  <!-- run by tests/test_x.py -->
  ```python
  print(z)
  ```

```text
## no heading
```

## What `it` does, twice
## What `it` does, twice

[a](page.md#a-page) [b](#what-it-does-twice-1) [c](gone.md) [d](page.md#gone) ![e](https://x.org/y.png)
"""


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_blocks_have_their_marks_and_lose_their_indentation(page):
    found = [(b.language, b.code.strip(), b.mark) for b in pages.blocks_of(page)]
    assert found == [
        ("setup", "x = 1", ""),
        ("python", "print(x)", ""),
        ("python", "print(y)", "fragment: not whole"),
        ("python", "print(z)", "run by tests/test_x.py"),
        ("text", "## no heading", ""),
    ]


def test_a_block_has_the_line_of_its_code(page):
    lines = page.read_text().splitlines()
    for block in pages.blocks_of(page)[1:]:
        assert lines[block.line - 1].strip() == block.code.splitlines()[0]


def test_links_to_nothing_are_found(page):
    assert pages.broken_links(page) == ["gone.md", "page.md#gone"]


def test_outputs_of_other_cells_are_refused(tmp_path, monkeypatch):
    pytest.importorskip("myst_nb")
    pytest.importorskip("jupyter_cache")
    from benchmarks.docs import notebooks

    [page] = [each for each in notebooks.notebooks() if each.stem == "ten_lines"]
    changed = tmp_path / page.name
    changed.write_text(page.read_text().replace("steps=600", "steps=601"))
    with pytest.raises(ValueError, match="Run `make notebooks`"):
        notebooks.with_outputs(changed)
