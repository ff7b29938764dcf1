"""README.md and the other pages say what is so: their Python blocks are run as doctests."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [page for folder in ("", "docs", "benchmarks") for page in sorted((ROOT / folder).glob("*.md"))]
FENCED = re.compile(r"^```(?:python|pycon)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples(page):
    """Return the Python blocks of a page as one text in which every line keeps its number."""
    text = page.read_text(encoding="utf-8")
    kept = [""] * text.count("\n")
    for block in FENCED.finditer(text):
        first = text.count("\n", 0, block.start(1))
        for offset, line in enumerate(block[1].splitlines()):
            kept[first + offset] = line
    return "\n".join(kept) + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of(page):
    test = doctest.DocTestParser().get_doctest(examples(page), {}, page.name, str(page), 0)
    report = []
    results = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST).run(test, out=report.append)
    assert results.failed == 0, "".join(report)
    assert all(">>>" in block[1] for block in FENCED.finditer(page.read_text(encoding="utf-8")))


def test_a_wrong_example_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```python\n>>> 1 + 1\n3\n```\n\n```text\n>>> 1 + 1\n4\n```\n")
    assert examples(page).splitlines() == ["", "", "", ">>> 1 + 1", "3", *[""] * 6]
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        test_examples_of(page)
