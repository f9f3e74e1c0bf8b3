"""Every name that `import memtrain` has offered can still be had from it."""

import subprocess
import sys
import warnings

import pytest

import memtrain
from conftest import random_tokens, seeded, tiny_rnn

NAMES = """
BPTT BPTTConfig Batch Cell CellConfig CellContractError DMT DMTConfig Decoder EngineConfig
Evaluation IGNORE_INDEX LogConfig Losses MemtrainError PretrainConfig Pretrained RECIPES RNN
Reporter Run RunConfig SMT SMTConfig Samples Stream Task Teacher TeacherConfig Written __version__
check_cell check_task evaluate export from_json generate load_pretrained load_rnn losses make_cell
make_reporter pretrained_names read recipe sample to_json wrap write Labels Values
Series SeriesFormat Forecast forecast Comparison compare runs
Callback EndStage Metrics TensorBoard Trackio WandB
Memory remember
"""
"""Names are added here, and never taken away."""

CONFIG_NAMES = """
Arithmetic BPTTConfig CELLS CUSTOM_PATH CellConfig Copy Custom DMTConfig DataConfig Digits
EngineConfig LogConfig MOST Parity PretrainConfig Recall Retrieval RunConfig S5 SMTConfig Stack
StageConfig Stream TeacherConfig check_used LabelFile Series ModularArithmetic
"""
"""Those of memtrain.config."""


@pytest.mark.parametrize("name", NAMES.split())
def test_public_names_can_be_imported(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert getattr(memtrain, name) is not None


@pytest.mark.parametrize("name", CONFIG_NAMES.split())
def test_config_names_can_be_imported(name: str):
    import memtrain.config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert getattr(memtrain.config, name) is not None


def test_every_exported_name_is_listed():
    assert set(memtrain.__all__) <= set(NAMES.split())


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        memtrain.nothing  # noqa: B018


def test_names_are_imported_from_memtrain_in_a_fresh_process():
    code = f"from memtrain import {', '.join(NAMES.split())}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_old_names_of_reading_and_sampling_warn_and_work():
    rnn, tokens = tiny_rnn(), random_tokens(2, 3)
    with pytest.warns(DeprecationWarning, match="memtrain.read is now memtrain.RNN.read"):
        logits, memories = memtrain.read(rnn, tokens)  # type: ignore
    assert logits.shape[:2] == memories.shape[:2] == (2, 3)
    with pytest.warns(DeprecationWarning, match="memtrain.write is now memtrain.sample"):
        written = memtrain.write(rnn, tokens, 4, seeded(), temperature=0.0)  # type: ignore
    assert written.shape == (2, 4)
