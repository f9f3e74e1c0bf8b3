"""Training computes what it did when goldens/cpu.json was written (scripts/goldens.py).

To the bit on the same CPU with the same torch. Elsewhere sums are added up in another order: there
the first steps are compared, to 1e-4, before the differences have grown.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from conftest import load_script

goldens = load_script("goldens")
GOLDEN = json.loads((Path(__file__).parent / "goldens" / "cpu.json").read_text())
SAME_MACHINE = goldens.machine() == GOLDEN["machine"]
FIRST = 5
"""Steps that are compared on other machines."""
QUICK = {
    "task/causal/transformer",
    "task/bidirectional/mlp",
    "stream/bidirectional/transformer",
    "stream/causal/gru",
    "task/causal/lstm",
    "data/retrieval",
    "data/words",
    "own/accumulate",
    "resumed/stream",
    "task/separate",
    "task/noise",
    "task/dynamics-steps",
    "task/normalized",
    "task/next",
    "task/accumulate",
    "task/through-time",
    "task/decode",
    "task/two-stages",
    "task/training-teacher",
    "task/authors",
    "task/token",
    "task/void",
    "task/projected",
    "stream/few-rows",
    "stream/bptt-alone",
    "plain/task",
    "plain/stream",
}
"""Cases that together pass through almost all of the code; the others take a minute more."""
CASES = goldens.cases()


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    goldens.make_streams(folder)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in GOLDEN["cases"]
    ],
)
def test_training_gives_the_recorded_losses_weights_and_tokens(
    name: str, streams: Path, tmp_path: Path
):
    found = goldens.train(CASES[name], streams, tmp_path / "run")
    tolerance = {} if SAME_MACHINE else {"close": 1e-4, "steps": FIRST}
    difference = goldens.compare(GOLDEN["cases"][name], found, **tolerance)
    assert difference is None, str(difference)


def test_every_case_is_recorded():
    assert CASES.keys() == GOLDEN["cases"].keys()
    assert CASES.keys() >= QUICK


# --------------------------------------------------------------------------------------- compare


RECORDED = {
    "stages": {"smt": {"loss": "0x1.8p+0 0x1.4p+0", "total_tokens": "0x1p+4"}},
    "weights": {"rnn": "ab"},
    "written": "1 2",
}


def altered(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(RECORDED), **changes}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (altered(stages={}), "stages"),
        (
            altered(stages={"smt": {"loss": "0x1.8p+0 0x1.4p+0"}}),
            "total_tokens is in only one of them",
        ),
        (altered(weights={"rnn": "ac"}), "weights of rnn"),
        (altered(written="1 3"), "written tokens"),
        (
            altered(stages={"smt": {"loss": "0x1.8p+0 0x1.40001p+0", "total_tokens": "0x1p+4"}}),
            "smt step 2 loss, relative difference 7.6e-07",
        ),
    ],
)
def test_a_difference_is_reported_with_its_location(found: dict[str, Any], message: str):
    assert goldens.compare(RECORDED, copy.deepcopy(RECORDED)) is None
    assert message in str(goldens.compare(RECORDED, found))


def test_close_numbers_are_equal_only_within_the_tolerance():
    stages = {"smt": {"loss": "0x1.8p+0 0x1.40001p+0", "total_tokens": "0x1p+4"}}
    assert goldens.compare(RECORDED, altered(stages=stages), close=1e-5) is None
    assert goldens.compare(RECORDED, altered(stages=stages), close=1e-7) is not None
    assert goldens.compare(RECORDED, altered(stages=stages), close=1e-7, steps=1) is None
