"""What Lightning Fabric wraps is opened, and nothing else is taken for its own."""

from __future__ import annotations

import pytest
import torch

from torchscout.adapters.registry import adapter_for

fabric = pytest.importorskip("lightning.fabric", reason="needs lightning")


def wrapped() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, and both as Fabric returns them."""
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, optimizer, *fabric.Fabric(accelerator="cpu", devices=1).setup(net, optimizer)


def test_the_model_and_the_optimizer_inside_are_used():
    net, optimizer, outer, stepped = wrapped()
    assert outer is not net
    assert stepped is not optimizer
    adapter = adapter_for(outer, [stepped], None)
    assert adapter.model is net
    assert [*adapter.optimizers()] == [optimizer]
    assert adapter_for(outer, None, None).optimizers() == ()


def test_hooks_see_the_steps_of_the_optimizer_outside():
    _, _, outer, stepped = wrapped()
    seen: list[str] = []
    undo = adapter_for(outer, stepped, None).hook_updates(
        lambda: seen.append("before"), lambda: seen.append("after")
    )
    outer(torch.ones(1, 2)).sum().backward()
    stepped.step()
    undo()
    stepped.step()
    assert seen == ["before", "after"]


def test_an_optimizer_that_fabric_did_not_wrap_may_stand_beside_one_that_it_did():
    net, _, outer, stepped = wrapped()
    plain = torch.optim.Adam(net.parameters())
    assert adapter_for(outer, [stepped, plain], None).optimizers()[1] is plain


def test_an_object_that_is_not_an_optimizer_is_refused():
    *_, outer, _ = wrapped()
    with pytest.raises(ValueError, match="got dict"):
        adapter_for(outer, {}, None)
