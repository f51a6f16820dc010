"""What is kept of a campaign, and the figures of its table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from torchscout.campaign.ablation.variants import PIECES, ablations, screen_of
from torchscout.campaign.cells.cell import ROWS, Cell
from torchscout.campaign.cells.paper_cells import paper_cells
from torchscout.campaign.grading import Flaw, Grade
from torchscout.campaign.page import page
from torchscout.campaign.results import Found, Result, Store, as_report, interval, percentile, summarized
from torchscout.campaign.tables import screen_of as screen_of_rows

CELLS = paper_cells(0)


def result(cell: Cell, flaw: Flaw | None = None, seconds: float | None = 1.0) -> Result:
    found = (Found("sdc", "rank", (9,), "head/output", 2, "Rank 9 <differs>."),)
    grade = Grade(flaw, "" if flaw is None else "wrong ranks: <rank 9>")
    return Result(cell.identity, cell.row, not cell.truths, grade, seconds, 2.0, found)


def test_wilsons_interval():
    low, high = interval(344, 344)
    assert (round(low, 4), high) == (0.989, 1.0)
    assert [round(each, 4) for each in interval(3, 3)] == [0.4385, 1.0]
    assert [round(each, 4) for each in interval(5, 10)] == [0.2366, 0.7634]
    assert [round(each, 4) for each in interval(0, 10)] == [0.0, 0.2775]
    assert interval(0, 0) == (0.0, 1.0)


def test_percentiles_by_nearest_rank():
    values = [float(number) for number in range(1, 21)]
    assert (percentile(values, 0.5), percentile(values, 0.95)) == (10.0, 19.0)
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([], 0.5) is None


def test_results_are_written_one_by_one_and_read_back(tmp_path: Path):
    store = Store(tmp_path, "paper", 0)
    first, second = result(CELLS[0]), result(CELLS[1], Flaw.WRONG_NAME, None)
    store.add(first)
    store.add(second)
    store.add(replace(second, grade=Grade()))
    again = Store(tmp_path, "paper", 0)
    assert again.results == {first.cell: first, second.cell: replace(second, grade=Grade())}


def test_a_truncated_line_is_dropped_and_its_cell_run_again(tmp_path: Path):
    store = Store(tmp_path, "paper", 0)
    store.add(result(CELLS[0]))
    whole = store.path.read_text()
    store.path.write_text(whole + json.dumps(result(CELLS[1]).to_json())[:50])
    again = Store(tmp_path, "paper", 0)
    assert list(again.results) == [CELLS[0].identity]
    again.add(result(CELLS[2]))
    assert len(Store(tmp_path, "paper", 0).results) == 2


@pytest.mark.parametrize(("campaign", "seed"), [("paper", 1), ("ablation", 0)])
def test_another_campaigns_folder_is_refused(tmp_path: Path, campaign: str, seed: int):
    Store(tmp_path, "paper", 0)
    with pytest.raises(ValueError, match="belongs to another campaign"):
        Store(tmp_path, campaign, seed)


def test_a_folder_with_something_else_is_refused(tmp_path: Path):
    (tmp_path / "results.jsonl").write_text('{"schema": 1, "campaign": "paper", "seed": 0}\n{"loss": 1.5}\n')
    with pytest.raises(ValueError, match=r"results\.jsonl:2 is not a campaign's result"):
        Store(tmp_path, "paper", 0)


def test_the_table_counts_what_passed_and_what_was_missed():
    cells = [cell for cell in CELLS if cell.row in {"numerical-sdc", "numerical-clean"}][:12]
    flaws = [None, Flaw.MISSED, Flaw.WRONG_NAME, Flaw.FALSE_ALARM, Flaw.NOT_INJECTED, *[None] * 5]
    results = {cell.identity: result(cell, flaw) for cell, flaw in zip(cells, flaws, strict=False)}
    summaries = {each["row"]: each for each in summarized(ROWS, cells, results)}
    assert set(summaries) == {cell.row for cell in cells}
    row = summaries["numerical-sdc"]
    counted = sum(cell.row == "numerical-sdc" for cell in cells[:10])
    assert (row["run"], row["passed"]) == (counted, counted - 4)
    assert (row["missed"], row["wrong_names"], row["false_alarms"]) == (1, 1, 1)

    report = as_report("paper", 0, list(summaries.values()), list(results.values()))
    assert (report["passed"], report["complete"], len(report["failed"])) == (False, False, 4)
    screen = screen_of_rows(list(summaries.values()), results.values(), "folder")
    assert f"{row['passed']}/{row['run']} (of {row['cells']})" in screen
    assert screen.count("FAILED") == 4
    html = page(report)
    assert "&lt;rank 9&gt;" in html
    assert "<rank 9>" not in html
    assert "://" not in html, "it needs nothing from elsewhere"


def test_a_campaign_is_complete_when_every_cell_has_passed():
    results = [result(cell) for cell in CELLS]
    summaries = summarized(ROWS, CELLS, {each.cell: each for each in results})
    report = as_report("paper", 0, summaries, results)
    assert report["passed"]
    assert report["complete"]


def test_the_table_of_ablations_sets_with_against_without():
    expected = [
        {"everything": "right", "majority": "wrong", "wait_graph": "right"},
        {"everything": "right", "majority": "missed", "wait_graph": "false_alarm"},
        {"everything": "missed", "majority": "right"},
    ]
    results = [replace(result(cell), ablated=each) for cell, each in zip(CELLS, expected, strict=False)]
    rows = {row["piece"]: row for row in ablations(results)}
    assert set(rows) == {"majority", "wait_graph"}
    majority = rows["majority"]
    assert [majority[key] for key in ("cells", "right_with", "right", "wrong", "missed", "false_alarm")] == [
        3, 2, 1, 1, 1, 0,
    ]  # fmt: skip
    report = {**as_report("ablation", 0, [], results), "ablations": list(rows.values())}
    assert next(piece.instead for piece in PIECES) in " ".join(screen_of(report, "folder").split())
    assert "Majority" in page(report)
