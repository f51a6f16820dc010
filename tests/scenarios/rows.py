"""Rows of the tables of scenarios, and how an answer is compared with what must come.

A row of a table reads like this::

    Row(
        "a rank sleeps in its input while the others wait for it in an all-reduce",
        given=data_parallel(4).waiting_for(2, phase="input"),
        must_come=[hang([2], "rank", "restart")],
        never=[0, 1, 3],
    )

If the answer is wrong today, the row says so, and says which wrong answer comes::

        wrong=wrong_today("observer H1", says=[lost([2, 3], "machine", "replace")]),

Such a row is an expected failure, and a strict one: it fails if the right answer comes, so that the mark is
removed with the defect, and if a third answer comes, which is neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytest

KINDS = ("hang", "divergence", "crash", "lost", "straggler", "sdc")
"""``crash``: a trainer ended before it had finished. ``lost``: nobody can reach the rank's machine.
``divergence``: members of a group issued different operations. The others are the paper's manifestations."""
SCOPES = ("rank", "machine", "peer group", "process group", "job")
"""Of these, ``rank`` and ``machine`` name somebody; the others list all who may be concerned."""
ACTIONS = ("continue", "restart", "inspect", "preflight", "replace", "stop")


class Finding(NamedTuple):
    """What is concluded: who, how precisely, and what should be done first."""

    kind: str
    ranks: tuple[int, ...]
    scope: str
    action: str

    @property
    def named(self) -> frozenset[int]:
        """The ranks that are accused."""
        return frozenset(self.ranks if self.scope in ("rank", "machine") else ())


def _finding(kind: str, ranks: Iterable[int], scope: str, action: str) -> Finding:
    assert kind in KINDS, kind
    assert scope in SCOPES, scope
    assert action in ACTIONS, action
    return Finding(kind, tuple(ranks), scope, action)


hang = partial(_finding, "hang")
divergence = partial(_finding, "divergence")
crash = partial(_finding, "crash")
lost = partial(_finding, "lost")
straggler = partial(_finding, "straggler")
sdc = partial(_finding, "sdc")


class WrongVerdict(Exception):  # noqa: N818  a verdict, not an error of the test
    """The answer is today's wrong one. Nothing else counts as an expected failure."""


@dataclass(frozen=True)
class WrongToday:
    """Where a wrong answer is described, and the answer."""

    where: str
    says: Any

    @property
    def mark(self) -> pytest.MarkDecorator:
        return pytest.mark.xfail(strict=True, raises=WrongVerdict, reason=f"wrong today: {self.where}")


def wrong_today(where: str, *, says: Any) -> WrongToday:
    """``where`` is the finding of a review ("observer H1") or "seen" for what was seen in a real job."""
    return WrongToday(where, says)


@dataclass(frozen=True)
class Either:
    """Several answers are right."""

    answers: tuple[Any, ...]

    def __eq__(self, answer: object) -> bool:
        return answer in self.answers

    __hash__ = None  # type: ignore[assignment]


def either(*answers: Any) -> Either:
    return Either(answers)


@dataclass(frozen=True)
class Row:
    """One scenario."""

    name: str
    """A clause that tells what happens, for a reader who does not know the code."""
    given: Any
    """What was seen, in the words of the table."""
    must_come: Any
    """The findings, in order; ``[]`` if nothing may be said. Some tables have other answers than findings."""
    never: Sequence[int] = ()
    """Ranks that may not be named, now or on the way to the answer."""
    wrong: WrongToday | None = None
    marks: Sequence[pytest.MarkDecorator] = field(default=())
    """``long``, ``slow`` or ``gpu``, for rows that run as real jobs."""

    def __post_init__(self) -> None:
        assert self.wrong is None or self.must_come != self.wrong.says, (
            f"{self.name}: right and wrong are equal"
        )
        assert not _named(self.must_come) & {*self.never}, f"{self.name}: must be named, and never"


def cases(rows: Iterable[Row]) -> list[Any]:
    """The parameters of a table's test: one case a row."""
    return [
        pytest.param(row, id=case_id(row.name), marks=[*row.marks, *([row.wrong.mark] if row.wrong else [])])
        for row in rows
    ]


def check(row: Row, answer: Any, *, on_the_way: Iterable[Any] = ()) -> None:
    """Compare the answer with what must come; ``on_the_way`` are earlier answers, as of earlier rounds.

    Raises ``WrongVerdict`` if it is the wrong answer that is expected today.
    """
    compare(answer, row.must_come, row.wrong)
    for each in (*on_the_way, answer):
        assert not _named(each) & {*row.never}, f"{each} names somebody of {[*row.never]}"


def compare(answer: Any, must_come: Any, wrong: WrongToday | None = None) -> None:
    """Compare an answer outside of a table; the test then bears ``wrong.mark``."""
    if wrong is not None and must_come != answer:
        assert answer == wrong.says, f"neither right nor today's wrong answer: {answer}, expected {must_come}"
        raise WrongVerdict(f"{answer}; right is {must_come}")
    assert must_come == answer, f"{answer}; right is {must_come}"


def _named(answer: Any) -> frozenset[int]:
    if isinstance(answer, Either):
        return frozenset().union(*map(_named, answer.answers))
    findings = answer if isinstance(answer, list | tuple) else ()
    return frozenset().union(*(each.named for each in findings if isinstance(each, Finding)))


def case_id(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
