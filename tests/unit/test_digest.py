"""Several tensors are equal as one where all of them are."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from torchscout.c3.signature import digest as digest_of_signatures
from torchscout.c3.signature import signatures
from torchscout.replay.recipe import Observation, finish_signatures


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """As a replay signs several tensors."""
    seen = Observation()
    seen.sign_as_one("all", tensors)
    finish_signatures([seen])
    return seen.signatures["all"]


def test_a_digest_is_that_of_the_signatures():
    tensors = [torch.ones(3), torch.zeros(2)]
    assert digest(tensors) == digest_of_signatures(signatures(tensors))


def test_equal_tensors_have_equal_digests():
    assert digest([torch.ones(3), torch.zeros(2)]) == digest([torch.ones(3), torch.zeros(2)])


def test_a_digest_is_a_signed_64_bit_integer():
    values = [digest([torch.full((2,), value)]) for value in range(64)]
    assert all(-(1 << 63) <= value < 1 << 63 for value in values)
    assert len(set(values)) == 64
    assert min(values) < 0 < max(values)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_every_bit_of_every_tensor_changes_the_digest(changed):
    tensors = [torch.ones(3), torch.zeros((), dtype=torch.int64), torch.ones(5, dtype=torch.bfloat16)]
    before = digest(tensors)
    tensors[changed].view(-1).view(torch.uint8)[0] ^= 1
    assert digest(tensors) != before


def test_order_and_number_of_tensors_change_the_digest():
    one, two = torch.ones(3), torch.zeros(2)
    assert len({digest([one, two]), digest([two, one]), digest([one]), digest([one, two, two])}) == 4


def test_a_tensor_without_bytes_is_refused():
    with pytest.raises(ValueError, match="strided"):
        digest([torch.eye(3).to_sparse()])
