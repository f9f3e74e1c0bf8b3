"""The documentation is true: its code runs, its commands and links exist, names are documented."""

import re
from pathlib import Path

import pytest

import memtrain
from doc_blocks import (
    LANGUAGES,
    ROOT,
    RUN,
    Block,
    blocks_of,
    check_command,
    check_form,
    run_blocks,
    sample_files,
    short_stages,
)

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
EXEMPT = {"LOG.md"}
"""History: its commands are those of their time."""
BLOCKS = {page: blocks_of(page) for page in PAGES if page.name not in EXEMPT}
LONG = {"DATA.md", "LIBRARY.md", "TRAINING.md", "guides/memory-files.md", "guides/onnx.md"}
"""Pages of many commands. Together they take more than a minute."""
RUNNABLE = [
    pytest.param(page, marks=[pytest.mark.slow] if str(page.relative_to(DOCS)) in LONG else [])
    for page, blocks in BLOCKS.items()
    if any(b.language in RUN and not b.reason for b in blocks)
]


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch):
    sample_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    with short_stages():
        run_blocks(BLOCKS[page], tmp_path)


@pytest.mark.parametrize("page", BLOCKS, ids=name_of)
def test_blocks_that_are_not_run_are_well_formed(page: Path):
    for block in BLOCKS[page]:
        assert block.language in LANGUAGES, f"{block}: {block.language!r}"
        if block.reason:
            check_form(block)


def test_a_wrong_block_is_noticed(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def block(language: str, code: str, reason: str = "") -> Block:
        return Block(DOCS / "index.md", 1, language, code, reason)

    for wrong in (
        block("python", "1 / 0"),
        block("bash", "memtrain runs --sorted loss"),
        block("bash", "false | cat"),
        block("console", "$ memtrain runz\nno output\n"),
    ):
        with pytest.raises(AssertionError, match="index.md:1"):
            run_blocks([wrong], tmp_path)
    check_form(block("bash", "memtrain train text --data x --smt.steps 5  # quick", "needs a GPU"))
    for wrong in ("memtrain train text --smt.step 5 --smt.lr 1", "memtrain eval runs/x --lenth 3"):
        with pytest.raises(memtrain.MemtrainError, match="no such option"):
            check_command(wrong)
    for wrong in ("memtrain resume runs/x --dmt.step 3", "memtrain torchrun train mnist --size 3"):
        with pytest.raises(memtrain.MemtrainError):
            check_command(wrong)


def test_indented_blocks_are_fenced():
    for page in BLOCKS:
        text = re.sub(r"```.*?\n```", "", page.read_text(), flags=re.DOTALL)
        indented = re.findall(r"\n\n(    \S.*)", text)
        assert not indented, f"{name_of(page)}: {indented[0]}"


def test_commands_of_the_readme_are_known():
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"):
        for line in re.findall(r"^    (memtrain .*)", path.read_text(), flags=re.MULTILINE):
            for part in line.split("; "):
                check_command(part)


def test_every_public_name_is_documented():
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    named = set(
        re.findall(r"^\.\. (?:auto\w+|py:data):: memtrain\.([\w.]+)", text, flags=re.MULTILINE)
    )
    public = {name for name in dir(memtrain) if not name.startswith("__")}
    assert named >= public, f"missing in docs/api: {sorted(public - named)}"


def test_links_to_headings_exist():
    for page in PAGES:
        for path, heading in re.findall(r"\]\(([^():\s]*)#([\w-]+)\)", page.read_text()):
            target = page.parent / path if path else page
            headings = re.findall(r"^#+ (.*)", target.read_text(), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}
            assert heading in slugs, f"{name_of(page)}: {path}#{heading}"
