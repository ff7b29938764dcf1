"""The documentation site is built without a warning and has every public name. Needs the `docs` extra."""

import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import fastattn
from fastattn import reference

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name, reason="the site needs the docs extra", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(ROOT / "docs"), str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    return folder


def inventory(site):
    """The names that the site documents: four lines of heading, then compressed lines that begin with a name."""
    compressed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split()[0] for line in zlib.decompress(compressed).decode().splitlines()}


@pytest.mark.parametrize("package", [fastattn, reference], ids=lambda package: package.__name__)
def test_the_reference_page_has_every_public_name(site, package):
    missing = {f"{package.__name__}.{name}" for name in package.__all__} - inventory(site)
    assert not missing


def test_the_pages_are_there(site):
    pages = {page.stem for page in site.glob("*.html")}
    assert pages >= {"index", "api", "semantics", "design", "benchmarks", "benchmarking", "contributing", "changelog"}
    assert "Build switches" in (site / "index.html").read_text(encoding="utf-8"), "README.md is not in it"
