"""All fifteen at the smallest scale, from the command line to the page in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from memtrain.cli import main
from memtrain.paper import FIGURES, MORE
from memtrain.paper.results import ResultsFile

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


def reproduce(capsys, *arguments: str) -> dict:
    assert main(["reproduce", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_all_fifteen_are_run_drawn_and_judged(tmp_path: Path, capsys):
    found = reproduce(capsys, "all", "--folder", str(tmp_path))
    assert found["failed"] == {}
    assert list(found["figures"]) == list(FIGURES)
    for name, figure in found["figures"].items():
        picture = Path(figure["picture"]).read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 8000, name
        assert figure["runs"] > 0 and figure["numbers"], name
        assert re.search(r"\d", figure["sentence"]), name
    assert {figure["holds"] for figure in found["figures"].values()} == {None}  # a dozen steps

    results = ResultsFile(tmp_path).read()
    places = [(result.figure, result.job, result.key) for result in results]
    assert len(set(places)) == len(places) == sum(f["runs"] for f in found["figures"].values())
    before = (tmp_path / "results.jsonl").read_bytes()
    again = reproduce(capsys, "joint", "--folder", str(tmp_path))
    assert again["figures"]["joint"] == found["figures"]["joint"]
    assert (tmp_path / "results.jsonl").read_bytes() == before

    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') >= len(FIGURES)
    for title in FIGURES.values():
        assert title in page
    assert "<h1>A smoke test of the paper&#x27;s figures: too small to judge any claim</h1>" in page
    assert page.count("too small to judge") >= 2 * len(FIGURES)
    assert "does not hold" not in page and "Here: holds" not in page and "not claimed" not in page
    sources = re.findall(r'(?:src|href)="([^"]{0,40})', page)
    assert all(source.startswith(("data:", "#")) for source in sources)  # or inside the page


@pytest.mark.parametrize("name", MORE)
def test_tables_beside_the_fifteen_are_run_drawn_and_reported(name: str, tmp_path: Path, capsys):
    figure = reproduce(capsys, name, "--folder", str(tmp_path))["figures"][name]
    assert Path(figure["picture"]).read_bytes().startswith(b"\x89PNG") and figure["numbers"]
    assert main(["report", str(tmp_path)]) == 0
    assert MORE[name] in (tmp_path / "report.html").read_text()


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_the_page_opens_in_a_browser_without_errors_or_requests(tmp_path: Path, capsys):
    assert BROWSER is not None
    reproduce(capsys, "mnist-samples", "--folder", str(tmp_path / "runs"))
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "page.html")]) == 0
    network = tmp_path / "network.json"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-sync"]
    command += ["--disable-background-networking", "--disable-component-update"]
    command += ["--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--log-net-log={network}", "--virtual-time-budget=2000", "--dump-dom"]
    seen = subprocess.run(
        [*command, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=60
    )
    assert "Digits generated pixel by pixel" in seen.stdout
    assert seen.stdout.count("<details") > 5
    assert "CONSOLE" not in seen.stderr  # the page's errors and blocked requests
    requested = re.findall(r'"url":"(https?:[^"]+)"', network.read_text())
    assert [url for url in requested if "google" not in url] == []  # the browser's own calls home
