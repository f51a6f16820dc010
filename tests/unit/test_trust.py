"""The step up to which a job is certified, by its checks alone."""

from __future__ import annotations

from torchscout.checkpoint.trust.gate_state import Outcome
from torchscout.session.checkpoints.certifier import CertifiedSteps
from torchscout.session.checkpoints.promotion import CheckCoverage
from torchscout.session.replay.coverage import RecipeCycle


def trusted_after(*outcomes: Outcome, recipes: int | None = None, idle: tuple[int, ...] = ()) -> int | None:
    """Checks at steps 10, 20 and so on, of which the ``idle`` ones go over nothing that counts."""
    certifier = CertifiedSteps()
    certifier.set_coverage(RecipeCycle(recipes))
    for number, outcome in enumerate(outcomes, start=1):
        check = CheckCoverage(paths=int(number not in idle))
        certifier.decide(10 * number, certifier.votes(outcome, differs=False), check)
    return certifier.certified_step


HEALTHY = Outcome.HEALTHY


def test_without_a_catalog_every_accepted_check_certifies_until_one_finds_corruption():
    assert trusted_after() is None
    assert trusted_after(HEALTHY, Outcome.STRAGGLER, Outcome.NOT_CHECKED) == 20
    assert trusted_after(HEALTHY, Outcome.REJECTED, HEALTHY) == 30
    assert trusted_after(HEALTHY, Outcome.SDC, HEALTHY, HEALTHY) == 10


def test_what_may_have_changed_before_it_was_written_is_certified_no_more():
    certifier = CertifiedSteps()
    for step in (10, 20):
        certifier.decide(step, certifier.votes(HEALTHY, differs=False), CheckCoverage())
    certifier.decide(21, certifier.votes(Outcome.SDC, differs=True), CheckCoverage())
    assert certifier.certified_step == 10


def test_with_a_catalog_two_cycles_certify():
    assert trusted_after(*[HEALTHY] * 5, recipes=3) is None
    assert trusted_after(*[HEALTHY] * 6, recipes=3) == 30
    assert trusted_after(*[HEALTHY] * 9, recipes=3) == 60


def test_a_check_that_goes_over_nothing_of_the_catalog_counts_only_if_it_finds_something():
    assert trusted_after(*[HEALTHY] * 6, recipes=3, idle=(2,)) is None
    assert trusted_after(*[HEALTHY] * 6, Outcome.SDC, HEALTHY, recipes=1, idle=(7,)) == 50
