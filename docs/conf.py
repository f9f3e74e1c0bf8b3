"""Sphinx's configuration: `make docs` builds the site into build/docs, offline."""

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the notebooks; the same speed on a busy machine

project = "memtrain"
copyright = "the memtrain authors, Apache-2.0"
html_title = "memtrain"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["images", "results"]
html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
templates_path = []

myst_enable_extensions = ["colon_fence", "fieldlist"]
myst_heading_anchors = 4
source_suffix = {".md": "myst-nb"}

# A page shows what its notebook gave; unchanged notebooks are not run again.
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parents[1] / "build/notebooks")
nb_execution_in_temp = True
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True

# Docstrings say `name` for code and name types in their signatures.
default_role = "code"
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Example", "example")]

PAGES_OF = {
    "README.md": "index.md",
    "examples": "examples.md",
    "benchmarks/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files beside docs/ that are pages of the site. Links to other files become downloads."""


def link_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Turn links that leave docs/, as GitHub needs them, into links to pages of the site."""
    up = "../" * page.count("/")

    def linked(match: re.Match[str]) -> str:
        return f"]({up}{PAGES_OF[match[1]]}" if match[1] in PAGES_OF else match[0]

    source[0] = re.sub(rf"\]\({re.escape(up)}\.\./([^)#]+?)/?(?=[)#])", linked, source[0])


def format_docstring(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Turn indented code after a colon, and the names of shapes, into reStructuredText."""
    whole = [*lines, "", ""]
    found = []
    for line, following, second in zip(lines, whole[1:], whole[2:], strict=False):
        example = line.strip() == "Example:"
        code = following if example else second if not following.strip() else ""
        depth = len(line) - len(line.lstrip())
        if line.endswith(":") and not line.endswith("::") and code.startswith(" " * (depth + 4)):
            found += [f"{line}:", ""]
        else:
            found.append(re.sub(r"(`[\w.]+`)s\b", r"\1\\ s", line.replace("(*", r"(\*")))
    # Of attributes napoleon takes what stands before a colon in the first line for the type: a
    # comment is the first line.
    lines[:] = ["..", "", *found] if what in ("attribute", "property", "data") else found


def setup(app: Sphinx) -> None:
    app.connect("source-read", link_pages)
    app.connect("autodoc-process-docstring", format_docstring, priority=1)  # before napoleon
