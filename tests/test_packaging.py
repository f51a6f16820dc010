"""The package as it is published: what it contains, and that it works in an environment with nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import torchscout

ROOT = Path(torchscout.__file__).parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
LIGHT = ("numpy", "pyzmq", "rich", "typer", "xxhash")
"""What the command needs besides torch, which commands that read files do not import."""
IMPORTED = """
import torchscout, torchscout.config, torchscout.mesh, torchscout.observer.process, sys
from torchscout.cli.main import app
assert "torch" not in sys.modules
assert torchscout.Mesh.grid(replica=3).peers_of(0).can_attribute
"""


def interpreter(release: str) -> Path | None:
    """An interpreter of this release that is installed here, by pyenv or on the path."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [*sorted(pyenv.glob(f"{release}.*/bin/python")), shutil.which(f"python{release}")]
    for each in filter(None, found):
        if subprocess.run([each, "-c", ""], check=False, capture_output=True).returncode == 0:
            return Path(each)
    return None


def run(*command: object, folder: Path = ROOT) -> str:
    done = subprocess.run(
        [str(each) for each in command],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    source = shutil.copytree(
        ROOT,
        folder / "source",
        ignore=shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", ".*_cache"),
    )
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", code, folder=source)
    (sdist,) = folder.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", folder, sdist, folder=folder)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_the_wheel_and_the_sdist_have_every_module_and_nothing_else(built: tuple[Path, Path]):
    sdist, wheel = built
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "torchscout").rglob("*.py")}
    names = {*zipfile.ZipFile(wheel).namelist()}
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside >= modules | {"torchscout/py.typed"}
    assert all(name.startswith("torchscout/") for name in inside)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(sdist) as archive:
        assert {name.partition("/")[2] for name in archive.getnames()} >= modules | {"LICENSE", "README.md"}


@pytest.mark.slow
@pytest.mark.parametrize("release", VERSIONS)
def test_the_wheel_works_in_an_empty_environment(release: str, built: tuple[Path, Path], tmp_path: Path):
    if (python := interpreter(release)) is None:
        pytest.skip(f"Python {release} is not installed")
    run(python, "-m", "venv", tmp_path / "environment")
    inner = tmp_path / "environment" / "bin" / "python"
    pip = (inner, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    needed = LIGHT if release != "3.10" else (*LIGHT, "tomli")
    run(*pip, *needed)  # torch is left out: it takes minutes, and these commands do without
    run(*pip, "--no-deps", built[1])
    run(
        inner,
        "-m",
        "compileall",
        "-q",
        tmp_path / "environment" / "lib" / f"python{release}" / "site-packages" / "torchscout",
    )
    run(inner, "-c", IMPORTED, folder=tmp_path)
    scout = tmp_path / "environment" / "bin" / "scout"
    assert run(scout, "--version", folder=tmp_path) == f"torchscout {torchscout.__version__}\n"
    assert "checkpoint" in run(scout, "--help", folder=tmp_path)
    (tmp_path / "scout.toml").write_text(run(scout, "config", folder=tmp_path))
    assert "is valid" in run(scout, "config", "--check", "scout.toml", folder=tmp_path)


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == torchscout.__version__ == version("torchscout")
    assert f'version = "{torchscout.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
