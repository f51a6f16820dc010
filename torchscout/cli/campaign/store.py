"""Keeps each result as soon as there is one, so that an interrupted campaign goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchscout.cli.campaign.cell import Cell, Row
from torchscout.cli.campaign.layout import Hardware
from torchscout.cli.campaign.result import Result
from torchscout.cli.campaign.summary import RowSummary, summarized

__all__ = ["Store"]

_SCHEMA = 1
_DEFAULT = Hardware()


class Store:
    """``results.jsonl`` in a campaign's folder: a line about the campaign, then one for each cell.

    A cell that was run again has several; the last one counts.
    """

    def __init__(self, folder: Path, campaign: str, seed: int, hardware: Hardware = _DEFAULT) -> None:
        """A ``ValueError`` where the folder holds another campaign, or what cannot be read."""
        self.folder = folder
        self.path = folder / "results.jsonl"
        self.results: dict[str, Result] = {}
        """By the cell's identity."""
        head = {"schema": _SCHEMA, "campaign": campaign, "seed": seed}
        if hardware.device != "cpu":  # else as it always was
            head |= {"device": hardware.device, "backend": hardware.backend}
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size:
            self._read(head)
        else:
            self._write(head)

    def add(self, result: Result) -> None:
        self.results[result.cell] = result
        self._write(result.to_json())

    def summaries(self, rows: Sequence[Row], cells: Sequence[Cell]) -> tuple[list[RowSummary], list[Result]]:
        """The table of these cells as far as they are done, and their results."""
        done = [self.results[cell.identity] for cell in cells if cell.identity in self.results]
        return summarized(rows, cells, self.results), done

    def _read(self, head: dict[str, Any]) -> None:
        whole = self.path.read_bytes()
        *lines, rest = whole.split(b"\n")
        if rest:  # cut short in the middle of a line, whose cell is run again
            os.truncate(self.path, len(whole) - len(rest))
        for number, line in enumerate(lines, start=1):
            try:
                document = json.loads(line)
                if number > 1:
                    self.results[document["cell"]] = Result.from_json(document)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{self.path}:{number} is not a campaign's: {error!r}") from error
            if number == 1 and document != head:
                raise ValueError(
                    f"{self.path} belongs to another campaign, {document}; this one is {head}. "
                    "Choose another folder, or the same campaign, seed, device and backend"
                )

    def _write(self, document: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(document) + "\n")
