"""The verdicts that docs/ states follow from the raw results in docs/results."""

import gzip
import re
from pathlib import Path

import pytest

from memtrain.paper import FIGURES, MORE, load
from memtrain.paper.base import Result, Setup
from memtrain.paper.results import ResultsFile

DOCS = Path(__file__).parents[2] / "docs"
RAW = ("figures-gpu", "gradients-gpu-scale", "resources-gpu-scale")
TABLE = (DOCS / "REPRODUCTION.md").read_text()
WORDS = {"**holds**": True, "**does not hold**": False}
STATED = dict(re.findall(r"^\| \[([\w-]+)\]\(figures/[\w-]+\.md\) \| .*? \| (.*?) \|", TABLE, re.M))
JUDGED = [name for name, words in STATED.items() if words in WORDS]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[Result]:
    folder = tmp_path_factory.mktemp("raw")
    packed = [(DOCS / "results" / f"2026-11-18-{name}.jsonl.gz").read_bytes() for name in RAW]
    (folder / "results.jsonl").write_bytes(b"".join(map(gzip.decompress, packed)))
    return ResultsFile(folder).read()


def test_every_figure_has_a_row_and_a_page():
    assert list(STATED) == list(FIGURES)
    assert {page.stem for page in (DOCS / "figures").glob("*.md")} == {*FIGURES, *MORE}
    assert len(JUDGED) == 13


@pytest.mark.parametrize("name", JUDGED)
def test_a_stated_verdict_follows_from_the_raw_results(name: str, results: list[Result]):
    figure = load(name)
    ours = [one for one in results if one.figure == name and one.version == figure.version]
    measured = list({one.job: one for one in ours}.values())  # the newest form of each run
    found = figure.judge(Setup(scale="gpu", folder=Path("none"), prepares=False), measured)
    assert found.holds is WORDS[STATED[name]]
    page = (DOCS / "figures" / f"{name}.md").read_text()
    assert f"**At the scale `gpu`: {STATED[name].strip('*')}.**" in page
