"""The notebooks of the documentation run, and show what they say."""

import json
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from myst_nb.core.read import read_myst_markdown_notebook

NOTEBOOKS = Path(__file__).parents[1] / "docs/notebooks"

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
"""Together they take two minutes; the warnings are the notebook client's."""
RESULTS = {
    "first-rnn": """dict(
        smt_drift=after_smt.drift.unexplained[-1],
        dmt_drift=after_dmt.drift.unexplained[-1],
        dmt_accuracy=after_dmt.rnn.accuracy,
        bptt_accuracy=after_bptt.rnn.accuracy,
    )""",
    "own-cell": "dict(accuracy=found.rnn.accuracy, long=float(right.float().mean()))",
    "memories": "dict(neighbours=float(agreement), memory=from_memory, pixels=from_pixels)",
}
"""What is read from the last state of each notebook."""


def results_of(name: str, folder: Path) -> dict[str, Any]:
    """Run a notebook in a folder, and return `RESULTS` of it."""
    text = (NOTEBOOKS / f"{name}.md").read_text()
    notebook = read_myst_markdown_notebook(text, add_source_map=False)
    code = f"import json; print(json.dumps({RESULTS[name]}))"
    notebook.cells.append(nbformat.v4.new_code_cell(code))
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return json.loads(notebook.cells[-1].outputs[0].text)


def test_each_notebook_is_tested():
    assert {path.stem for path in NOTEBOOKS.glob("*.md")} == set(RESULTS)


def test_the_first_rnn_drifts_and_dmt_repairs_it(tmp_path: Path):
    found = results_of("first-rnn", tmp_path)
    assert found["dmt_drift"] < found["smt_drift"] / 4
    assert found["dmt_accuracy"] > 0.98
    assert found["bptt_accuracy"] < 0.3


def test_the_own_cell_solves_its_task_at_four_times_the_length(tmp_path: Path):
    found = results_of("own-cell", tmp_path)
    assert found["accuracy"] > 0.98 and found["long"] > 0.9


def test_memories_hold_the_digit_while_it_is_drawn(tmp_path: Path):
    found = results_of("memories", tmp_path)
    memory, pixels = found["memory"], found["pixels"]
    assert found["neighbours"] > 0.6
    assert max(memory) > 0.7 and memory[-1] < max(memory) - 0.1
    assert memory[4] > pixels[4] and memory[-1] < pixels[-1]
