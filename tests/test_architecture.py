"""The layout is a promise; these tests keep it. They read the syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "torchscout"
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 700, 60, 8
MAX_KERNEL_PARAMETERS = 18  # a Triton kernel has no objects to pass: operands, sizes and constants one by one

# Each floor with the floors it may import from, besides itself. config, errors, log, mesh and utils are the
# ground.
FLOORS = {
    "ground": set(),
    "decision": {"ground"},
    "c3": {"ground", "decision"},
    "run": {"ground", "decision"},
    "state": {"ground", "decision", "c3"},
    "collectives": {"ground"},
    "experts": {"ground"},
    "communicators": {"ground", "decision", "c3", "run", "collectives"},
    "observer": {"ground", "decision", "c3", "run", "collectives", "communicators"},
    "replay": {"ground", "decision", "c3", "run", "state", "collectives", "communicators", "experts"},
    "checkpoint": {"ground", "decision", "c3", "state", "communicators"},
    "adapters": {"ground", "decision", "c3", "state", "collectives", "experts", "replay", "checkpoint"},
}
FLOORS["session"] = set(FLOORS)
FLOORS["metrics"] = {"ground", "decision", "run", "session"}
FLOORS["attach"] = set(FLOORS)
FLOORS["launch"] = set(FLOORS)
FLOORS["report"] = {"ground", "decision", "run", "observer"}
FLOORS["preflight"] = set(FLOORS) - {"launch"}
FLOORS["plugins"] = {"ground", "decision", "run", "checkpoint", "adapters", "session", "attach"}
# Deliberate faults, real ranks for tests, the campaign: production imports none of them.
FLOORS["faults"] = {"ground", "decision", "c3", "collectives", "experts", "replay", "checkpoint", "adapters"}
FLOORS["testing"] = {"ground", "experts", "observer"}
FLOORS["campaign"] = set(FLOORS)
FLOORS["cli"] = set(FLOORS)
BESIDES = ("faults/", "testing/", "campaign/", "cli/")

# Where a broad except is the boundary itself: whatever ends a rank's body is that rank's answer,
# what a listener raises in the middle of a collective must not reach training, neither may what the
# session suffers, and a user's callback or function may raise anything.
BROAD_EXCEPT = {
    "cli/discover/plan.py": 1,
    "testing/local_ranks.py": 2,
    "collectives/interceptor.py": 1,
    "replay/capture/hooks.py": 1,
    "launch/startup/sitecustomize.py": 1,
    "replay/guard.py": 1,
    "session/boundary.py": 1,
    "session/incidents.py": 1,
}

MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
LIBRARY = [module for module in MODULES if module not in ("__init__.py", "__main__.py")]
# The one re-exports lazily, the other is the command.


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text())


def imports_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor_of(dotted: str) -> str:
    """The floor of a module given as ``torchscout.floor.module.name``."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else "ground"


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_imports_point_one_way():
    wrong = []
    for module in LIBRARY:
        here = floor_of("torchscout." + module.replace("/", "."))
        ours = (name for name in imports_of(tree_of(module)) if name.split(".")[0] == "torchscout")
        wrong += [f"{module} imports {name}" for name in ours if floor_of(name) not in {here, *FLOORS[here]}]
    assert wrong == []


def imported_at_once(module: str) -> set[str]:
    """The modules of ours that are imported when this one is."""
    found = set()
    for node in tree_of(module).body:
        for name in imports_of(node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
            paths = (
                name.removeprefix("torchscout.").replace(".", "/"),
                name.rpartition(".")[0].removeprefix("torchscout.").replace(".", "/"),
            )
            found |= {f"{path}.py" for path in paths if f"{path}.py" in LIBRARY}
    return found


def test_imports_run_in_no_circle():
    left = {module: imported_at_once(module) for module in LIBRARY}
    while free := [module for module, needed in left.items() if not needed & set(left)]:
        for module in free:
            del left[module]
    assert left == {}


def private_torch_names(tree: ast.AST) -> Iterator[str]:
    """Yield every private module or name of PyTorch that this code imports or reads from a module."""
    reads = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    for name in (*imports_of(tree), *reads):
        root, *parts = name.split(".")
        if root in {"torch", "dist"} and any(part.startswith("_") and part[1:2] != "_" for part in parts):
            yield name


def test_private_names_of_pytorch_are_in_one_module():
    found = {m: names for m in MODULES if (names := [*private_torch_names(tree_of(m))])}
    assert found.keys() == {"utils/_torch.py"}


def test_files_and_functions_stay_small():
    wrong = []
    for module in MODULES:
        lines = (PACKAGE / module).read_text().count("\n")
        wrong += [f"{module} has {lines} lines"] if lines > MAX_FILE_LINES else []
        for function in functions_of(tree_of(module)):
            wrong += [f"{module}: {each}" for each in too_large(function)]
    assert wrong == []


def too_large(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    first = function.body[0] if is_kernel(function) else function  # its parameters apart
    length = (function.end_lineno or first.lineno) - first.lineno + 1
    if length > MAX_FUNCTION_LINES:
        yield f"{function.name} has {length} lines"
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    taken = [argument.arg for argument in arguments if argument.arg not in {"self", "cls"}]
    most = MAX_KERNEL_PARAMETERS if is_kernel(function) else MAX_PARAMETERS
    most += function.name == "enable_resiliency"  # a keyword for each subsystem
    if len(taken) > most:
        yield f"{function.name} takes {len(taken)} parameters"


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def test_no_broad_except_outside_the_boundary():
    found = {module: sum(map(is_broad, handlers_of(tree_of(module)))) for module in MODULES}
    assert {module: count for module, count in found.items() if count} == BROAD_EXCEPT


def handlers_of(tree: ast.AST) -> list[ast.ExceptHandler]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]


def is_broad(handler: ast.ExceptHandler) -> bool:
    caught = ast.walk(handler.type) if handler.type else ()
    names = {node.id for node in caught if isinstance(node, ast.Name)}
    return handler.type is None or bool(names & {"Exception", "BaseException"})


def test_tables_of_scenarios_know_nothing_of_the_code():
    """Their adapters do, so that a rebuild rewrites no row."""
    tables = Path(__file__).parent / "scenarios"
    found = {
        path.name: ours
        for path in tables.glob("*.py")
        if (ours := [n for n in imports_of(ast.parse(path.read_text())) if n.startswith("torchscout")])
    }
    assert found == {}
    assert [*tables.glob("test_*.py")] != []


def test_only_time_stamps_and_names_read_the_wall_clock():
    """A wall clock that jumps must change no decision: everything else is monotonic.

    The doctor compares the wall clocks of machines, which is to look at them. The age of a
    heartbeat is only shown.
    """
    readers = {module for module in LIBRARY if "time.time()" in (PACKAGE / module).read_text()}
    assert readers == {"run/writer.py", "run/folder.py", "cli/doctor/network.py"}


CONSTRUCTORS = {"arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "normal", "ones"}
CONSTRUCTORS |= {"rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"}


def without_device(tree: ast.AST) -> Iterator[int]:
    """The lines of tensors that are made wherever ``torch.set_default_device`` says."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("torch.") in CONSTRUCTORS:
            is_torchs = ast.unparse(node.func).startswith("torch.")
            if is_torchs and not any(each.arg == "device" for each in node.keywords):
                yield node.lineno


def test_the_library_says_where_it_makes_tensors():
    library = [module for module in LIBRARY if not module.startswith(BESIDES)]
    found = {module: lines for module in library if (lines := [*without_device(tree_of(module))])}
    assert found == {}


def imports_of_package(modules: list[str], *packages: str) -> dict[str, list[str]]:
    """By module: what it imports from these packages."""
    return {
        module: found
        for module in modules
        if (found := [name for name in imports_of(tree_of(module)) if name.startswith(packages)])
    }


def test_production_imports_neither_faults_nor_what_tests_need():
    production = [module for module in LIBRARY if not module.startswith(BESIDES)]
    assert imports_of_package(production, *(f"torchscout.{each.strip('/')}" for each in BESIDES)) == {}


def test_the_package_imports_nothing_that_is_not_installed_with_it():
    """Jobs and figures of an evaluation are for this repository, as tests and benchmarks are."""
    assert imports_of_package(MODULES, "evaluation", "tests", "benchmarks") == {}
