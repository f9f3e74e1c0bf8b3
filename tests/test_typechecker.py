"""The package's functions check their arguments and results in every test."""

from typing import Any

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor

from conftest import tiny_rnn
from typechecker import checked

ROWS = torch.zeros(2, 3)


@jaxtyped(typechecker=checked)
def repeated(x: Float[Tensor, "B D"], times: int, marks: Float[Tensor, " B"]) -> Any:
    return x.repeat(times, 1)


@jaxtyped(typechecker=checked)
def same_shape(x: Float[Tensor, "B D"], times: int) -> Float[Tensor, "B D"]:
    return x.repeat(times, 1)


@pytest.mark.parametrize(
    "arguments", [(ROWS[0], 1, ROWS[:, 0]), (ROWS, "1", ROWS[:, 0]), (ROWS, 1, ROWS[0])]
)
def test_wrong_arguments_are_found(arguments: tuple):
    repeated(ROWS, 2, ROWS[:, 0])
    with pytest.raises(TypeCheckError, match="checking the parameters"):
        repeated(*arguments)


def test_a_result_has_to_fit_the_shapes_of_the_arguments():
    assert same_shape(ROWS, 1).shape == (2, 3)
    with pytest.raises(TypeCheckError, match="checking the return value"):
        same_shape(ROWS, 2)


def test_the_package_is_checked():
    with pytest.raises(TypeCheckError, match="checking the parameters"):
        tiny_rnn().predict(torch.zeros(3))
