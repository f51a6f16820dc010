"""Records keep all of their context through JSON and back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from torchscout.decision.consensus import exact, statistical
from torchscout.decision.types import (
    Action,
    Agreement,
    Agreements,
    Decision,
    EvidenceRecord,
    Failure,
    Incident,
    Manifestation,
    Recordable,
    Resolved,
    Scope,
    Started,
    Status,
    Trust,
    Verdict,
    from_json,
    headline,
)
from torchscout.run.reader import Problem, Stamped, read
from torchscout.run.writer import RunWriter

CONTRACT = {"schema", "kind", "time", "step", "manifestation", "scope", "ranks", "hosts", "surface"}
CONTRACT |= {"status", "peers", "bitmap", "action", "sentence"}

EVIDENCE = EvidenceRecord(
    step=7,
    surface="layer.3/grad_input",
    manifestation=Manifestation.SDC,
    peers=(1, 3, 5, 7),
    verdict=exact([-1, -1, 5, -1]),
    layer="layer.3",
    mode="backward",
    shape=(2, 16, 64),
    progress={"step": 7, "phase": "backward"},
    fingerprints=("all_reduce:f32[64]", "barrier"),
    stall_seconds=6.5,
)
TIMES = EvidenceRecord(
    step=8,
    surface="time/module",
    manifestation=Manifestation.STRAGGLER,
    peers=(0, 2, 4),
    verdict=statistical([1.5, math.inf, 1.5]),
)
NOT_CHECKED = EvidenceRecord(
    step=9,
    surface="layer.1/output",
    manifestation=Manifestation.SDC,
    peers=(0, 1),
    reason="reentrant checkpointing",
)
INCIDENT = Incident(
    manifestation=Manifestation.SDC,
    scope=Scope.RANK,
    step=7,
    ranks=(5,),
    hosts=("node-2",),
    records=(EVIDENCE, TIMES),
    action=Action.REPLACE,
    sentence="Rank 5 on node-2 computes another gradient.",
)
RESOLVED = Resolved(
    incident=INCIDENT.id, step=7, ranks=(5,), sentence=INCIDENT.sentence, stalled_seconds=12.5
)
AGREEMENTS = Agreements(
    peers=(1, 3, 5, 7),
    surfaces=(
        Agreement(
            surface="layer.3/output",
            manifestation=Manifestation.SDC,
            layer="layer.3",
            mode="forward",
            count=2,
            first=20,
            last=100,
        ),
        Agreement(
            surface="time/module",
            manifestation=Manifestation.STRAGGLER,
            layer=None,
            mode=None,
            count=5,
            first=20,
            last=100,
        ),
    ),
)


DECISION = Decision(
    step=7,
    action=Action.PREFLIGHT,
    failure=Failure.SDC,
    ranks=(5,),
    hosts=("node-2",),
    sentence="Check machine node-2.",
    is_carried_out=True,
)
SIGNATURES = Verdict(Status.ATTRIBUTED, (0,), (-(1 << 63), (1 << 63) - 1, (1 << 63) - 1))
ITEMS = {
    "evidence": EVIDENCE,
    "times": TIMES,
    "not checked": NOT_CHECKED,
    "signatures": replace(EVIDENCE, peers=(0, 1, 2), verdict=SIGNATURES),
    "incident": INCIDENT,
    "a crash": replace(INCIDENT, manifestation=Manifestation.CRASH, action=Action.PREFLIGHT),
    "resolved": RESOLVED,
    "recovered": replace(RESOLVED, recovered=4),
    "decision": DECISION,
    "agreements": AGREEMENTS,
    "started": Started(step=3, sentence="All ranks load step 3."),
    "trust": Trust(step=20, latest=19, candidate=None, verified=0, poisoned=None),
}


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)
def test_records_survive_json(item: Recordable):
    line = json.loads(json.dumps(item.to_json(), allow_nan=False))
    assert from_json(line) == item
    assert from_json({**line, "since": "a later version"}) == item


def test_a_field_that_an_earlier_version_did_not_write_has_its_default():
    for item, name in ((RESOLVED, "recovered"), (DECISION, "devices"), (TIMES, "layer")):
        line = item.to_json()
        del line[name]
        assert from_json(line) == item


def with_record(**change: object) -> dict[str, object]:
    return {"records": [{**EVIDENCE.to_json(), **change}]}


WRONG = [
    ({"step": "seven"}, "^step: not what a recorder writes: 'seven'"),
    ({"step": 7.0}, "7.0"),
    ({"step": True}, "True"),
    ({"step": 1 << 60}, "1152921504606846976"),
    ({"ranks": 5}, "5"),
    ({"ranks": [[5]]}, r"\[5\]"),
    ({"hosts": [None]}, "None"),
    ({"sentence": {"a": 1}}, "'a': 1"),
    ({"scope": "galaxy"}, "^scope: 'galaxy'"),
    ({"action": ["continue"]}, "continue"),
    ({"kind": "poem"}, "poem"),
    ({"records": []}, "needs the records"),
    ({"records": [7]}, "7"),
    (with_record(bitmap=[1]), "longer"),
    (with_record(evidence=["0" * 17] * 4), "00000000000000000"),
    (with_record(progress=[]), r"^records: progress: .*\[\]"),
    (with_record(stall_seconds=math.inf), "inf"),
    (with_record(status="not_checked"), "needs either a verdict or a reason"),
    (with_record(peers=[1, 3]), "4 pieces of evidence for 2 peers"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_no_recorder_writes_is_refused(change: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        from_json({**INCIDENT.to_json(), **change})


@pytest.mark.parametrize("name", ["step", "scope", "ranks", "sentence", "records"])
def test_a_line_without_what_it_is_about_is_refused(name: str):
    line = INCIDENT.to_json()
    del line[name]
    with pytest.raises(ValueError, match=f"not a whole Incident: .*{name}"):
        from_json(line)


def test_a_headline_is_one_line():
    two = replace(INCIDENT, sentence="Two\nlines.")
    assert headline(two) == "incident (sdc) at step 7: Two lines."


def test_what_a_verdict_names_is_derived():
    assert (EVIDENCE.ranks, EVIDENCE.scope, EVIDENCE.status) == ((5,), Scope.RANK, "attributed")
    assert (NOT_CHECKED.ranks, NOT_CHECKED.scope, NOT_CHECKED.status) == ((), None, "not_checked")
    pair = EvidenceRecord(
        step=1, surface="s", manifestation=Manifestation.SDC, peers=(4, 5), verdict=exact([1, 2])
    )
    assert (pair.ranks, pair.scope, pair.status) == ((), Scope.PEER_GROUP, "inconclusive")


def test_an_incident_is_reported_by_a_healthy_peer():
    assert INCIDENT.reporter == 1


def test_a_record_needs_a_verdict_or_a_reason():
    with pytest.raises(ValueError, match="s: a record needs either"):
        EvidenceRecord(step=1, surface="s", manifestation=Manifestation.SDC, peers=(0,))
    with pytest.raises(ValueError, match="2 pieces of evidence for 3 peers"):
        EvidenceRecord(
            step=1, surface="s", manifestation=Manifestation.SDC, peers=(0, 1, 2), verdict=exact([1, 1])
        )


def test_records_and_incidents_are_written_to_the_run_directory(tmp_path: Path):
    writer = RunWriter(tmp_path, rank=3)
    for item in (EVIDENCE, NOT_CHECKED, INCIDENT, RESOLVED):
        writer.record(item)
    writer.close()
    assert [line.item for line in read(tmp_path / "records" / "rank-3.jsonl")] == [
        EVIDENCE,
        NOT_CHECKED,
    ]
    line, end = read(tmp_path / "incidents" / "rank-3.jsonl")
    assert isinstance(line, Stamped)
    assert (line.item, end.item) == (INCIDENT, RESOLVED)
    assert line.time > 1e9
    assert line.monotonic >= 0


@pytest.mark.parametrize("name", ["incidents/rank-0.jsonl", "records/rank-0.jsonl"])
def test_the_keys_other_tools_rely_on(tmp_path: Path, name: str):
    writer = RunWriter(tmp_path, rank=0)
    writer.record(EVIDENCE)
    writer.record(INCIDENT)
    writer.close()
    line = json.loads((tmp_path / name).read_text())
    assert line.keys() >= CONTRACT
    assert (line["schema"], line["manifestation"], line["scope"]) == (1, "sdc", "rank")
    assert (line["ranks"], line["peers"], line["bitmap"]) == ([5], [1, 3, 5, 7], [0, 0, 1, 0])


def test_truncated_and_foreign_lines_are_named_and_skipped(tmp_path: Path):
    path = tmp_path / "incidents" / "rank-0.jsonl"
    writer = RunWriter(tmp_path, rank=0)
    writer.record(INCIDENT)
    writer.close()
    whole = path.read_bytes()
    foreign = [
        b'{"schema": 99, "kind": "incident"}',
        b"[1, 2]",
        b'{"schema": 1, "kind": "poem"}',
        b"\xff\xfe",
        b"",
    ]
    lacking = json.dumps({**json.loads(whole), "scope": "galaxy"}).encode()
    path.write_bytes(whole + b"\n".join([*foreign, lacking]) + b"\n" + whole + whole[: len(whole) // 2])
    writer = RunWriter(tmp_path, rank=0)  # a new life of the job goes on after the cut
    writer.record(INCIDENT)
    writer.close()
    lines = list(read(path))
    assert sum(isinstance(line, Stamped) for line in lines) == 3
    problems = [line for line in lines if isinstance(line, Problem)]
    assert [problem.line for problem in problems] == [2, 3, 4, 5, 7, 9]
    assert all(word in str(problems[0]) for word in (f"{path}:2", "99", "1"))
    assert "poem" in problems[2].reason
    assert "galaxy" in problems[4].reason
