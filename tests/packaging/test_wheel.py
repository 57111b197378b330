"""A wheel, an sdist and the wheel built from it hold the whole package, and nothing beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SITE_PACKAGES = Path(sys.modules["pytest"].__file__ or "").resolve().parents[1]
WANTED = {
    "decent_opt/__init__.py",
    "decent_opt/py.typed",
    "decent_opt/cli.py",
    "decent_opt/integrations/__init__.py",
    "decent_opt/integrations/ddp.py",
    "decent_opt/recipes/__init__.py",
}
pytestmark = pytest.mark.timeout(300)


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(source: Path, into: Path) -> Path:
    # --no-build-isolation: with it pip would fetch setuptools, and this has to work without a network.
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", into)
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=into.parent)
    (wheel,) = into.glob("decent_opt-*.whl")
    return wheel


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what a build reads: a build leaves files in the tree, and old ones join the wheel."""
    target = tmp_path_factory.mktemp("source") / "checkout"
    target.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(CHECKOUT / name, target)
    for name in ("decent_opt", "integrations", "recipes"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / name, target / name, symlinks=True, ignore=ignore)
    # Data of a recipe in a folder without __init__.py has to travel too.
    (target / "recipes" / "launch").mkdir(exist_ok=True)
    (target / "recipes" / "launch" / "two_nodes.yaml").write_text("nodes: 2\n")
    (target / "recipes" / "launch" / "run.sh").write_text("#!/bin/sh\n")
    return target


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("sdist")
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, into, cwd=source)
    (archive,) = into.glob("decent_opt-*.tar.gz")
    return archive


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def check_contents(names: set[str]) -> None:
    assert names >= WANTED
    assert names >= {"decent_opt/recipes/launch/two_nodes.yaml", "decent_opt/recipes/launch/run.sh"}
    every = {str(p.relative_to(CHECKOUT)) for p in (CHECKOUT / "decent_opt").rglob("*.py")}
    for linked in ("integrations", "recipes"):
        every |= {f"decent_opt/{p.relative_to(CHECKOUT)}" for p in (CHECKOUT / linked).rglob("*.py")}
    assert every - names == set(), "modules of the checkout that are missing"
    top = {name.partition("/")[0] for name in names}
    assert {t for t in top if not t.endswith(".dist-info")} == {"decent_opt"}


def test_the_wheel_holds_the_package_and_nothing_beside_it(wheel: Path) -> None:
    names = names_in(wheel)
    check_contents(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_holds_the_linked_folders_as_real_ones(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert names >= WANTED
    assert not any(name.startswith(("integrations/", "recipes/")) for name in names)
    assert not any(member.issym() or member.islnk() for member in members)


def test_a_wheel_from_the_sdist_is_the_same(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (p for p in tmp_path.iterdir() if p.is_dir())
    (tmp_path / "wheels").mkdir()
    again = names_in(build_wheel(unpacked, tmp_path / "wheels"))
    check_contents(again)
    assert again == names_in(wheel)


def test_an_unpacked_wheel_imports_where_no_checkout_is(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = """
import importlib.util, sys
sys.path += sys.argv[1:]
import decent_opt, decent_opt.integrations.ddp, torch.distributed
assert decent_opt.__file__.startswith(sys.argv[1]), decent_opt.__file__
assert decent_opt.integrations.ddp.__file__.startswith(sys.argv[1])
assert not torch.distributed.is_initialized()
print([name for name in ("integrations", "recipes") if importlib.util.find_spec(name)])
"""
    # -I: neither the current folder nor PYTHONPATH; -S: no .pth file, so no editable install of the checkout.
    printed = run(sys.executable, "-I", "-S", "-c", code, installed, SITE_PACKAGES, cwd=elsewhere)
    assert printed.strip() == "[]"
