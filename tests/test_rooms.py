# SPDX-License-Identifier: Apache-2.0
"""The plan of the house: which room may import which, and what every source file begins with."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mockengine"

# A room may import itself and the rooms named here. Modules of no room (settings, logs …) may be imported only where
# they are named.
MAY_IMPORT = {
    "wire": set[str](),
    "replies": {"wire"},
    "faults": {"wire", "replies"},
    "engine": {"wire", "replies", "faults"},
    "transport": {"wire", "engine", "faults"},
    "settings_types": {"durations", "lengths"},
    "settings_rules": {"settings_types"},
    "durations": set[str](),
    "lengths": set[str](),
    "settings": {"settings_types", "settings_rules"},
    "settings_sources": {"settings", "settings_types", "settings_rules"},
    "settings_docs": {"settings", "testing"},
    "logs": set[str](),
    "status": set[str](),
    "ledger": set[str](),
    "journal": {"ledger", "logs", "engine", "faults", "wire", "status"},
    "watch": {"journal", "status", "engine", "transport"},
    "admin": {"status", "remote", "faults", "settings", "transport"},
    "remote": {
        *("logs", "settings", "settings_sources", "engine_setup"),
        *("engine", "faults", "transport", "wire", ""),
    },
    "state_file": set[str](),
    "health": set[str](),
    "smoke": set[str](),
    "fit": {"engine"},
    "publishers": {"transport", "wire"},
    "regex_limit": set(),
    "engine_setup": {
        *("settings", "settings_types", "lengths", "fit", "regex_limit"),
        *("engine", "replies", "faults", "wire"),
    },
    "service": {
        *("settings", "engine_setup", "remote", "ledger", "logs", "journal", "watch", "state_file", "publishers"),
        *("wire", "engine", "faults", "transport", "admin", ""),
    },
    "ctl": {"faults"},
    "scenario": {"ctl", "faults", "replies"},
    "cli": {"ctl", "scenario", "settings", "settings_sources", "service", "smoke", "fit", "health", ""},
    "__main__": {"cli"},
    "testing": {"wire", "engine"},
}


def _room(module: str) -> str:
    """Return the room of `mockengine.room.module`, or the module's own name; `mockengine` itself is ""."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _imported_rooms(path: Path) -> set[str]:
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            whole = node.module == "mockengine"
            modules = [f"mockengine.{alias.name}" if whole else str(node.module) for alias in node.names]
        else:
            continue
        rooms |= {_room(module) for module in modules if module.split(".")[0] == "mockengine"}
    return rooms - {"__version__"}


def _sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("path", _sources(PACKAGE), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_what_its_room_may(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room == "__init__":
        assert _imported_rooms(path) == set()
        return
    assert room in MAY_IMPORT, f"{room} is a new room: say here what it may import"
    assert _imported_rooms(path) <= MAY_IMPORT[room] | {room}


@pytest.mark.parametrize("room", ["wire", "engine", "replies"])
def test_pure_rooms_see_neither_sockets_nor_clocks(room: str) -> None:
    forbidden = {"zmq", "time", "socket", "threading", "asyncio", "random", "os"}
    for path in _sources(PACKAGE / room):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & forbidden, f"{path} imports {names}"


@pytest.mark.parametrize(
    "path",
    [path for folder in ("mockengine", "tests", "deploy", "benchmarks") for path in _sources(ROOT / folder)],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_source_file_states_its_licence(path: Path) -> None:
    assert path.read_text().splitlines()[0] == "# SPDX-License-Identifier: Apache-2.0"
