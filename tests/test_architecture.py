"""The floors of the house: a room imports only from rooms below it; the lowest know no torch.distributed."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "decent_opt"
ROOT = "the package itself"  # `import decent_opt`: its public names, for those who use it as a stranger would

# Low to high. Rooms on the same floor do not know each other.
FLOORS: list[set[str]] = [
    {"_version", "errors"},
    {"config", "monitoring", "options"},
    {"topology", "compression"},
    {"communication", "theory"},
    {"gossip", "sparsification"},
    {"optim"},
    {"checkpoint", "testing"},
    {"integrations", "simulation"},
    {ROOT},
    {"recipes", "cli"},
]
SAME_ROOM = {
    "doctor": "cli",
    "compressors_cli": "cli",
    "config_cli": "cli",
    "config_sources": "config",
    "checkpoint_resized": "checkpoint",
}  # files of another room
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
NO_DISTRIBUTED = {"topology", "compression", "errors", "config", "options"}


def sources() -> dict[str, Path]:
    """Dotted name below decent_opt ("" is its __init__) -> file; os.walk, because it follows the links."""
    found = {}
    for folder, _, files in os.walk(PACKAGE, followlinks=True):
        for file in files:
            path = Path(folder, file)
            if path.suffix == ".py":
                parts = path.relative_to(PACKAGE).with_suffix("").parts
                found[".".join(p for p in parts if p != "__init__")] = path
    return found


def room_of(dotted: str) -> str:
    first = dotted.partition(".")[0]
    return SAME_ROOM.get(first, first) or ROOT


def imports(source: str, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of every import, wherever in the file, names of `from` included."""
    package = ["decent_opt", *module.split(".")] if module else ["decent_opt"]
    if not is_package:
        package = package[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for name in node.names:
                yield node.lineno, f"{stem}.{name.name}"


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Sentences for the imports that go sideways or up, and for torch.distributed where it is not wanted."""
    room, found = room_of(module), []
    for line, name in imports(source, module, is_package):
        if room in NO_DISTRIBUTED and name.startswith("torch.distributed"):
            found.append(f"{module}:{line}: {room} imports torch.distributed")
        if name.partition(".")[0] != "decent_opt":
            continue
        other = room_of(name.removeprefix("decent_opt").removeprefix("."))
        if other not in FLOOR_OF:
            other = ROOT  # `from decent_opt import PDSGDM`
        if other != room and FLOOR_OF[other] >= FLOOR_OF[room]:
            found.append(f"{module}:{line}: {room} imports {other}, which is not below it")
    return found


@pytest.mark.parametrize("module", sorted(sources()))
def test_a_room_imports_only_from_rooms_below(module: str) -> None:
    path = sources()[module]
    assert room_of(module) in FLOOR_OF, f"{module}: give its room a floor in {Path(__file__).name}"
    assert violations(path.read_text("utf-8"), module, path.name == "__init__.py") == []


@pytest.mark.parametrize("module", [m for m in sorted(sources()) if room_of(m) in NO_DISTRIBUTED])
def test_the_lowest_rooms_do_not_touch_torch_distributed(module: str) -> None:
    tree = ast.parse(sources()[module].read_text("utf-8"))
    touched = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "distributed"]
    assert touched == []


def test_every_folder_with_modules_is_a_package() -> None:
    # The build collects packages, and a folder without __init__.py is none: a wheel would lack its modules.
    folders = {path.parent for path in sources().values()}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("topology.graphs", "from decent_opt.communication import connect", "topology imports communication"),
        ("topology.graphs", "def f():\n    import torch.distributed as dist", "imports torch.distributed"),
        ("topology.graphs", "from torch import distributed", "imports torch.distributed"),
        ("topology.graphs", "from ..optim import PDSGDM", "topology imports optim"),
        ("topology.graphs", "from .. import optim", "topology imports optim"),
        ("topology.graphs", "from decent_opt import compression", "topology imports compression"),
        ("gossip.periodic", "import decent_opt.sparsification.blocks", "gossip imports sparsification"),
        ("optim.pdsgdm", "from decent_opt import PDSGDM", f"optim imports {ROOT}"),
        ("integrations.ddp", "from decent_opt.recipes import demo", "integrations imports recipes"),
        ("errors", "from decent_opt.config import DecentConfig", "errors imports config"),
        ("", "from decent_opt.cli import app", f"{ROOT} imports cli"),
    ],
)
def test_the_check_notices(module: str, source: str, complaint: str) -> None:
    found = violations(source, module)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("optim.pdsgdm", "from decent_opt.optim.decentralized import Decentralized"),
        ("optim.pdsgdm", "from .decentralized import Decentralized"),
        ("gossip.periodic", "from decent_opt.errors import ConfigError\nimport torch.distributed"),
        ("recipes.demo", "import decent_opt\nfrom decent_opt import PDSGDM"),
        ("doctor", "from decent_opt.testing import run_ranks"),
    ],
)
def test_the_check_lets_pass(module: str, source: str) -> None:
    assert violations(source, module) == []
