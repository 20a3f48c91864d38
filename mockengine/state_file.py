# SPDX-License-Identifier: Apache-2.0
"""The file in which an engine keeps whom it serves, for the engine that follows it.

An engine that is killed tells nobody. Its successor finds here where the frontend listens that still believes in it.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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

    """

    ranks: tuple[int, ...]
    handshake_address: str
    outputs: tuple[str, ...]


_SERVED: Final = TypeAdapter(Served)


class StateFile:
    """One file, written as a whole or not at all. Without a path it keeps nothing."""

    def __init__(self, path: str | None) -> None:
        """Find out whether the file can be read and written.

        Raises:
            StateFileError: it cannot, or it holds something else.

        """
        self._path = None if path is None else Path(path)
        if self._path is None:
            return
        try:
            text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
            if text and _parsed(text) is None:
                raise StateFileError(f"state_file {path} holds what no engine has written (use the path of a new file)")
            problem = self._write(text)
            if not text:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            problem = str(error.strerror)
        except UnicodeDecodeError as error:
            raise StateFileError(f"state_file {path} is no text (use the path of a new file)") from error
        if problem is not None:
            raise StateFileError(
                f"state_file {path} cannot be used: {problem} "
                f"(use a path in a folder that exists and that user {os.geteuid()} may write to, or leave it unset)"
            )

    def remember(self, served: Served) -> str | None:
        """Keep who is served; return why that cannot be, or None."""
        return self._write(_SERVED.dump_json(served).decode())

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

    def _write(self, text: str) -> str | None:
        if self._path is None:
            return None
        beside = self._path.with_name(f"{self._path.name}.new")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(self._path)
        except OSError as error:
            return str(error.strerror)
        return None


def _parsed(text: str) -> Served | None:
    """Return what an engine wrote, or None if none did."""
    try:
        return _SERVED.validate_json(text, strict=True)
    except ValidationError:
        return None
