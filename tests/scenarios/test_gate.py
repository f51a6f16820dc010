"""Which captured generation may be trusted, and what is captured at the moment of capture.

A check compares what ranks hold and compute. If they agree it is accepted, and every rank captures its state
when the next step begins. What all ranks have captured is a *generation*; the newest is the *latest*. Without
a catalog of expert shapes each check covers the model, and the latest is *verified*, too. With a catalog of K
recipes a check replays some of them. A generation before whose capture all K were accepted in a row is the
*candidate*, and it is verified once all K were accepted again.

Most rows are the history of a job that ends after the last event: the answer is what the next job may trust.
The last rows run training scripts, and look at what the next job loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.scenarios.rows import Row, cases, check, either
from tests.scenarios.today import gate, gate_jobs

BOTH = (0, 1)
"""The ranks of a job."""


@dataclass(frozen=True)
class Event:
    """Something that happens to the job, or that ranks report before the next check."""

    what: str
    step: int = 0
    on: Sequence[int] = BOTH
    """The ranks that report it, or that have found something in a check."""
    found: str | None = None
    """What is wrong in a check; ``None``: everything was compared, and all ranks agree."""
    recipes: int = 1
    """How many recipes of the catalog a check replays."""
    state: bool = True
    """Whether a check compares the state of all layers."""
    known_to: Sequence[int] = BOTH
    """The ranks that write down the outcome; the job dies before the others do, or a check breaks off."""


@dataclass(frozen=True)
class History:
    events: Sequence[Event]
    catalog: int | None = None
    """K, the number of its recipes; ``None`` without a catalog."""
    coverage: str = "full"
    """``state``: despite the catalog, one comparison of the state of all layers verifies a generation."""
    files_every: int = 1
    """How often a capture is written to files. The end of a cycle of K recipes always is."""
    older_files: int = 1
    """How many verified generations stay in files besides the newest."""
    require: Sequence[str] = ()
    """What a check that certifies must not leave out."""
    asks_for_files: bool = False
    """The answer is not who is trusted, but the generations that are in files."""
    ranks: int = len(BOTH)


class Trust(NamedTuple):
    """The step of each generation; ``None`` if there is none."""

    latest: int | None = None
    candidate: int | None = None
    verified: int | None = None


def history(*events: Event | list[Event], **settings: object) -> History:
    return History(
        [one for each in events for one in (each if isinstance(each, list) else [each])], **settings
    )


def files(*events: Event | list[Event], **settings: object) -> History:
    return history(*events, **settings, asks_for_files=True)


def checked(step: int, found: str | None = None, **how: object) -> Event:
    return Event("check", step, found=found, **how)


def sealed(step: int, on: Sequence[int] = BOTH) -> Event:
    """These ranks have captured the whole state in memory. Others could not."""
    return Event("sealed", step, on)


def written(step: int, on: Sequence[int] = BOTH) -> Event:
    """These ranks have their files. Others are still writing."""
    return Event("written", step, on)


def write_failed(step: int, on: Sequence[int]) -> Event:
    return Event("write failed", step, on)


def recovered(step: int, known_to: Sequence[int] = BOTH) -> Event:
    """The job starts again, and continues from this generation."""
    return Event("recovered", step, known_to=known_to)


def reconnected() -> Event:
    """A check broke off, for example because a connection was lost, and all ranks have connected again."""
    return Event("reconnected")


def clean(*steps: int, recipes: int = 1) -> list[Event]:
    """Accepted checks; after each, all ranks capture their state and write files. The next check makes known
    that they have."""
    each = ([checked(step, recipes=recipes), sealed(step), written(step)] for step in steps)
    return [event for events in each for event in events]


def second_check(found: str | None, on: Sequence[int] = BOTH, **settings: object) -> History:
    """Step 4 is verified, and then something is found at step 8."""
    return history(clean(4), checked(8, found, on=on), sealed(8), **settings)


ACCEPTED, NOT_ACCEPTED = Trust(latest=8, verified=8), Trust(latest=4, verified=4)


@dataclass(frozen=True)
class Copy:
    """A machine writes a generation to its disk, and is also to write the copy of another machine's state.
    The answer is what this counts as."""

    arrives: bool = True
    disk_is_in_the_way: bool = False
    """The copy cannot be written."""


@dataclass(frozen=True)
class Write:
    """A write to a weight after a capture has begun and before the next update. The answer is what is
    sealed."""

    through_data: bool = False
    """``weight.data.fill_(1)``, which PyTorch does not count as a change of the weight."""
    device: str = "cpu"
    attempts: int = 1


@dataclass(frozen=True)
class Scripts:
    """Two replicas train, with a check after steps 2 and 4; each script does something with the weights
    besides. The answer is what the next job loads, for each script."""

    each: Sequence[str]


class Loaded(NamedTuple):
    step: int
    trust: str
    weights: str
    """``as the next step found them``; of a last step, ``as the check saw them``. No others belong to it."""


EARLIER = Loaded(2, "verified", "as the next step found them")
TRAINED = either(Loaded(4, "verified", "as the check saw them"), EARLIER)
WENT_ON = Loaded(4, "verified", "as the next step found them")

ROWS = [
    # What a check certifies. There is no catalog.
    Row("all ranks agree", given=second_check(None), must_come=ACCEPTED),
    Row(
        "a rank is slow, but its numbers are right",
        given=second_check("a rank is slow", on=[1]),
        must_come=ACCEPTED,
    ),
    Row(
        "a parameter has no gradient on any rank",
        given=second_check("a parameter has no gradient"),
        must_come=ACCEPTED,
    ),
    Row(
        "one gradient of a layer does not repeat itself and is left out",
        given=second_check("a gradient does not repeat itself"),
        must_come=ACCEPTED,
    ),
    Row(
        "a gradient that the user requires does not repeat itself",
        given=second_check("a gradient does not repeat itself", require=["backward"]),
        must_come=NOT_ACCEPTED,
    ),
    Row(
        "the layer that is due communicates, so that it can never be replayed",
        given=second_check("the layer cannot be replayed"),
        must_come=ACCEPTED,
    ),
    Row(
        "nothing of the layer that is due repeats itself",
        given=second_check("the layer does not repeat itself"),
        must_come=NOT_ACCEPTED,
    ),
    Row(
        "one rank did not call the layer that is due",
        given=second_check("the layer was not called", on=[1]),
        must_come=NOT_ACCEPTED,
    ),
    Row(
        "a replay fails on one rank",
        given=second_check("a replay failed", on=[0]),
        must_come=NOT_ACCEPTED,
    ),
    Row(
        "a rank differs once, and a kernel may be the cause",
        given=second_check("a rank differed once"),
        must_come=NOT_ACCEPTED,
    ),
    Row("one rank differs from the others", given=second_check("one rank differs"), must_come=NOT_ACCEPTED),
    Row(
        "there is no majority, in a comparison that only one rank has seen",
        given=second_check("all ranks differ", on=[0]),
        must_come=NOT_ACCEPTED,
    ),
    # A generation is what every rank has captured.
    Row("the job ends before it is captured", given=history(checked(4)), must_come=Trust()),
    Row(
        "the job ends when every rank has captured it",
        given=history(checked(4), sealed(4)),
        must_come=Trust(latest=4, verified=4),
    ),
    Row(
        "one rank could not capture it, and the job ends after the next check",
        given=history(clean(4), checked(8), sealed(8, on=[0]), checked(12)),
        must_come=Trust(latest=4, verified=4),
    ),
    Row(
        "one rank could not capture it, and training goes on",
        given=history(clean(4), checked(8), sealed(8, on=[0]), clean(12)),
        must_come=Trust(latest=12, verified=12),
    ),
    # After corruption nothing is trusted that was captured later, until the job has gone back.
    Row(
        "all checks after corruption are clean",
        given=history(clean(4, 8), checked(12, "one rank differs"), clean(16, 20, 24)),
        must_come=Trust(latest=8, verified=8),
    ),
    Row(
        "the first check finds corruption",
        given=history(checked(4, "one rank differs"), clean(8, 12)),
        must_come=Trust(),
    ),
    Row(
        "the job goes back to the generation before the corruption, and trains the same steps again",
        given=history(clean(4, 8), checked(12, "one rank differs"), recovered(8), clean(12)),
        must_come=Trust(latest=12, verified=12),
    ),
    Row(
        "a candidate and a latest that are not verified yet when corruption is found",
        given=history(clean(1, 2, 3), checked(4, "one rank differs"), clean(5, 6, 7), catalog=1),
        must_come=Trust(verified=2),
    ),
    # With a catalog of K recipes, K are accepted before the capture and K after it.
    Row(
        "a catalog of one recipe waits for a second check",
        given=history(clean(1), catalog=1),
        must_come=Trust(latest=1),
    ),
    Row(
        "the first cycle is complete: what was captured within it is not verified",
        given=history(clean(1, 2), checked(3), catalog=3),
        must_come=Trust(latest=2),
    ),
    Row(
        "one recipe is missing in the second cycle",
        given=history(clean(1, 2, 3, 4, 5), catalog=3),
        must_come=Trust(latest=5, candidate=3),
    ),
    Row(
        "two cycles are complete",
        given=history(clean(1, 2, 3, 4, 5, 6), checked(7), catalog=3),
        must_come=Trust(latest=6, candidate=6, verified=3),
    ),
    Row(
        "a check replays two recipes when one is left in the cycle: the other does not count for the next",
        given=history(clean(1, 2, 3, recipes=2), clean(4, recipes=3), checked(5), catalog=5),
        must_come=Trust(latest=4, candidate=3),
    ),
    Row(
        "an accepted check that replays no recipe does not count",
        given=history(clean(1), checked(2, recipes=0), clean(3, 4, 5, 6), catalog=3),
        must_come=Trust(latest=6, candidate=4),
    ),
    Row(
        "one comparison of the state of all layers is said to be enough: a check without it does not count",
        given=history(clean(1), checked(2, state=False), sealed(2), catalog=3, coverage="state"),
        must_come=Trust(latest=1, verified=1),
    ),
    Row(
        "an incomplete check within the second cycle: the two checks before it do not count",
        given=history(clean(1, 2, 3, 4, 5), checked(6, "a replay failed"), clean(7, 8), catalog=3),
        must_come=Trust(latest=8, candidate=3),
    ),
    Row(
        "a whole cycle after an incomplete check: the candidate was captured after a whole one, too",
        given=history(
            clean(1, 2, 3, 4, 5), checked(6, "a replay failed"), clean(7, 8, 9), checked(10), catalog=3
        ),
        must_come=Trust(latest=9, candidate=9, verified=3),
    ),
    Row(
        "ranks differ within the second cycle, and it is not known why: the candidate is none any more",
        given=history(clean(1, 2, 3), checked(4, "a rank differed once"), clean(5, 6), checked(7), catalog=2),
        must_come=Trust(latest=6, candidate=6),
    ),
    Row(
        "both cycles begin again after a recovery: a new machine may hide what the old one did wrong",
        given=history(clean(1, 2, 3), recovered(3), clean(4, 5, 6), catalog=2),
        must_come=Trust(latest=6, candidate=5),
    ),
    Row(
        "a check breaks off within a cycle, which begins again",
        given=history(clean(1), reconnected(), clean(4, 5), checked(6), catalog=2, files_every=9),
        must_come=Trust(latest=5, candidate=5),
    ),
    Row(
        "a check breaks off within a cycle, while a capture from within it is written",
        given=history(clean(1), reconnected(), clean(4, 5), checked(6), catalog=2),
        must_come=Trust(latest=5, candidate=5),
    ),
    Row(
        "captures from within a long cycle are written, but never verified",
        given=history(clean(*range(1, 15)), checked(15), catalog=7, files_every=2),
        must_come=Trust(latest=14, candidate=14, verified=7),
    ),
    # What is in files, with the copies that belong there; files that fail change no trust in memory.
    Row("every rank has written its files", given=files(clean(4), checked(8)), must_come=(4,)),
    Row(
        "one rank is still writing",
        given=files(checked(4), sealed(4), written(4, on=[1]), checked(8)),
        must_come=(),
    ),
    Row(
        "one rank could not write its files, and the next are written by all",
        given=files(
            checked(4), sealed(4), written(4, on=[0]), write_failed(4, on=[1]), clean(8), checked(12)
        ),
        must_come=(8,),
    ),
    Row(
        "what cannot be written is verified in memory all the same",
        given=history(checked(4), sealed(4), write_failed(4, on=[1]), checked(8)),
        must_come=Trust(latest=4, verified=4),
    ),
    Row(
        "a candidate that cannot be written is not verified after the next cycle",
        given=history(
            clean(1, 2, 3, 4, 5),
            checked(6),
            sealed(6),
            write_failed(6, on=[0]),
            clean(7),
            checked(8),
            catalog=2,
        ),
        must_come=Trust(latest=7, verified=4),
    ),
    Row(
        "the only files stay while newer verified state is just in memory",
        given=files(clean(4, 8), checked(12), sealed(12), checked(16), files_every=4, older_files=0),
        must_come=(4,),
    ),
    Row("the copy of another machine's state is in files, too", given=Copy(), must_come="in files"),
    Row(
        "the copy of another machine's state never arrives",
        given=Copy(arrives=False),
        must_come=either("not in files yet", "could not be written"),
    ),
    Row(
        "the copy of another machine's state cannot be written to this machine's disk",
        given=Copy(disk_is_in_the_way=True),
        must_come=either("not in files yet", "could not be written"),
    ),
    # The job dies while ranks write down a decision: what only some of them know does not count.
    Row(
        "only one rank knows that a check was accepted",
        given=history(clean(4), checked(8, known_to=[0]), sealed(8, on=[0])),
        must_come=Trust(latest=4, verified=4),
    ),
    Row(
        "only one rank knows that what every rank captured is whole",
        given=history(clean(4, 8), checked(12, known_to=[1])),
        must_come=Trust(latest=8, verified=8),
    ),
    Row(
        "only one rank knows that the candidate was verified",
        given=history(clean(1, 2, 3), checked(4, known_to=[0]), catalog=2),
        must_come=Trust(latest=3, candidate=2),
    ),
    Row(
        "only one rank knows of corruption",
        given=history(clean(1, 2, 3, 4, 5), checked(6, "one rank differs", known_to=[1]), catalog=2),
        must_come=Trust(verified=2),
    ),
    Row(
        "only one rank knows that the job has gone back after corruption",
        given=history(
            clean(1, 2, 3, 4), checked(5, "one rank differs"), recovered(2, known_to=[0]), catalog=2
        ),
        must_come=Trust(verified=2),
    ),
    Row(
        "a check breaks off when one rank has acted on it, and all connect again: nobody keeps its capture",
        given=history(clean(4), checked(8, known_to=[0]), sealed(8, on=[0]), reconnected()),
        must_come=Trust(latest=4, verified=4),
    ),
    # A capture is the state of one moment. If it may not be, nothing is sealed.
    Row(
        "a weight is written to before it is copied",
        given=Write(),
        must_come=either("nothing", "as it was"),
    ),
    Row(
        "a weight is written to before it is copied, through its data",
        given=Write(through_data=True, attempts=20),
        must_come=either("nothing", "as it was"),
    ),
    Row(
        "a write to a weight is queued on a device while its copy is queued on another stream",
        given=Write(device="cuda", attempts=3),
        must_come=either("nothing", "as it was"),
        marks=[pytest.mark.gpu],
    ),
    # The state of a step is what the next step begins with. If none begins, only what the check has seen is.
    Row(
        "the last step has a check; then the script changes the weights and ends",
        given=Scripts(
            [
                "loads averaged weights, and closes",
                "sets all weights to zero, and closes",
                "fails in an evaluation of averaged weights",
            ]
        ),
        must_come=[TRAINED] * 3,
        marks=[pytest.mark.long],
    ),
    Row(
        "the last step has a check; then the script casts the model to half precision and ends",
        given=Scripts(["casts the model to half precision, and closes"]),
        must_come=[TRAINED],
    ),
    Row(
        "averaged weights are validated in the middle of training, with a loader that is watched",
        given=Scripts(["validates averaged weights with a watched loader"]),
        must_come=[WENT_ON],
    ),
    Row(
        "averaged weights are validated in training mode, so that it looks as if the next step began",
        given=Scripts(
            [
                "validates averaged weights in training mode",
                "the same, and exchanges the memory of the weights",
            ]
        ),
        must_come=[either(WENT_ON, EARLIER)] * 2,
    ),
    Row(
        "each step begins with a call of the model with other parameters",
        given=Scripts(["calls the model with averaged weights in each step"]),
        must_come=[WENT_ON],
    ),
    Row(
        "the learning rate is lowered after a validation with a loader that is watched",
        given=Scripts(["lowers the rate after a validation with a watched loader"]),
        must_come=[WENT_ON],
    ),
    Row(
        "the script writes to the weights after every update, or validates others in between",
        given=Scripts(
            [
                "clips the weights after each update",
                "scales the weights through .data after each update",
                "lets a target network follow after each update",
                "keeps an average in a buffer after each update",
                "steps a second optimizer after each update",
                "validates averaged weights",
                "validates in half precision",
                "goes back to the best weights",
            ]
        ),
        must_come=[WENT_ON] * 8,
        marks=[pytest.mark.long],
    ),
    Row(
        "both replicas agree on weights that are not numbers",
        given=Scripts(["has a loss that is not a number"]),
        must_come=[EARLIER],
    ),
    Row(
        "both replicas write to a weight what is not a number, after the update and its check",
        given=Scripts(["writes to a weight what is not a number"]),
        must_come=[EARLIER],
    ),
]


@pytest.mark.parametrize("row", cases(ROWS))
def test_gate(row: Row, tmp_path: Path):
    check(row, answer(row.given, tmp_path))


def answer(given: History | Copy | Write | Scripts, folder: Path) -> object:
    if isinstance(given, Scripts):
        return gate_jobs.loaded_after(given.each, folder)
    if isinstance(given, Copy):
        return gate.counted_as(given, folder)
    if isinstance(given, Write):
        return gate.captured(given)
    return gate.in_files(given) if given.asks_for_files else gate.trusted(given)
