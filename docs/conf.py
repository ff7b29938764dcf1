"""The documentation site: `sphinx-build -W docs site`, with the package built and the `docs` extra installed."""

import re

import fastattn

project = "fastattn"
author = "the fastattn developers"
version = release = fastattn.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
html_theme = "furo"
html_title = f"fastattn {version}"

default_role = "py:obj"  # `name` in a docstring is a link where the name is a documented one
autodoc_typehints = "none"  # docstrings say the types, with shapes; the overloads would fill pages
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_param = napoleon_use_rtype = False  # types are words, not names to be linked
myst_heading_anchors = 3

# Files outside docs/, and the pages that include them.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarking.md",
}


def as_seen_from_docs(app, path, page, content):
    """Turn the links of an included file, which are relative to the project's root, into links of the site."""

    def target(match):
        linked = match[1]
        return "](" + PAGES.get(linked, linked.removeprefix("docs/") if linked.startswith("docs/") else f"../{linked}")

    content[0] = re.sub(r"\]\((?!https?:|#)([^)#]+)", target, content[0])


def setup(app):
    app.connect("include-read", as_seen_from_docs)
