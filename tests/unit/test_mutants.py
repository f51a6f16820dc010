"""`make mutants` tells whether a fault in the product is noticed (tools/mutants.py)."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from tests.scenarios.rows import case_id

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import mutants  # noqa: E402
from mutants import ListError, Mutant, Run  # noqa: E402

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
    ("changes", "problem"),
    [
        ({"text": "3 * votes"}, "found 0 times in torchscout/rules.py"),
        ({"text": "votes"}, "found 2 times in torchscout/rules.py"),
        ({"becomes": "2 *"}, "is then no Python"),
    ],
)
def test_a_mutant_that_does_not_fit_the_code_is_an_error(root: Path, changes: dict[str, str], problem: str):
    (outcome,) = mutants.tried([mutant(**changes)], root)
    assert outcome.result == "error"
    assert problem in outcome.by


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        ("test_wrong", "test_wrong fails, although nothing is broken"),
        ("test_in_a_process_that_has_imported_the_original", "imported torchscout from elsewhere"),
    ],
)
def test_tests_that_prove_nothing_are_an_error(root: Path, test: str, problem: str):
    with pytest.raises(ListError, match=problem):
        [*mutants.tried([mutant(test=test)], root)]


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (Run(None, "FAILED tests/test_rules.py::test_wrong"), "time-out"),
        (Run(1, "E   NameError: name 'vote' is not defined"), "a name that does not exist"),
        (Run(2, "ERROR tests/test_rules.py"), "tests were not run"),
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
