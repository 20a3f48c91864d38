# SPDX-License-Identifier: Apache-2.0
"""The records of a large file in JSON, one after the other: a list of them, or one on each line.

The file is read piece by piece, so that no more of it is in memory than a few of its records.
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

MOST_RECORD_CHARACTERS: Final = 2**23
"""Of one record; more would be a list that is not one of records."""

_PIECE_BYTES: Final = 2**20
_SPACE: Final = re.compile(r"[ \t\r\n]*")
# A number at the end of a piece may go on in the next one, and so may a word.
_NEAR_END: Final = 32


class RecordsError(Exception):
    """Why records cannot be read any further.

    Attributes:
        line: where.

    """

    def __init__(self, line: int, reason: str) -> None:
        self.line = line
        super().__init__(reason)


def records(path: Path) -> Iterator[tuple[int, object]]:
    """Yield the records of a file, each with the line on which it begins.

    One that is no JSON is yielded as a `ValueError`, if it is on a line of its own.

    Raises:
        OSError: it cannot be read.
        RecordsError: nothing can be said of what follows.

    """
    with path.open("rb") as file:
        reader = _Reader(file)
        is_list = reader.skip_to("[")
        yield from reader.items() if is_list else reader.lines()


class _Reader:
    """Reads a file in pieces; `_text` is what it has of it, and `_place` up to where that is done with."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder(parse_constant=_refuse_constant)
        self._text = ""
        self._place = 0
        self._line = 1
        self._is_over = False

    def skip_to(self, mark: str) -> bool:
        """Go past white space, and past a mark if it comes then; return whether it did."""
        while True:
            found = _SPACE.match(self._text, self._place)
            self._advance(self._place if found is None else found.end())
            if self._place < len(self._text) or not self._more():
                break
        has_mark = self._text.startswith(mark, self._place)
        self._advance(self._place + len(mark) * has_mark)
        return has_mark

    def lines(self) -> Iterator[tuple[int, object]]:
        """Yield what is on each line that is not empty."""
        while True:
            end = self._text.find("\n", self._place)
            if end < 0 and self._more():
                continue
            line = self._text[self._place : end if end >= 0 else None]
            if line.strip():
                yield self._line, self._decoded(line)
            if end < 0:
                return
            self._advance(end + 1)

    def items(self) -> Iterator[tuple[int, object]]:
        """Yield the items of a list that has begun."""
        if not self.skip_to("]"):
            while True:
                self.skip_to("")
                yield self._line, self._item()
                if not self.skip_to(","):
                    break
            if not self.skip_to("]"):
                raise RecordsError(self._line, "not JSON: the list goes on with neither , nor ]")
        self.skip_to("")
        if self._place < len(self._text):
            raise RecordsError(self._line, "not JSON: something comes after the list")

    def _item(self) -> object:
        while True:
            try:
                found, end = self._json.raw_decode(self._text, self._place)
            except RecursionError:
                raise RecordsError(self._line, "it is nested too deep") from None
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos > len(self._text) - _NEAR_END
                if is_cut and self._more():
                    continue
                line = self._line + self._text.count("\n", self._place, error.pos)
                raise RecordsError(line, f"not JSON: {error.msg}") from None
            except ValueError as error:
                raise RecordsError(self._line, str(error)) from None
            if end > len(self._text) - _NEAR_END and self._more():
                continue
            self._advance(end)
            return found

    def _decoded(self, line: str) -> object:
        try:
            return self._json.decode(line)
        except RecursionError:
            return ValueError("it is nested too deep")
        except json.JSONDecodeError as error:
            return ValueError(f"not JSON: {error.msg}, column {error.colno}")
        except ValueError as error:
            return error

    def _advance(self, place: int) -> None:
        self._line += self._text.count("\n", self._place, place)
        self._place = place

    def _more(self) -> bool:
        """Read another piece, as long again as what is not done with; return whether there was one."""
        if self._is_over:
            return False
        rest = self._text[self._place :]
        if len(rest) > MOST_RECORD_CHARACTERS:
            raise RecordsError(self._line, f"a record of more than {MOST_RECORD_CHARACTERS} characters")
        data = self._file.read(max(_PIECE_BYTES, len(rest)))
        self._is_over = not data
        try:
            text = self._decoder.decode(data, final=self._is_over)
        except UnicodeDecodeError as error:
            line = self._line + rest.count("\n") + bytes(error.object).count(b"\n", 0, error.start)
            raise RecordsError(line, f"byte {error.object[error.start]:#04x} is no UTF-8") from None
        self._text, self._place = rest + text, 0
        return True


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number")
