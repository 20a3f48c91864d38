# SPDX-License-Identifier: Apache-2.0
"""The file in which an engine keeps whom it serves, for the engine that follows it.

An engine that is killed tells nobody. Its successor finds here where the frontend listens that still believes in it.
"""

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from pydantic import TypeAdapter, ValidationError


class StateFileError(Exception):
    """The file cannot be used; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Served:
    """A frontend that is being served.

    Attributes:
        ranks: engine indexes of the process that serves it.
        handshake_address: where it was joined.
        outputs: addresses on which it listens for outputs, by client index.
        init: its INIT, in hexadecimal digits, for whoever goes on serving it; nothing from engines of before.
        lines: release lines that it may be of, as far as it has shown.

    """

    ranks: tuple[int, ...]
    handshake_address: str
    outputs: tuple[str, ...]
    init: str = ""
    lines: tuple[str, ...] = ()


_SERVED: Final = TypeAdapter(Served)


class StateFile:
    """One engine's file, written as a whole or not at all. Without a path it keeps nothing."""

    def __init__(self, path: str | None) -> None:
        """Find out whether the file can be used, and keep other engines from it until `close`.

        Raises:
            StateFileError: it cannot be read or written, holds something else, or another engine uses it.

        """
        self._path = None if path is None else Path(path).resolve()
        self._lock: TextIO | None = None
        if self._path is None:
            return
        try:
            self._take(self._path)
        except StateFileError:
            self.close()
            raise
        except (OSError, UnicodeDecodeError) as error:
            self.close()
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise StateFileError(
                f"state_file {path} cannot be used: {reason} "
                f"(use a path in a folder that exists and that user {os.geteuid()} may write to, or leave it unset)"
            ) from error

    def _take(self, path: Path) -> None:
        if path.exists() and not path.is_file():
            raise StateFileError(f"state_file {path} is no regular file (use the path of a new one, or leave it unset)")
        # The lock lies beside the file, which is replaced whenever it is written.
        self._lock = path.with_name(f"{path.name}.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateFileError(
                f"state_file {path} is used by another engine that runs (give each engine a file of its own)"
            ) from error
        # A machine that lost its power may have left zeros.
        text = path.read_text(encoding="utf-8").strip("\0") if path.exists() else ""
        if text and _parsed(text) is None:
            raise StateFileError(f"state_file {path} holds what no engine has written (use the path of a new file)")
        self._write(text)
        if not text:
            path.unlink()

    def close(self) -> None:
        """Leave the file to the next engine."""
        if self._lock is not None:
            self._lock.close()

    def remember(self, served: Served) -> str | None:
        """Keep who is served; return why that cannot be, or None."""
        try:
            self._write(_SERVED.dump_json(served).decode())
        except OSError as error:
            return str(error.strerror)
        return None

    def forget(self) -> None:
        """Keep nobody: the frontend has been told, or it is gone."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def recall(self, ranks: Sequence[int]) -> Served | None:
        """Return whom an earlier engine with these ranks served when it was killed, or None if nobody is known of."""
        if self._path is None:
            return None
        try:
            served = _parsed(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return served if served is not None and served.ranks == tuple(ranks) else None

    def _write(self, text: str) -> None:
        if self._path is not None:
            beside = self._path.with_name(f"{self._path.name}.new")
            beside.write_text(text, encoding="utf-8")
            beside.replace(self._path)


def _parsed(text: str) -> Served | None:
    """Return what an engine wrote, or None if none did."""
    try:
        return _SERVED.validate_json(text, strict=True)
    except ValidationError:
        return None
