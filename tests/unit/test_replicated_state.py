"""All state that peers hold copies of, compared by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.replay_by_hand import align, differing, observations, prepare
from tests.support.update_job import flip_lowest_bit, outliers
from torchscout.c3.signature import signature
from torchscout.decision.ownership import Ownership
from torchscout.errors import ReplayError
from torchscout.replay.recipe import Mode, Replay
from torchscout.replay.recipes.replicated_state import ReplicatedStateRecipe
from torchscout.state.table import StateTable


class Rank:
    def __init__(self, make=torch.optim.AdamW, *, is_reversed: bool = False, **settings) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        self.optimizer = make(self.model.parameters(), lr=0.1, **settings)
        named = [*self.model.named_parameters()]
        parameters = {f"model/{name}": each for name, each in (named[::-1] if is_reversed else named)}
        self.recipe = ReplicatedStateRecipe(StateTable(parameters, [self.optimizer]).view())

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 3)).sum().backward()
        self.optimizer.step()

    def begin(self) -> Replay:
        return self.recipe.begin(0, is_source=False)


def stepped(count: int = 3, **settings) -> list[Rank]:
    ranks = [Rank(**settings) for _ in range(count)]
    for rank in ranks:
        rank.step()
    return ranks


def aligned(ranks: list[Rank]) -> list[Replay]:
    replays = [rank.begin() for rank in ranks]
    align(replays)
    return replays


def test_a_signature_is_of_the_tensor_it_is_named_after():
    (rank,) = stepped(1)
    (found,) = observations(aligned([rank]))
    weight = rank.model[1].weight
    assert found["model/1.weight"] == signature(weight)
    assert found["model/1.weight.exp_avg"] == signature(rank.optimizer.state[weight]["exp_avg"])


@pytest.mark.parametrize("slot", [None, "exp_avg", "step"])
def test_one_wrong_bit_shows_under_its_own_name(slot: str | None):
    ranks = stepped()
    weight = ranks[2].model[0].weight
    flip_lowest_bit(weight if slot is None else ranks[2].optimizer.state[weight][slot])
    found = observations(aligned(ranks))
    name = "model/0.weight" if slot is None else f"model/0.weight.{slot}"
    assert differing(found) == {name}
    assert outliers(found, name) == [2]


def test_agreements_are_summarized_by_kind_of_state():
    (replay,) = aligned(stepped(1))
    comparisons = replay.comparisons()
    assert {each.mode for each in comparisons} == {Mode.STATE}
    assert {each.summary for each in comparisons} == {"state/parameters", "state/optimizer"}
    assert all((each.summary == "state/optimizer") == (each.surface.count(".") > 1) for each in comparisons)


def test_slots_that_the_first_step_creates_are_there_from_then_on():
    rank = Rank()
    replay = rank.begin()
    rank.step()  # they are looked for at the end of the step
    align([replay])
    assert "model/0.weight.exp_avg" in observations([replay])[0]
    fresh = Rank().begin()
    align([fresh])
    assert len(observations([fresh])[0]) == 4


def test_what_was_learned_of_shared_and_owned_state_is_saved_in_checkpoints():
    learned, again = Ownership(), Ownership()
    learned.learn(["a/weight", "a/weight.exp_avg"], {"a/weight.exp_avg": "differs by design"})
    again.load_state_dict(learned.state_dict())
    assert (again.replicated, again.owned) == (learned.replicated, learned.owned)
    assert again.replicated == {"a/weight"}


def test_names_are_exchanged_only_when_they_change():
    ranks = stepped(2)
    for rank in ranks:
        rank.replay = rank.begin()
    first = [rank.replay.describe() for rank in ranks]
    assert [len(each["names"]) for each in first] == [16, 16]
    for rank in ranks:
        rank.replay.prepare(first, 0)
    assert [rank.begin().describe()["names"] for rank in ranks] == [None, None]


def test_a_tensor_that_one_rank_has_lost_is_a_difference():
    ranks = stepped(2)
    for replay in aligned(ranks):
        replay.learn([])
    del ranks[1].optimizer.state[ranks[1].model[0].weight]["exp_avg"]
    replays = [rank.begin() for rank in ranks]
    described = [replay.describe() for replay in replays]
    for replay in replays:
        with pytest.raises(ReplayError, match="the next check exchanges all names"):
            replay.prepare(described, 0)
    with pytest.raises(ReplayError, match=r"all peers had model/0.weight.exp_avg, and peers \[1\] no longer"):
        prepare([rank.begin() for rank in ranks])


def test_the_order_in_which_ranks_made_their_state_does_not_matter():
    ranks = [Rank(), Rank(is_reversed=True)]
    for rank in ranks:
        rank.step()
    assert differing(observations(aligned(ranks))) == set()


def test_nothing_is_broadcast_or_written_and_release_drops_everything():
    (rank,) = stepped(1)
    replay = rank.begin()
    prepare([replay])
    replay.align(lambda _: pytest.fail("nothing travels"))
    versions = [each._version for each in rank.model.parameters()]
    observations([replay])
    assert [each._version for each in rank.model.parameters()] == versions
    replay.release()
    assert replay.comparisons() == []
