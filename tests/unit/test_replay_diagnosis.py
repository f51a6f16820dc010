import math
from dataclasses import replace

import pytest

from torchscout.config import StragglerConfig
from torchscout.decision.consensus.rules import Status, exact, statistical
from torchscout.decision.records.record import Action, EvidenceRecord, Manifestation, Scope
from torchscout.decision.repeatability import Repeatability, Repeated
from torchscout.decision.sdc import SdcDiagnosis
from torchscout.decision.straggler.ranks import RankStragglers
from torchscout.mesh import Mesh

NAN = math.nan


def corruption(peers=4, *, hosts=None):
    return SdcDiagnosis(Mesh.grid(replica=peers, hosts=hosts))


def stragglers(peers=4, *, hosts=None, **config):
    return RankStragglers(Mesh.grid(replica=peers, hosts=hosts), StragglerConfig(**config))


def signed(values, *, surface="layer.3/output", step=120, peers=None, **context):
    return EvidenceRecord(
        step=step,
        surface=surface,
        manifestation=Manifestation.SDC,
        peers=peers or tuple(range(len(values))),
        verdict=exact(values),
        **context,
    )


def timed(values, *, surface="time/module", step=120, **context):
    return EvidenceRecord(
        step=step,
        surface=surface,
        manifestation=Manifestation.STRAGGLER,
        peers=tuple(range(len(values))),
        verdict=statistical([float(value) for value in values]),
        **context,
    )


def not_checked(manifestation=Manifestation.SDC, surface="layer.3/output", peers=(0, 1, 2, 3)):
    return EvidenceRecord(
        step=120, surface=surface, manifestation=manifestation, peers=peers, reason="no gradient"
    )


SLOW = [50.0, 50.4, 100.0, 49.7]
CLEAN = [50.0, 50.4, 50.2, 49.7]


# Silent data corruption


def test_a_wrong_result_names_the_rank_its_host_and_the_vote():
    record = signed([7, 7, 9, 7], layer="3")
    (incident,) = corruption(hosts=["a", "a", "b", "b"]).diagnose([record])
    assert (incident.manifestation, incident.scope) == (Manifestation.SDC, Scope.RANK)
    assert (incident.ranks, incident.hosts, incident.step) == ((2,), ("b",), 120)
    assert (incident.action, incident.records) == (Action.REPLACE, (record,))
    assert incident.sentence == (
        "Rank 2 on b disagrees with its peers in layer.3/output (of 3) at step 120: "
        "3 of 4 peers agree against it."
    )


def grid(hosts=None):
    return SdcDiagnosis(Mesh.grid(replica=4, tensor=2, hosts=hosts))


@pytest.mark.parametrize(
    ("hosts", "scope"),
    [(["a"] * 8, Scope.MACHINE), ([f"host{rank}" for rank in range(8)], Scope.PROCESS_GROUP)],
)
def test_partners_whose_results_differ_too_are_one_incident_of_the_lowest_ranks_group(hosts, scope):
    lower = signed([7, 7, 9, 7], peers=(0, 2, 4, 6), mode="forward")
    upper = signed([3, 3, 8, 3], peers=(1, 3, 5, 7), mode="forward")
    (incident,) = grid(hosts).diagnose([lower], elsewhere={5})
    assert (incident.ranks, incident.scope) == ((4, 5), scope)
    assert "one of them may have received it from another" in incident.sentence
    assert grid(hosts).diagnose([upper], elsewhere={4}) == [], "the other group reports for both"


def test_ranks_of_other_replicas_are_no_partners():
    lower = signed([7, 7, 9, 7], peers=(0, 2, 4, 6), mode="forward")
    (incident,) = grid().diagnose([lower], elsewhere={7})
    assert (incident.ranks, incident.scope) == ((4,), Scope.RANK)


def test_other_stages_of_a_pipeline_are_no_partners():
    stages = SdcDiagnosis(Mesh.grid(replica=4, pipeline=2))
    for peers, wrong, other in (((0, 2, 4, 6), 4, 5), ((1, 3, 5, 7), 5, 4)):
        (incident,) = stages.diagnose([signed([7, 7, 9, 7], peers=peers, mode="forward")], elsewhere={other})
        assert (incident.ranks, incident.scope) == ((wrong,), Scope.RANK)


def test_wrong_state_names_only_the_rank_that_holds_it():
    lower = signed([7, 7, 9, 7], peers=(0, 2, 4, 6), mode="state")
    (incident,) = grid().diagnose([lower], elsewhere={5})
    assert incident.ranks == (4,)


def test_ranks_are_global_not_positions():
    (incident,) = corruption(8).diagnose([signed([7, 9, 7], peers=(1, 3, 5))])
    assert incident.ranks == (3,)


def test_agreement_and_what_was_not_checked_are_no_incident():
    assert corruption().diagnose([signed([7, 7, 7, 7]), not_checked()]) == []


@pytest.mark.parametrize("values", [[7, 9], [7, 7, 9, 9], [1, 2, 3]])
def test_without_a_majority_the_whole_group_is_in_question(values):
    (incident,) = corruption().diagnose([signed(values)])
    assert (incident.scope, incident.ranks) == (Scope.PEER_GROUP, tuple(range(len(values))))
    assert incident.action is Action.INSPECT
    assert "no majority" in incident.sentence


def test_surfaces_that_name_the_same_ranks_are_one_incident():
    output, gradient = signed([7, 7, 9, 7]), signed([1, 1, 2, 1], surface="layer.3/grad_input")
    other = signed([1, 5, 1, 1], surface="optimizer/param")
    first, second = corruption().diagnose([output, other, gradient])
    assert (first.ranks, first.records) == ((2,), (output, gradient))
    assert "layer.3/output and layer.3/grad_input" in first.sentence
    assert (second.ranks, second.records) == ((1,), (other,))


@pytest.mark.parametrize(
    ("hosts", "scope"),
    [
        (["a", "b", "b", "c", "d"], Scope.MACHINE),
        (["a", "b", "c", "c", "d"], Scope.RANK),
        (None, Scope.RANK),
    ],
)
def test_outliers_that_share_a_known_host_make_it_the_machine(hosts, scope):
    (incident,) = corruption(5, hosts=hosts).diagnose([signed([7, 8, 9, 7, 7])])
    assert (incident.scope, incident.ranks) == (scope, (1, 2))
    assert "agree against them" in incident.sentence


def test_a_long_list_is_cut_short_in_the_sentence_only():
    records = [signed([7, 7, 9, 7], surface=f"layer.{i}/weight") for i in range(40)]
    (incident,) = corruption().diagnose(records)
    assert "layer.0/weight, layer.1/weight, layer.2/weight and 37 more at step" in incident.sentence
    assert incident.records == tuple(records)


@pytest.mark.parametrize(
    ("kind", "replays", "differing", "earlier", "words"),
    [
        (Repeatability.PERSISTENT, 1, 1, 0, "3 of 4 peers agree against it."),
        (Repeatability.PERSISTENT, 2, 2, 0, "; a second replay gave the same (persistent)."),
        (Repeatability.PERSISTENT, 36, 36, 0, "; 35 further replays gave the same (persistent)."),
        (Repeatability.INTERMITTENT, 50, 36, 0, "; 36 of 50 replays differed (intermittent)."),
        (
            Repeatability.INTERMITTENT,
            50,
            20,
            16,
            "; 20 of 50 replays differed, and 16 in earlier checks (intermittent).",
        ),
    ],
)
def test_the_sentence_says_whether_it_repeated(kind, replays, differing, earlier, words):
    record, again = signed([7, 7, 9, 7]), signed([7, 7, 8, 7])
    repeated = Repeated(record, kind, replays, differing, earlier, (again,))
    (incident,) = corruption().diagnose([record], repeats=[repeated])
    assert incident.ranks == (2,)
    assert incident.sentence.endswith(words)
    assert incident.records == (record, again)


def test_a_repetition_of_other_work_is_not_mentioned():
    record, other = signed([7, 7, 9, 7], layer="3"), signed([7, 7, 9, 7], layer="4")
    repeated = Repeated(other, Repeatability.PERSISTENT, 9, 9)
    (incident,) = corruption().diagnose([record], repeats=[repeated])
    assert "persistent" not in incident.sentence


# Stragglers


def feed(scout, rounds, **context):
    """The incidents of each round."""
    return [scout.observe([timed(values, step=step, **context)]) for step, values in enumerate(rounds)]


def test_a_rank_slow_twice_running_is_named():
    scout = stragglers(hosts=["a", "a", "b", "b"])
    first, second = timed(SLOW, step=100), timed(SLOW, step=120, layer="3")
    assert scout.observe([first]) == []
    (incident,) = scout.observe([second])
    assert (incident.manifestation, incident.scope) == (Manifestation.STRAGGLER, Scope.RANK)
    assert (incident.ranks, incident.hosts, incident.step) == ((2,), ("b",), 120)
    assert (incident.action, incident.records) == (Action.INSPECT, (second, first))
    assert incident.sentence == (
        "Rank 2 on b is slow in time/module (of 3) at step 120: "
        "100.0 ms against 50.2 ms among 4 peers, slow in 2 rounds since step 100."
    )


def test_equal_ranks_are_silent():
    assert feed(stragglers(), [CLEAN] * 20) == [[]] * 20


def test_two_ranks_are_blamed_together():
    scout = stragglers(2)
    assert scout.observe([timed([50, 100])]) == []
    (incident,) = scout.observe([timed([50, 100])])
    assert (incident.scope, incident.ranks) == (Scope.PEER_GROUP, (0, 1))
    assert incident.records[0].verdict.status is Status.INCONCLUSIVE
    assert "rank 1 is the slower, but two peers have no majority" in incident.sentence


def test_of_two_ranks_the_faster_is_the_measure():
    (incident,) = feed(stragglers(2), [[50, 58]] * 2)[1]
    assert "58.0 ms against 50.0 ms" in incident.sentence


def test_two_ranks_that_are_slow_in_turn_are_not_stragglers():
    assert feed(stragglers(2), [[50, 100], [100, 50]] * 5) == [[]] * 10


@pytest.mark.parametrize(
    "times",
    [
        pytest.param([50.0, 50.4, 20.0, 49.7], id="fast"),
        pytest.param([50.0, 50.1, 54.0, 49.9], id="below the ratio"),
        pytest.param([2.0, 2.01, 2.9, 1.99], id="below a millisecond"),
    ],
)
def test_outliers_that_do_not_matter_are_silent(times):
    assert timed(times).ranks == (2,)
    assert feed(stragglers(), [times] * 10) == [[]] * 10


def test_materiality_is_configurable():
    quiet = [[50.0, 50.1, 54.0, 49.9]] * 2
    assert feed(stragglers(min_slowdown_ratio=1.05), quiet)[1][0].ranks == (2,)
    short = [[2.0, 2.01, 2.9, 1.99]] * 2
    assert feed(stragglers(min_slowdown_ms=0.5), short)[1][0].ranks == (2,)
    patient = feed(stragglers(confirmations=4), [SLOW] * 4)
    assert [len(incidents) for incidents in patient] == [0, 0, 0, 1]


@pytest.mark.parametrize("surface", ["time/all_gather", "time/reduce_scatter", "time/all_to_all", "time/new"])
def test_communication_is_never_blamed_on_an_endpoint(surface):
    assert feed(stragglers(), [SLOW] * 5, surface=surface) == [[]] * 5


def test_a_straggler_is_reported_once_and_again_only_after_it_was_clean():
    rounds = feed(stragglers(), [SLOW] * 30 + [CLEAN] + [SLOW] * 3)
    assert [step for step, incidents in enumerate(rounds) if incidents] == [1, 32]


def test_times_that_most_peers_lack_are_no_evidence():
    assert feed(stragglers(6), [[50.0, 50.4, 100.0, NAN, NAN, NAN]] * 10) == [[]] * 10


def test_one_slow_round_is_not_a_straggler():
    assert feed(stragglers(), [SLOW, CLEAN] * 10) == [[]] * 20


@pytest.mark.parametrize(
    "between",
    [
        pytest.param([timed([50.0, 50.4, NAN, 49.7])], id="no time"),
        pytest.param([timed([NAN, NAN, 50.0, NAN])], id="no majority"),
        pytest.param([not_checked(Manifestation.STRAGGLER, "time/module")], id="not checked"),
        pytest.param([], id="not due"),
        pytest.param([timed(SLOW, surface="time/optimizer")], id="another surface"),
        pytest.param([timed([50.0, 52.0, 56.5, 47.0])], id="still behind"),
    ],
)
def test_an_inconclusive_round_neither_confirms_nor_clears(between):
    scout = stragglers()
    assert scout.observe([timed(SLOW)]) == []
    assert scout.observe(between) == []
    assert scout.observe([timed(SLOW)])[0].ranks == (2,)


def test_another_ranks_slow_round_does_not_confirm():
    assert feed(stragglers(), [SLOW, [100.0, 50.4, 50.2, 49.7], SLOW]) == [[]] * 3


def test_surfaces_confirmed_together_are_one_incident():
    scout = stragglers()
    records = [timed(SLOW), timed(SLOW, surface="time/module_backward")]
    scout.observe(records)
    (incident,) = scout.observe(records)
    assert incident.ranks == (2,)
    assert len(incident.records) == 4
    assert "time/module and time/module_backward" in incident.sentence


def test_slow_in_one_layer_of_the_round_is_slow():
    scout = stragglers()
    slightly = timed([50.0, 50.4, 70.0, 49.7], layer="2")
    records = [timed(CLEAN, layer="0"), slightly, timed(SLOW, layer="1"), slightly]
    scout.observe(records)
    (incident,) = scout.observe(records)
    assert [record.layer for record in incident.records] == ["1", "1"]


def turns(scout, slow_layers, rounds, times=SLOW):
    """One layer of three after the other; the rounds in which somebody was named."""
    reported = []
    for step in range(rounds):
        layer = f"layer.{step % 3}"
        values = times if layer in slow_layers else CLEAN
        reported += [(step, each.ranks) for each in scout.observe([timed(values, layer=layer, step=step)])]
    return reported


def test_slow_in_one_layer_of_many_is_slow_whenever_its_turn_comes():
    scout = stragglers()
    assert turns(scout, {"layer.1"}, 12) == [(4, (2,))]  # the second time, and not again while it lasts


def test_slow_in_every_layer_is_reported_once_in_the_second_round():
    assert turns(stragglers(), {"layer.0", "layer.1", "layer.2"}, 12) == [(1, (2,))]


def test_two_layers_that_are_slow_by_turns_are_one_straggler():
    assert turns(stragglers(), {"layer.0", "layer.2"}, 12) == [(3, (2,))]


def test_a_layer_in_which_another_rank_is_slow_each_time_names_nobody():
    scout = stragglers()
    for step, slow in enumerate((0, 2, 1, 3, 2, 0)):
        values = [100.0 if rank == slow else 50.0 + rank / 10 for rank in range(4)]
        assert scout.observe([timed(values, layer="layer.0", step=2 * step)]) == []
        assert scout.observe([timed(CLEAN, layer="layer.1", step=2 * step + 1)]) == []


def test_two_stragglers_are_two_incidents():
    both = [50.0, 50.4, 100.0, 49.7, 50.1, 120.0, 49.9, 50.3]
    rounds = feed(stragglers(8), [both] * 4)
    assert [[incident.ranks for incident in incidents] for incidents in rounds] == [[], [], [(2,), (5,)], []]


def test_peer_groups_are_judged_apart():
    scout = stragglers(8)
    scout.observe([replace(timed(SLOW), peers=(0, 2, 4, 6))])
    assert scout.observe([replace(timed(SLOW), peers=(1, 3, 4, 7))]) == []
    assert scout.observe([replace(timed(SLOW), peers=(0, 2, 4, 6))])[0].ranks == (4,)
