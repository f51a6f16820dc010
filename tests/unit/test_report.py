"""`scout report`: from the files of a run to one document and one page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.incidents import incident_from
from tests.support.run_dirs import read_roster
from torchscout.cli.main import app
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
    Resolved,
    Scope,
    Started,
    Trust,
)
from torchscout.report.document import documented
from torchscout.report.evidence import stacks_of, waits_of
from torchscout.report.live import LiveRun
from torchscout.report.page import embedded, page
from torchscout.report.screen import watch_screen
from torchscout.run.folder import End, RankEntry, Unwatched
from torchscout.run.writer import RunWriter
from torchscout.utils.text import spans

PEERS = (0, 1, 2, 3)


def numbers(step: int = 7, surface: str = "layer.1/output", layer: str | None = "layer.1") -> EvidenceRecord:
    return EvidenceRecord(
        step=step,
        surface=surface,
        manifestation=Manifestation.SDC,
        peers=PEERS,
        verdict=exact([5, 5, -1, 5]),
        layer=layer,
        mode="forward",
        shape=(4, 16),
    )


def times(step: int, slow: float = 300.0) -> EvidenceRecord:
    return EvidenceRecord(
        step=step,
        surface="time/module",
        manifestation=Manifestation.STRAGGLER,
        peers=PEERS,
        verdict=statistical([10.0, 11.0, slow, 10.5]),
        layer="layer.1",
    )


def stuck(surface: str, peers: tuple[int, ...], counts: list[int], stack: str = "") -> EvidenceRecord:
    return EvidenceRecord(
        step=9,
        surface=surface,
        manifestation=Manifestation.HANG,
        peers=peers,
        verdict=exact(counts),
        progress={"rank": peers[0], "stack": stack, "phase": "forward"},
        fingerprints=("all_reduce float32[4]",),
        stall_seconds=6.5,
    )


def write_run(run_dir: Path, host: str = "node") -> None:
    """A run with wrong numbers on rank 2, which was recovered, and a late rank 1."""
    for rank in PEERS:
        entry = RankEntry(
            rank,
            f"{host}-{rank // 2}",
            100 + rank,
            f"record-{rank}",
            4,
            1,
            (rank, 0, 0, 0, 0, 0),
            device=f"cuda:{rank % 2}",
        )
        entry.write(run_dir)
        End(rank, "finished", 12, entry.record).write(run_dir)
        recorder = RunWriter(run_dir, rank)
        recorder.record(numbers())
        recorder.record(times(8))
        agreed = Agreement(
            surface="layer.0/output", manifestation=Manifestation.SDC, layer="layer.0", mode="forward",
            count=3, first=1, last=6,
        )  # fmt: skip
        recorder.record(Agreements(peers=PEERS, surfaces=(agreed,)))
        recorder.record(
            EvidenceRecord(
                step=8,
                surface="layer.0.norm/weight.grad",
                manifestation=Manifestation.SDC,
                peers=PEERS,
                reason="the kernel is not deterministic",
            )
        )
        recorder.close()
    recorder = RunWriter(run_dir, 0)
    recorder.record(Started(step=0, sentence="torchscout was attached to 4 ranks on 2 machines."))
    recorder.record(Trust(step=6, latest=5, candidate=None, verified=5, poisoned=None))
    corrupt = incident_from(numbers(), (2,), action=Action.REPLACE, sentence="Rank 2 disagrees.")
    recorder.record(corrupt)
    recorder.record(
        Decision(
            step=7,
            action=Action.REPLACE,
            failure=Failure.SDC,
            ranks=(2,),
            hosts=("node-1",),
            sentence="Replace machine node-1.",
            incident=corrupt.id,
        )
    )
    recorder.record(Trust(step=7, latest=None, candidate=None, verified=5, poisoned=7))
    recorder.record(
        Resolved(
            incident=corrupt.id,
            step=7,
            ranks=(2,),
            sentence=corrupt.sentence,
            stalled_seconds=0.0,
            recovered=5,
        )
    )
    recorder.record(Started(step=5, sentence="All ranks load step 5."))
    late = stuck("issued/world", (1, 0, 2, 3), [6, 7, 7, 7], "File a.py, line 1")
    recorder.record(incident_from(late, (1,), sentence="Rank 1 is late."))
    recorder.close()


def test_the_document_has_incidents_with_place_decision_and_evidence(tmp_path: Path):
    write_run(tmp_path)
    document = documented(tmp_path)
    corrupt, late = document["incidents"]
    assert (corrupt["state"], corrupt["recovered"], corrupt["ranks"]) == ("recovered", 5, [[2, 2]])
    assert corrupt["where"] == ["rank 2: host node-1, device cuda:0 (replica 2)"]
    assert (corrupt["todo"], corrupt["is_decided"], corrupt["is_carried_out"]) == (
        "Replace machine node-1.",
        True,
        False,
    )
    (record,) = corrupt["records"]
    assert [(vote["value"], vote["ranks"], vote["named"]) for vote in record["votes"]] == [
        ("ffffffffffffffff", [[2, 2]], True),
        ("0000000000000005", [[0, 1], [3, 3]], False),
    ]
    assert (late["state"], late["todo"], late["is_decided"]) == ("open", "Restart the job in place.", False)
    assert late["waits"] == [
        {"group": "world", "number": 7, "inside": [[0, 0], [2, 3]], "missing": [[1, 1]], "cycle": False}
    ]
    assert late["waiting"] == [[0, 0], [2, 3]]
    assert late["stacks"] == [{"text": "File a.py, line 1", "ranks": [[1, 1]], "named": True}]
    assert document["sentence"].startswith("2 incidents, 1 open. 4 ranks on 2 machines: 4 finished")


CRASH = Incident(
    manifestation=Manifestation.CRASH,
    scope=Scope.RANK,
    step=40,
    ranks=(2,),
    hosts=("node-7",),
    records=(replace(stuck("process", PEERS, [0, 0, 1, 0]), manifestation=Manifestation.CRASH),),
    action=Action.PREFLIGHT,
    sentence="Rank 2 on node-7 was killed by SIGKILL between steps 40 and 41; ranks 1 and 3 failed because "
    "of it.",
)


def test_a_crash_is_shown_with_its_sentence_and_what_to_do(tmp_path: Path):
    RunWriter(tmp_path, 0).record(CRASH)
    document = documented(tmp_path)
    (shown,) = document["incidents"]
    assert (shown["manifestation"], shown["sentence"], shown["ranks"]) == ("crash", CRASH.sentence, [[2, 2]])
    assert shown["todo"] == "Check the machines before they train again."
    assert [vote["value"] for vote in shown["records"][0]["votes"]] == ["ended", "alive"]
    assert shown["waits"] == []


@pytest.mark.parametrize("kind", Manifestation)
@pytest.mark.parametrize("action", Action)
def test_every_kind_and_every_action_has_words(tmp_path: Path, kind: Manifestation, action: Action):
    RunWriter(tmp_path, 0).record(replace(CRASH, manifestation=kind, action=action))
    document = documented(tmp_path)
    assert document["incidents"][0]["todo"].endswith(".")
    assert kind.in_words in watch_screen(LiveRun(tmp_path).document())
    script = page(document).rpartition("<script>")[2]
    for table in (f'{kind.value}: "{kind.in_words}"', f"{kind.value}: {{ letter: "):
        assert table in script


def test_the_document_has_ranks_timeline_trust_times_and_coverage(tmp_path: Path):
    write_run(tmp_path)
    document = documented(tmp_path)
    ranks = document["ranks"]
    assert (ranks["size"], ranks["hosts"], ranks["host"]) == (4, ["node-0", "node-1"], [0, 0, 1, 1])
    assert ranks["axes"] == {"replica": [0, 1, 2, 3]}
    kinds = [(event["kind"], event["incident"]) for event in document["timeline"]]
    expected = [
        ("start", None),
        ("incident", 1),
        ("decision", 1),
        ("end", 1),
        ("start", None),
        ("incident", 2),
    ]
    assert kinds == expected
    assert [point[1:] for point in document["trust"]] == [[6, 5, None, 5, None], [7, None, None, 5, 7]]
    (strip,) = document["strips"]
    assert (strip["slow"], [each["step"] for each in strip["rounds"]]) == ([[2, 2]], [8])
    (drawn,) = strip["rounds"]
    assert drawn["median"] == 10.75
    assert 11 < drawn["limit"] < 300
    assert [dot for dot in drawn["dots"] if dot[2]] == [[2, 300.0, 1]]
    # Four ranks wrote the same comparisons, which were made once.
    counts = {
        (row["name"], row["manifestation"]): (row["count"], row["findings"]) for row in document["coverage"]
    }
    assert counts == {
        ("layer.0", "sdc"): (3, 0),
        ("layer.1", "sdc"): (1, 1),
        ("layer.1", "straggler"): (1, 1),
    }
    (missing,) = document["not_checked"]
    assert (missing["reason"], missing["ranks"]) == ("the kernel is not deterministic", [[0, 3]])
    assert document["problems"] == []


def test_ranks_that_lost_their_observer_are_named(tmp_path: Path):
    write_run(tmp_path)
    assert documented(tmp_path)["ranks"]["observed"] == 4
    assert "watched" not in documented(tmp_path)["sentence"]
    Unwatched(2, read_roster(tmp_path)[2].record).write(tmp_path)
    assert documented(tmp_path)["ranks"]["observed"] == 3
    assert "Not watched for hangs to the end: rank 2." in documented(tmp_path)["sentence"]


def test_damaged_files_are_noted_and_the_rest_is_shown(tmp_path: Path):
    write_run(tmp_path)
    whole = documented(tmp_path)
    incidents = tmp_path / "incidents" / "rank-0.jsonl"
    lines = incidents.read_bytes().splitlines(keepends=True)
    incidents.write_bytes(b"".join(lines[:-1]) + b'{"schema": 1, "kind": \xff\n[]\n' + lines[-1][:-40])
    (tmp_path / "ranks" / "rank-3.json").write_text("{")
    (tmp_path / "records" / "rank-0.jsonl").write_bytes(b"\0" * 100)
    document = documented(tmp_path)
    assert document["incidents"] == whole["incidents"][:1]
    assert [point[1] for point in document["trust"]] == [6, 7]
    assert document["ranks"]["host"] == [0, 0, 1, None]
    assert document["coverage"] == whole["coverage"], "other ranks have the same comparisons"
    assert len(document["problems"]) == 5
    assert any("rank-3.json" in each for each in document["problems"])
    page(document)


CHANGES: list[dict[str, object]] = [
    {"step": "seven"},
    {"ranks": [1 << 40]},
    {"ranks": [[0]]},
    {"sentence": {"a": 1}},
    {"hosts": [None]},
    {"time": 1e999},
]


def test_a_line_that_no_recorder_writes_is_left_out(tmp_path: Path):
    write_run(tmp_path)
    incidents = tmp_path / "incidents" / "rank-0.jsonl"
    first, *others = [json.loads(line) for line in incidents.read_text().splitlines()]
    for change in CHANGES:
        incidents.write_text("\n".join(json.dumps(each) for each in ({**first, **change}, *others)) + "\n")
        document = documented(tmp_path)
        assert [each["sentence"] for each in document["incidents"]] == ["Rank 1 is late."], change
        assert len(document["problems"]) == 1
        page(document)


def test_waits_of_a_deadlock_and_of_a_stall():
    cycle = stuck("deadlock", (0, 1), [0, 1])
    assert [(each["cycle"], each["inside"]) for each in waits_of(incident_from(cycle, (0, 1)))] == [
        (True, [[0, 0]]),
        (True, [[1, 1]]),
    ]
    stalled = stuck("issued/world", (0, 1), [4, 4])
    (wait,) = waits_of(incident_from(stalled, ()))
    assert (wait["inside"], wait["missing"]) == ([[0, 1]], [])
    assert waits_of(incident_from(stuck("coordinate", (0, 1), [4, 5]), (1,))) == []


def test_equal_stacks_are_shown_once():
    records = [stuck("coordinate", (rank,), [1], "Thread\n f") for rank in (4, 5, 6)]
    records.append(stuck("coordinate", (7,), [1], "Thread\n g"))
    incident = incident_from(records[0], (7,))
    object.__setattr__(incident, "records", tuple(records))
    assert [(each["ranks"], each["named"]) for each in stacks_of(incident)] == [
        ([[7, 7]], True),
        ([[4, 6]], False),
    ]


def test_a_named_rank_is_shown_apart_from_others_with_the_same_stack():
    records = [stuck("coordinate", (rank,), [1], "Thread\n f") for rank in (4, 5, 6)]
    incident = replace(incident_from(records[0], (5,)), records=tuple(records))
    assert stacks_of(incident) == [
        {"text": "Thread\n f", "ranks": [[5, 5]], "named": True},
        {"text": "Thread\n f", "ranks": [[4, 4], [6, 6]], "named": False},
    ]


def test_ranks_are_spans():
    assert spans([]) == []
    assert spans([3, 1, 2, 9]) == [[1, 3], [9, 9]]


HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>"
HOSTILE += "\"' \x1b[31m \ud800 &lt; {{data}}"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))


def test_texts_of_records_cannot_become_markup(tmp_path: Path):
    write_run(tmp_path, host=HOSTILE)
    text = page(documented(tmp_path))
    parser = Tags()
    parser.feed(text)
    scripts = [attributes for tag, attributes in parser.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    names = {tag for tag, _ in parser.tags}
    assert names.isdisjoint({"img", "iframe", "link", "object", "base", "form"})
    assert all("src" not in attributes for _, attributes in parser.tags)
    data = text.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data)["ranks"]["hosts"][0] == f"{HOSTILE}-0"
    assert text.isascii()


def test_the_policy_admits_the_script_and_style_of_the_page_only(tmp_path: Path):
    write_run(tmp_path)
    text = page(documented(tmp_path))
    script, style = (
        text.rpartition("<script>")[2].partition("</script>")[0],
        text.partition("<style>")[2].partition("</style>")[0],
    )
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert "default-src &#x27;none&#x27;" in policy
    for part in (script, style):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"sha256-{digest}" in policy
    assert "unsafe" not in policy
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert sink not in script


def test_embedded_json_has_no_markup():
    assert "<" not in embedded({"a": "</script><!--"})
    with pytest.raises(ValueError, match="JSON"):
        embedded({"a": float("nan")})


def test_the_command_writes_the_page_or_prints_the_document(tmp_path: Path):
    run_dir, target = tmp_path / "run", tmp_path / "page.html"
    write_run(run_dir)
    shown = CliRunner().invoke(app, ["report", str(run_dir), "-o", str(target)])
    assert shown.exit_code == 0, shown.output
    assert str(target) in shown.output
    assert "Rank 2 disagrees." in target.read_text()
    printed = CliRunner().invoke(app, ["report", str(run_dir), "--json"])
    assert json.loads(printed.stdout)["incidents"][0]["sentence"] == "Rank 2 disagrees."
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".html"] == ["page.html"]
    document = tmp_path / "document.json"
    printed = CliRunner().invoke(app, ["report", str(run_dir), "--json", "-o", str(document)])
    assert document.read_text() == printed.stdout
    refused = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert refused.exit_code == 2
    assert "is not a run directory" in refused.output
