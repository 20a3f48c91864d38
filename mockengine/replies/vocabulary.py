# SPDX-License-Identifier: Apache-2.0
"""Which token ids a reply may hold: those of a range, without some, or some alone.

Places are the numbers 0 … `size` - 1; they stand for the ids in ascending order. So whoever draws places gets ids that
are each as likely as any other, and no id that is not allowed, without a second try.
"""

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np

Places: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint64]]
"""Places of ids, of any shape of two dimensions."""

Ids: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint32]]

# So few gaps are stepped over one by one; more are looked up.
_FEW_GAPS: Final = 8


class Vocabulary:
    """Token ids that may be said.

    Attributes:
        size: how many there are; at least 1.

    """

    def __init__(self, vocab_size: int, without: Iterable[int] = (), only: Iterable[int] | None = None) -> None:
        """Allow ids.

        Args:
            vocab_size: ids lie below it.
            without: ids that are not allowed; those beyond the range do not matter.
            only: the ids that are allowed at most; None is all.

        Raises:
            ValueError: nothing is left.

        """
        gaps = sorted({each for each in without if 0 <= each < vocab_size})
        self._gaps: tuple[int, ...] = ()
        self._table: np.ndarray[tuple[int], np.dtype[np.uint32]] | None = None
        if only is not None:
            chosen = sorted({each for each in only if 0 <= each < vocab_size}.difference(gaps))
            self._table = np.array(chosen, np.uint32)
            self.size = len(chosen)
        elif len(gaps) > _FEW_GAPS:
            self._table = np.delete(np.arange(vocab_size, dtype=np.uint32), gaps)
            self.size = len(self._table)
        else:
            self._gaps = tuple(gaps)
            self.size = vocab_size - len(gaps)
        if self.size < 1:
            raise ValueError("no token id is left that may be said")

    def __contains__(self, token: int) -> bool:
        if self._table is not None:
            place = int(np.searchsorted(self._table, token))
            return place < self.size and int(self._table[place]) == token
        return 0 <= token < self.size + len(self._gaps) and token not in self._gaps

    def among(self, ids: Sequence[int]) -> list[int]:
        """Return those of the ids that are allowed."""
        asked = np.array(ids, np.int64)
        if self._table is not None:
            allowed = np.isin(asked, self._table)
        else:
            allowed = (asked >= 0) & (asked < self.size + len(self._gaps)) & ~np.isin(asked, self._gaps)
        found: list[int] = asked[allowed].tolist()
        return found

    def id_at(self, place: int) -> int:
        """Return the id at a place."""
        if self._table is not None:
            return int(self._table[place])
        for gap in self._gaps:
            place += place >= gap
        return place

    def ids_at(self, places: Places) -> Ids:
        """Return the ids at places."""
        if self._table is not None:
            # Half the cost of an index of unsigned numbers.
            return self._table.take(places.view(np.int64))
        ids: Ids = places.astype(np.uint32)
        for gap in self._gaps:
            ids += ids >= gap
        return ids
