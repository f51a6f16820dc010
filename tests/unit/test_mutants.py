"""`make mutants` tells whether a fault in the product is noticed (tools/mutants.py)."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios.rows import case_id

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import mutants  # noqa: E402
from mutants import ListError, Mutant, Outcome, Run  # noqa: E402

RULES = "def is_majority(votes, peers):\n    return 2 * votes > peers\n"
TESTS = """
import subprocess, sys
from torchscout.rules import is_majority

def test_half_of_four_is_no_majority():
    assert not is_majority(2, 4)

def test_none_is_no_majority():
    assert not is_majority(0, 4)

def test_wrong():
    assert is_majority(2, 4)

def test_in_a_process_that_has_imported_the_original():
    code = "sys.path[0] = sys.argv[1]; import torchscout; sys.path[0] = sys.argv[2]; import tests"
    subprocess.run([sys.executable, "-c", "import sys; " + code, {original!r}, sys.path[0]], check=True)
"""
ROW = """
[[mutant]]
name = "{0}"
file = "torchscout/rules.py"
text = "2 * votes > peers"
becomes = "2 * votes >= peers"
tests = ["tests/test_rules.py::{1}"]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small product with its tests."""
    files = {
        "torchscout/__init__.py": "",
        "torchscout/rules.py": RULES,
        "tests/__init__.py": (ROOT / "tests" / "__init__.py").read_text(),
        "tests/test_rules.py": TESTS.replace("{original!r}", repr(str(ROOT))),
        mutants.LIST: ROW.format("noticed", "test_half_of_four_is_no_majority")
        + ROW.format("missed", "test_none_is_no_majority"),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def mutant(text: str = "2 * votes > peers", becomes: str = "True", test: str = "") -> Mutant:
    return Mutant("a fault", "torchscout/rules.py", text, becomes, [f"tests/test_rules.py::{test}"])


def test_a_mutant_that_no_test_notices_has_survived(root: Path, capsys: pytest.CaptureFixture[str]):
    assert mutants.main(["--json"], root) == 0, "one may survive"
    noticed, missed = json.loads(capsys.readouterr().out)["mutants"]
    by = "tests/test_rules.py::test_half_of_four_is_no_majority"
    assert (noticed["name"], noticed["result"], noticed["by"]) == ("noticed", "killed", by)
    assert (missed["name"], missed["result"], missed["by"]) == ("missed", "SURVIVED", "")
    assert (root / "torchscout" / "rules.py").read_text() == RULES


@pytest.mark.parametrize(
    ("results", "is_good"),
    [
        (["killed", "killed"], True),
        (["killed", "SURVIVED"], True),
        (["SURVIVED", "SURVIVED"], False),
        (["killed", "error"], False),
    ],
)
def test_one_may_survive_and_none_may_be_in_error(results: list[str], is_good: bool):
    assert mutants.are_good([Outcome("a fault", result, "") for result in results]) == is_good


@pytest.mark.parametrize(("text", "count"), [("3 * votes", 0), ("votes", 2)])
def test_a_text_that_is_not_found_once_is_an_error(root: Path, text: str, count: int):
    (outcome,) = mutants.tried([mutant(text)], root)
    assert outcome.result == "error"
    assert f"found {count} times in torchscout/rules.py" in outcome.by


def test_a_mutant_that_is_no_python_is_an_error(root: Path):
    (outcome,) = mutants.tried([mutant(becomes="2 *")], root)
    assert outcome.result == "error"
    assert "is then no Python" in outcome.by


def test_a_test_that_fails_without_a_mutant_proves_nothing(root: Path):
    with pytest.raises(ListError, match="test_wrong fails, although nothing is broken"):
        [*mutants.tried([mutant(test="test_wrong")], root)]


def test_a_process_that_imported_the_original_is_found(root: Path):
    with pytest.raises(ListError, match="a process imported torchscout from elsewhere"):
        [*mutants.tried([mutant(test="test_in_a_process_that_has_imported_the_original")], root)]


def test_these_tests_assert_which_tree_they_test(tmp_path: Path):
    environment = {**os.environ, mutants.TREE: str(tmp_path)}
    command = [sys.executable, "-c", "import tests"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode
    assert mutants.FOREIGN in ended.stderr
    subprocess.run(command, cwd=ROOT, env={**environment, mutants.TREE: str(ROOT)}, check=True)


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (Run(None, "FAILED tests/test_rules.py::test_wrong"), "time-out"),
        (Run(1, "E   NameError: name 'vote' is not defined"), "a name that does not exist"),
        (Run(2, "ERROR tests/test_rules.py"), "tests were not run"),
        (Run(5, "1 deselected"), "tests were not run"),
    ],
)
def test_what_is_no_failure_of_a_test_is_an_error(run: Run, problem: str):
    assert problem in str(run.problem)


def test_the_list_follows_the_code():
    for each in mutants.read(ROOT / mutants.LIST):
        assert mutants.problem_of(each, ROOT) is None, each.name
        for test in each.tests:
            file, function, row = re.fullmatch(r"(.*\.py)(?:::(\w+))?(?:\[(.*)\])?", test).groups()
            tree = ast.parse((ROOT / file).read_text())
            names = {part.name for part in tree.body if isinstance(part, ast.FunctionDef)}
            assert function is None or function in names, test
            if row is not None and file.startswith("tests/scenarios"):
                constants = (part.value for part in ast.walk(tree) if isinstance(part, ast.Constant))
                assert row in {case_id(text) for text in constants if isinstance(text, str)}, test
