# SPDX-License-Identifier: Apache-2.0
"""Which tokens a request gets, and how many. One file per source, one interface: `TokenSource`."""

from typing import Protocol


class TokenSource(Protocol):
    """Where tokens come from."""

    def tokens(self, key: int, start: int, count: int) -> list[int]:
        """Return tokens `start` … `start + count - 1` of the reply that `key` identifies.

        A pure function: neither the order of requests nor their timing nor the rank that serves them matters.
        """
