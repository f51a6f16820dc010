"""Breaks the product on purpose, and runs the tests that must notice: `make mutants`.

A test that cannot fail proves nothing. `tests/mutants.toml` lists faults that a person might write: a file, a
piece of its text, what replaces it, and the tests of which at least one must then fail. A mutant that no test
notices has survived: there is a decision that nobody holds. One may survive; the exit status is 1 if more do,
or if anything is in error. A time-out is an error too, since a hang shows no assertion.

A mutant is a copy of the tree in a folder of its own, with its own bytecode beside the sources: two versions
of a file may have the same size and be written in the same second, which is all that Python compares.
`tests/__init__.py` asserts that processes import the copy.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
LIST = "tests/mutants.toml"
COPIED = ("torchscout", "evaluation", "tests", "examples", "pyproject.toml")
TREE = "SCOUT_TREE"
"""The environment variable that names the copy to ``tests/__init__.py``."""
FOREIGN = "is not from the tree under test"
"""Part of the message of the assertion there."""
SECONDS = 60.0
MAY_SURVIVE = 1
_AT_ONCE = 2
_PYTEST = ("-x", "-q", "-rfE", "--no-header", "--tb=short", "-p", "no:cacheprovider")
_NOT_INHERITED = ("PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", re.MULTILINE)
_SOME_FAILED = 1  # of pytest's exit statuses; others than 0 and 1 say that tests were not run


class ListError(Exception):
    """The list does not fit the code."""


@dataclass(frozen=True)
class Mutant:
    """One fault of the list."""

    name: str
    file: str
    text: str
    becomes: str
    tests: list[str]


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant."""

    name: str
    result: str
    """``killed``, ``SURVIVED`` or ``error``."""
    by: str
    """The test that failed, or what is wrong."""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.result:<8}  {self.seconds:5.1f} s  {self.name}" + (f": {self.by}" if self.by else "")


@dataclass(frozen=True)
class Run:
    """One run of pytest."""

    status: int | None
    """None after a time-out."""
    output: str

    @property
    def failed(self) -> list[str]:
        return _FAILED.findall(self.output)

    @property
    def problem(self) -> str | None:
        """Why a failure would prove nothing."""
        if self.status is None:
            return "time-out"
        if FOREIGN in self.output:
            return "a process imported torchscout from elsewhere"
        if "NameError: name" in self.output:
            return "its text uses a name that does not exist"
        if "[XPASS(strict)]" in self.output:
            return "it makes a row right that is wrong today, which proves nothing: name other rows"
        if self.status not in (0, _SOME_FAILED):
            return f"tests were not run: {' '.join(self.failed or self.output.split())[-300:]}"
        return None


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="NAME", help="those with this in their name")
    parser.add_argument("--list", action="store_true", help="print the names and run nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    try:
        wanted = [each for each in read(root / LIST) if options.only in each.name]
        if not wanted:
            raise ListError(f"no mutant has {options.only!r} in its name")
        if options.list:
            print(*(each.name for each in wanted), sep="\n")
            return 0
        outcomes = []
        for each in tried(wanted, root):
            outcomes.append(each)
            if not options.json:
                print(each, flush=True)
    except ListError as error:
        print(error, file=sys.stderr)
        return 2
    counts = Counter(each.result for each in outcomes)
    is_good = are_good(outcomes)
    if options.json:
        print(json.dumps({"ok": is_good, "mutants": [asdict(each) for each in outcomes]}, indent=2))
    else:
        print(f"{counts['killed']} killed, {counts['SURVIVED']} survived, {counts['error']} in error")
    return 0 if is_good else 1


def are_good(outcomes: Sequence[Outcome]) -> bool:
    results = [each.result for each in outcomes]
    return results.count("SURVIVED") <= MAY_SURVIVE and "error" not in results


def read(path: Path) -> list[Mutant]:
    """The mutants of a list; raises ``ListError`` for a row that is none."""
    rows = tomllib.loads(path.read_text())["mutant"]
    keys = {field.name for field in fields(Mutant)}
    for row in rows:
        if set(row) != keys or not row["tests"]:
            raise ListError(f"a mutant has {', '.join(sorted(keys))}, got {row}")
    if double := [name for name, count in Counter(row["name"] for row in rows).items() if count > 1]:
        raise ListError(f"two mutants have the name {double[0]!r}")
    return [Mutant(**row) for row in rows]


def tried(mutants: Sequence[Mutant], root: Path) -> Iterator[Outcome]:
    """Run the tests of each mutant; raises ``ListError`` if they fail on the unchanged tree."""
    with tempfile.TemporaryDirectory(prefix="scout-mutants-") as name:
        # All mutants are made of this copy: the tree may change meanwhile.
        original = _copied(root, Path(name, "original"))
        problems = {each.name: problem_of(each, original) for each in mutants}
        yield from (Outcome(name, "error", problem) for name, problem in problems.items() if problem)
        mutants = [each for each in mutants if not problems[each.name]]
        if not mutants:
            return
        run = _run(original, [*dict.fromkeys(test for each in mutants for test in each.tests)], None)
        if run.problem or run.failed:
            what = run.problem or f"{run.failed[0]} fails"
            raise ListError(f"{what}, although nothing is broken\n{run.output}")
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            yield from pool.map(partial(_tried, original), mutants)


def _tried(original: Path, mutant: Mutant) -> Outcome:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=original.parent) as name:
        tree = _copied(original, Path(name, "tree"))
        (tree / mutant.file).write_text(mutated(mutant, tree))
        run = _run(tree, mutant.tests, SECONDS)
    seconds = round(time.monotonic() - began, 1)
    if run.problem:
        return Outcome(mutant.name, "error", run.problem, seconds)
    if not run.failed:
        return Outcome(mutant.name, "SURVIVED", "", seconds)
    return Outcome(mutant.name, "killed", run.failed[0], seconds)


def problem_of(mutant: Mutant, root: Path) -> str | None:
    """How the mutant does not fit the code; None if it does."""
    path = root / mutant.file
    count = path.read_text().count(mutant.text) if path.is_file() else 0
    if count != 1:
        return f"its text is found {count} times in {mutant.file}, and must be found once"
    try:
        compile(mutated(mutant, root), mutant.file, "exec")
    except SyntaxError as error:
        return f"{mutant.file} is then no Python: {error}"
    return None


def mutated(mutant: Mutant, root: Path) -> str:
    """The text of the mutant's file."""
    return (root / mutant.file).read_text().replace(mutant.text, mutant.becomes)


def _copied(root: Path, tree: Path) -> Path:
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (root / name).exists():
            shutil.copy(root / name, tree / name)
    return tree


def _run(tree: Path, tests: Sequence[str], seconds: float | None) -> Run:
    ours = {"PYTHONPATH": str(tree), TREE: str(tree), "COLUMNS": "200", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED} | ours
    settings: dict[str, Any] = {"cwd": tree, "env": environment, "start_new_session": True}
    with tempfile.TemporaryFile() as output:  # no pipe, which a process that is left behind would keep open
        command = [sys.executable, "-m", "pytest", *_PYTEST, *tests]
        process = subprocess.Popen(command, stdout=output, stderr=output, **settings)
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return Run(status, output.read().decode(errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
