# SPDX-License-Identifier: Apache-2.0
"""Waves: how the ranks of a mixture of experts start and stop together (protocol section 7).

A wave begins when an idle rank gets a request and ends when every rank is idle. Ranks of one process know each
other's idleness. Rank 0 tells the coordinator of the end; where it lives in another process than some rank, it speaks
for the ranks of its own.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Wave:
    """One rank's view.

    Attributes:
        number: of the wave that runs, or of the next one.
        running: whether the rank takes part in a wave now.

    """

    number: int = 0
    running: bool = False

    def noted(self, stamped: int) -> None:
        """Take note of the wave that a client stamped a request with which waits for another one."""
        self.number = max(self.number, stamped)

    def request_arrived(self, stamped: int) -> bool:
        """Take part for a request that its client stamped with a wave; tell whether that starts a wave."""
        self.number = max(self.number, stamped)
        starts, self.running = not self.running, True
        return starts

    def woken(self, rank: int, number: int, exclude: int | bytes | None) -> bool:
        """Follow the coordinator's START_DP_WAVE, unless it is for others or for a wave long over.

        Returns:
            Whether that has woken it.

        """
        if exclude == rank or number < self.number:
            return False
        was_running, self.number, self.running = self.running, number, True
        return not was_running

    def complete(self) -> int:
        """End the wave and return its number."""
        ended = self.number
        self.number, self.running = ended + 1, False
        return ended
