# SPDX-License-Identifier: Apache-2.0
"""What requests of recorded scenarios say: a formula gives every token, and how many drafts are accepted."""

from collections.abc import Sequence

from mockengine.engine.drafts import Acceptance


class Reply:
    """The outputs of one request as they really came."""

    def __init__(self, index: int, prompt: Sequence[int], stops: Sequence[int], max_tokens: int) -> None:
        self._index = index
        self._stops = frozenset(stops)
        self._max_tokens = max_tokens
        self._num_sampled = 0
        self.all_tokens = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.under_way: list[list[int]] = []

    def _token(self, n: int) -> int:
        return 10_000 + (37 * self._index + n) % 5_000

    def read(self, start: int, count: int) -> Sequence[int]:
        """Return tokens by position."""
        return self.all_tokens[start : start + count]

    def sample(self, count: int) -> None:
        """Draw the tokens of a step that has begun."""
        self.under_way.append([self._token(self._num_sampled + ahead) for ahead in range(count)])
        self._num_sampled += count

    def arrive(self) -> None:
        """Take in the tokens of the oldest step under way."""
        self.all_tokens += self.under_way.pop(0)

    def settle(self, num_tokens: int) -> None:
        """Take back what the scheduler has dropped: it has so many tokens, prompt included."""
        del self.all_tokens[num_tokens:]

    def go_on(self, num_kept_tokens: int, prompt: Sequence[int], stops: Sequence[int], max_tokens: int) -> None:
        """Begin anew with more prompt after so many tokens."""
        self.all_tokens = [*self.all_tokens[:num_kept_tokens], *prompt]
        self.num_prompt_tokens = len(self.all_tokens)
        self._stops = frozenset(stops)
        self._max_tokens = max_tokens

    def stop_reason(self, token: int) -> int | None:
        """Return the token if it ends the reply."""
        return token if token in self._stops else None

    def stops_after(self) -> int:
        """Return the number of outputs with which it ends, as things stand."""
        outputs = len(self.all_tokens) - self.num_prompt_tokens
        ahead = [token for tokens in self.under_way for token in tokens]
        ahead += [self._token(self._num_sampled + n) for n in range(self._max_tokens - outputs - len(ahead))]
        stop = next((place for place, token in enumerate(ahead, 1) if token in self._stops), self._max_tokens)
        return min(outputs + stop, self._max_tokens)


class DraftedReply(Reply):
    """A reply that comes in outputs of one token and the accepted drafts; all its tokens are known by position."""

    def __init__(self, index: int, prompt: Sequence[int], stops: Sequence[int], max_tokens: int) -> None:
        super().__init__(index, prompt, stops, max_tokens)
        self._reply = [self._token(n) for n in range(max_tokens)]
        self.all_tokens += self._reply

    def sample(self, count: int) -> None:
        """Do nothing: what is sampled is known."""

    def arrive(self) -> None:
        """Do nothing likewise."""

    def settle(self, num_tokens: int) -> None:
        """Do nothing likewise."""

    def stops_after(self) -> int:
        """Return the number of outputs with which it ends."""
        stops = (place for place, token in enumerate(self._reply, 1) if token in self._stops)
        return next(stops, self._max_tokens)


class RecordedAcceptance(Acceptance):
    """Accepts as many drafts as when the scenarios were recorded; the key is the index of the request."""

    def draw(self, key: int, start: int, count: int) -> bytes:
        """Return the number of accepted drafts for outputs from a position on."""
        most = self.num_spec_tokens
        mixed = (31 * key + 17 * n + n * n // 3 for n in range(start, start + count))
        return bytes(number % (2 * most + 3) % (most + 1) for number in mixed)
