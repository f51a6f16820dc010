"""From the posts of one round to an incident, or to none (paper, section 7). Pure.

It knows what a diagnosis of a single round cannot: who is moving, who is excused and who was gone first.
Who holds the job up is for ``hang.diagnosis`` to say. Only hubs import this, and only when they must.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchscout.decision.consensus import Status, Verdict
from torchscout.decision.hang.diagnosis import diagnose
from torchscout.decision.progress import Phase, Process
from torchscout.decision.record import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.decision.straggler.diagnosis import PhaseDiagnosis
from torchscout.mesh import Mesh
from torchscout.observer.protocol import RankReport
from torchscout.utils.text import listed, named, sentences

__all__ = ["compare_phases", "conclude"]

_TOGETHER_SECONDS = 0.02
"""Trainers that ended within this time of the first one ended together; later ones were taken along:
a lost connection, or a launcher that cleans up, ends the others soon after."""
_SUSPECTS, _VICTIMS = 8, 3
"""Whose stacks go with an incident, at most."""

_PROTOCOL = ("fingerprint", "digest", "splits")
"""What the surface of a record begins with that shows members doing different things; see ``protocol``."""

_Posts = Mapping[int, RankReport]


def conclude(posts: _Posts, mesh: Mesh, *, insistent: bool = False) -> Incident | None:
    """What the round shows; ``insistent`` when the same silence was looked at before.

    A rank that moves may be about to end everybody's wait, so the first round does not blame
    anybody while one does. If the others are still waiting the next time, it does. Nor is a group left
    undecided over what its members issued, as long as one that moves may yet join the majority.
    """
    if (cause := _waited_for(posts, mesh)) is not None:
        return replace(cause, records=(*cause.records, *_stacks(posts, cause)))
    gone, moving = _first_gone(posts), any(post.moving for post in posts.values())
    lost = _lost(posts, mesh) if gone else ()
    if moving and not insistent and not gone:
        return None
    incident = diagnose(
        [post.standing for post in posts.values()],
        {line.key: line for post in posts.values() for line in post.lines},
        mesh,
    )
    if moving and not insistent and incident is not None and _is_undecided(incident):
        return None
    if gone and not _explains(incident, lost or gone, moving=moving):
        incident = _departure(posts, lost or gone, mesh)
    if incident is None or _is_excused(incident, posts):
        return None
    return replace(incident, records=(*incident.records, *_stacks(posts, incident)))


def _is_excused(incident: Incident, posts: _Posts) -> bool:
    """Whether all it names are within what they are allowed, and nobody is about to be ended meanwhile."""
    is_allowed = all(rank in posts and posts[rank].excused for rank in incident.ranks)
    return is_allowed and not any(post.is_pressed for post in posts.values())


def _waited_for(posts: _Posts, mesh: Mesh) -> Incident | None:
    """Who is behind it, where trainers ended because they had waited too long: the watchdog of NCCL and the
    timeout of Gloo end whoever waits, and not who is waited for."""
    gone = _first_gone(posts)
    if not gone or any(posts[rank].stalled is None for rank in gone):
        return None
    standings = [
        post.standing
        if post.stalled is None
        else replace(post.standing, process=Process.RUNNING, progress=post.stalled, waiting=None)
        for post in posts.values()
    ]
    incident = diagnose(standings, {line.key: line for post in posts.values() for line in post.lines}, mesh)
    if incident is None or not set(gone).isdisjoint(incident.ranks):
        return None
    ended = f"the trainer{'s' if len(gone) > 1 else ''} of {named(gone)} ended after waiting for too long"
    return replace(incident, sentence=f"{incident.sentence} {sentences(ended)}")


def compare_phases(posts: _Posts, diagnosis: PhaseDiagnosis) -> list[Incident]:
    """What a survey shows, and those before it."""
    milliseconds: dict[Phase, dict[int, float]] = defaultdict(dict)
    for rank, post in posts.items():
        for phase, seconds in post.phase_seconds.items():
            milliseconds[phase][rank] = 1000 * seconds
    known = [post.standing.progress for post in posts.values() if post.standing.progress is not None]
    return diagnosis.observe(max((progress.step for progress in known), default=0), milliseconds)


def _explains(incident: Incident | None, gone: Sequence[int], *, moving: bool) -> bool:
    """Whether a diagnosis says more than that somebody is gone."""
    if incident is None:
        return False
    if _is_about_protocol(incident):
        return True  # the library may end a process over what another one did
    # While somebody moves, who waits for whom is of the moment.
    return not moving and not set(gone).isdisjoint(incident.ranks)


def _is_undecided(incident: Incident) -> bool:
    """Whether members issued different things, and nobody can be named for it."""
    return _is_about_protocol(incident) and incident.scope is Scope.PROCESS_GROUP


def _is_about_protocol(incident: Incident) -> bool:
    return incident.records[0].surface.partition("/")[0] in _PROTOCOL


def _first_gone(posts: _Posts) -> tuple[int, ...]:
    since = {rank: post.gone_seconds for rank, post in posts.items() if post.gone_seconds is not None}
    longest = max(since.values(), default=0.0)
    first = sorted(rank for rank, seconds in since.items() if seconds >= longest - _TOGETHER_SECONDS)
    # Whoever loses its connection to a killed trainer may fail within that time.
    return tuple([rank for rank in first if posts[rank].was_killed] or first)


def _lost(posts: _Posts, mesh: Mesh) -> tuple[int, ...]:
    """Ranks of machines of which nobody answered: whoever ended elsewhere was taken along by that."""
    heard = {mesh.host_of(rank) for rank in posts} | {None}
    return tuple(rank for rank in range(len(mesh)) if rank not in posts and mesh.host_of(rank) not in heard)


def _departure(posts: _Posts, gone: Sequence[int], mesh: Mesh) -> Incident:
    """Trainers that ended before they had finished, or their machines. It takes no vote: it was seen."""
    ranks = sorted({*posts, *gone})
    # Causal evidence, as in the wait graph: it names a rank in a job of any size.
    ended = tuple(int(rank not in posts or posts[rank].standing.process is Process.GONE) for rank in ranks)
    positions = {rank: position for position, rank in enumerate(ranks)}
    verdict = Verdict(Status.ATTRIBUTED, tuple(positions[rank] for rank in gone), ended)
    known = [post.standing.progress for post in posts.values() if post.standing.progress is not None]
    record = EvidenceRecord(
        step=max((progress.step for progress in known), default=0),
        surface="process",
        manifestation=Manifestation.HANG,
        peers=tuple(ranks),
        verdict=verdict,
        stall_seconds=max((progress.silent_seconds for progress in known), default=0.0),
    )
    hosts = Counter(mesh.host_of(rank) for rank in gone)
    everybody = 1 < len(gone) == len(mesh)
    is_lost = gone[0] not in posts
    together = is_lost or (len(gone) > 1 and len(hosts) == 1 and None not in hosts)
    scope = Scope.JOB if everybody else Scope.MACHINE if together else Scope.RANK
    action = Action.REPLACE if is_lost else Action.INSPECT if together and not everybody else Action.RESTART
    return Incident(
        manifestation=Manifestation.HANG,
        scope=scope,
        step=record.step,
        ranks=tuple(gone),
        hosts=mesh.hosts_of(gone),
        records=(record,),
        action=action,
        sentence=_sentence(posts, gone, mesh),
    )


def _sentence(posts: _Posts, gone: Sequence[int], mesh: Mesh) -> str:
    if gone[0] not in posts:
        hosts = mesh.hosts_of(gone)
        machines = f"machine {hosts[0]} is" if len(hosts) == 1 else f"machines {listed(hosts)} are"
        return sentences(f"{machines} gone: {named(gone)} did not answer", "trainers elsewhere ended with it")
    if len(gone) > 1:
        shown = ", ".join(map(str, gone[:8])) + (", ..." if len(gone) > 8 else "")
        return f"The trainers of ranks {shown} ended before they had finished."
    (rank,) = gone
    host, progress = mesh.host_of(rank), posts[rank].standing.progress
    who = f"rank {rank}" if host is None else f"rank {rank} on {host}"
    where = "" if progress is None else f", in {progress.phase.in_words} of step {progress.step}"
    return f"The trainer of {who} ended before it had finished{where}."


def _stacks(posts: _Posts, incident: Incident) -> list[EvidenceRecord]:
    """Where suspects, and a few of the others, stood, unless the records show it already."""
    proved = {record.progress["rank"] for record in incident.records if record.progress is not None}
    with_stack = [rank for rank in sorted(posts) if posts[rank].standing.stack and rank not in proved]
    named = set(incident.ranks)
    suspects = [rank for rank in with_stack if rank in named][:_SUSPECTS]
    victims = [rank for rank in with_stack if rank not in named][:_VICTIMS]
    shown = [_stack(posts[rank], incident, "named") for rank in suspects] + [
        _stack(posts[rank], incident, "not named") for rank in victims
    ]
    return shown + [
        _operations(posts[rank], incident)
        for rank in [*sorted(named), *sorted(posts.keys() - named)][: _SUSPECTS + _VICTIMS]
        if rank in posts and posts[rank].operations is not None
    ]


def _operations(post: RankReport, incident: Incident) -> EvidenceRecord:
    """What PyTorch's own recorder says beside it."""
    rank = post.standing.rank
    return EvidenceRecord(
        step=incident.step,
        surface="flight_recorder",
        manifestation=Manifestation.HANG,
        peers=(rank,),
        reason=f"operations of rank {rank} that are not over, by the Flight Recorder: shown, not compared",
        progress={"rank": rank, **(post.operations or {})},
    )


def _stack(post: RankReport, incident: Incident, role: str) -> EvidenceRecord:
    standing = post.standing
    return EvidenceRecord(
        step=incident.step,
        surface="stack",
        manifestation=Manifestation.HANG,
        peers=(standing.rank,),
        reason=f"the stacks of rank {standing.rank}, which is {role}: shown, not compared",
        progress={"rank": standing.rank, "waiting": standing.waiting, "stack": standing.stack},
    )
