"""The documentation builds into a site without warnings, which needs nothing from elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, with notebooks that are not run: tests/test_notebooks.py runs them."""
    pytest.importorskip("furo", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    options = ["nb_execution_mode=off", "suppress_warnings=myst-nb.lexer"]
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q"]
    command += [part for option in options for part in ("-D", option)]
    done = subprocess.run([*command, DOCS, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built_and_links_to_files_that_are_there(site: Path):
    for page in DOCS.rglob("*.md"):
        built = site / page.relative_to(DOCS).with_suffix(".html")
        for link in re.findall(r'(?:href|src)="([^"#:?]+)[?#"]', built.read_text()):
            assert (built.parent / link).exists(), f"{built.name}: {link}"


def test_links_that_leave_docs_lead_to_pages_or_downloads(site: Path):
    library = (site / "LIBRARY.html").read_text()
    assert 'href="examples.html"' in library
    assert re.search(r'href="_downloads/\w+/plain_loop.py"', library)


def test_pages_load_nothing_from_the_network(site: Path):
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)', page.read_text()
        )
        assert not loaded, f"{page.name}: {loaded}"


def test_the_api_shows_docstrings_and_examples(site: Path):
    runs = (site / "api/runs.html").read_text()
    assert "Create a run in an empty folder." in runs
    assert "system-message" not in runs
    configs = (site / "api/config.html").read_text()
    assert "Where the weights start from: a run" in configs
    assert "empty_memory" in (site / "api/models.html").read_text()
