"""The pictures of the concepts are what the script draws."""

import re
from pathlib import Path

from conftest import load_script

IMAGES = Path(__file__).parents[2] / "docs/images"


def shapes(path: Path) -> int:
    return path.read_text().count("<path")


def test_the_committed_pictures_are_those_of_the_script(tmp_path: Path):
    drawn = load_script("draw_concepts").main(tmp_path)
    assert {path.name for path in drawn} == {path.name for path in IMAGES.glob("concept-*.svg")}
    for path in drawn:  # other versions of matplotlib write other digits
        assert shapes(path) == shapes(IMAGES / path.name)
        text = re.findall(r"<!-- (.*?) -->", path.read_text())
        assert text and text == re.findall(r"<!-- (.*?) -->", (IMAGES / path.name).read_text())
