"""Distinguishing state that replicas share from state that each rank owns."""

from __future__ import annotations

import pytest

from torchscout.decision.ownership import Ownership, by_design

PARAMETERS = [f"layers.{number}/weight" for number in range(4)]
AVERAGES = [f"{name}.exp_avg" for name in PARAMETERS]


def test_slots_that_every_rank_shards_for_itself_are_owned():
    differing = {name: [1, 2, 3] for name in AVERAGES}
    assert by_design(differing, PARAMETERS) == {*AVERAGES}


def test_slots_that_only_their_owner_updates_are_owned_though_a_majority_agrees_on_each():
    differing = {
        name: [7 if rank == place % 3 else 0 for rank in range(3)] for place, name in enumerate(AVERAGES)
    }
    assert by_design(differing, []) == {*AVERAGES}


def test_slots_that_one_rank_alone_keeps_up_are_owned():
    differing = {name: [5, 0, 0, 0] for name in AVERAGES}
    assert by_design(differing, PARAMETERS) == {*AVERAGES}


def test_one_wrong_slot_of_one_rank_is_not_ownership():
    assert by_design({AVERAGES[1]: [1, 1, 2]}, [*PARAMETERS, *(set(AVERAGES) - {AVERAGES[1]})]) == set()


def test_several_wrong_slots_of_one_rank_are_not_ownership_while_others_agree():
    differing = {name: [1, 1, 2] for name in AVERAGES[:3]}
    assert by_design(differing, [AVERAGES[3]]) == set()


@pytest.mark.parametrize(("wrong", "is_owned"), [(1, False), (3, True)])
def test_two_ranks_own_a_slot_if_most_of_its_kind_differ(wrong: int, is_owned: bool):
    differing = {name: [1, 2] for name in AVERAGES[:wrong]}
    found = by_design(differing, AVERAGES[wrong:])
    assert found == ({*differing} if is_owned else set())


def test_parameters_are_never_owned_by_their_looks():
    assert by_design({name: [1, 2, 3] for name in PARAMETERS}, []) == set()


def test_parameters_that_differed_before_the_first_update_are_local_until_they_are_equal():
    ownership = Ownership(is_before_training=True)
    assert ownership.is_local(PARAMETERS[0])
    ownership.learn(PARAMETERS, {PARAMETERS[0]: "differs"})
    ownership.is_before_training = False
    assert ownership.is_local(PARAMETERS[0])
    assert not ownership.is_local(PARAMETERS[1])
    ownership.learn(PARAMETERS, {})
    assert not ownership.is_local(PARAMETERS[0])
    assert not ownership.is_new(PARAMETERS[0])


def test_learned_ownership_is_saved_in_checkpoints():
    ownership = Ownership()
    ownership.learn([*PARAMETERS, *AVERAGES], dict.fromkeys(AVERAGES, "differs by design"))
    again = Ownership()
    again.load_state_dict(ownership.state_dict())
    assert (again.replicated, again.owned) == (ownership.replicated, ownership.owned)
    assert again.replicated == {*PARAMETERS}
