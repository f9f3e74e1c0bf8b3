"""Looking rows up, with a product for the gradient."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from memtrain.models.embedding import Lookup, _Lookup, table_gradient


def test_the_product_is_the_gradient_of_the_lookup():
    """It runs on GPUs alone, but is the same anywhere."""
    tokens = torch.randint(9, (5, 7))
    table = torch.randn(9, 4, dtype=torch.double, requires_grad=True)
    weight = torch.randn(5, 7, 4, dtype=torch.double)
    rows, expected = _Lookup.apply(table, tokens, table_gradient), F.embedding(tokens, table)
    assert_close(rows, expected)
    (got,) = torch.autograd.grad((rows * weight).sum(), table)
    (wanted,) = torch.autograd.grad((expected * weight).sum(), table)
    assert_close(got, wanted)


def test_rows_come_in_the_precision_of_the_stream():
    table, tokens = nn.Embedding(9, 4), torch.randint(9, (3,))
    assert_close(Lookup()(table.weight, tokens), table(tokens))
    with torch.autocast("cpu", torch.bfloat16):
        assert Lookup()(table.weight, tokens).dtype == torch.bfloat16
