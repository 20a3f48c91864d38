# SPDX-License-Identifier: Apache-2.0
"""Decides what strikes, and remembers how often: one for all ranks of a process and for all its frontends.

The engine's thread asks; other threads may change rules. Rules are one tuple that is replaced as a whole, and what
somebody lets strike waits in a queue, so nobody holds a lock.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Protocol

from mockengine.faults.edits import Edit
from mockengine.faults.fault import CallFault, EngineFault, JoinFault, OutputFault, RequestFault
from mockengine.faults.rules import Event, Rule, RulesError
from mockengine.replies.asked import Asked, ReplyError
from mockengine.replies.hashing import mixed, uniform
from mockengine.replies.mishaps import BY_NAME
from mockengine.replies.wish import Wish
from mockengine.wire.utility import UtilityCall

_PROBABILITY: Final = 0x6661756C74


class FaultListener(Protocol):
    """Hears of what strikes."""

    def fault_fired(self, rule: str, fault: str, engine: int | None, request_id: str | None) -> None:
        """Hear that a fault has struck; without a rank, the process as a whole."""


@dataclass(slots=True)
class _Tally:
    """What a rule has seen.

    Attributes:
        key: of what is drawn for it.
        seen: of what it looks at, that of which everything but the number holds.
        struck: how often it has.
        due: how often somebody wants it to strike whatever its conditions are.

    """

    key: int
    seen: int = 0
    struck: int = 0
    due: deque[None] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class Calamity:
    """Something that happens to the engine as a whole, or to a rank of it.

    Attributes:
        rule: its name.
        what: it.
        rank: of the request or call that it came with, if there was one.

    """

    rule: str
    what: EngineFault
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Struck:
    """What strikes a request.

    Attributes:
        wish: what becomes of its reply, if it is that.
        edits: what is done to the messages about it.

    """

    wish: Wish | None
    edits: Sequence[Edit]


class Injector:
    """Rules, and what they have done."""

    def __init__(self, rules: Sequence[Rule], seed: int, listener: FaultListener | None = None) -> None:
        """Begin with nothing having struck.

        Args:
            rules: no two of one name.
            seed: decides what is drawn.
            listener: hears of what strikes.

        """
        self._seed = seed
        self._listener = listener
        self._rules: tuple[tuple[Rule, _Tally], ...] = tuple((rule, self._tally(rule.name)) for rule in rules)
        self._ready_at: float | None = None
        self._calamities: deque[Calamity] = deque()

    # Rules.

    @property
    def rules(self) -> Sequence[Rule]:
        """The rules, in the order in which they are looked at."""
        return [rule for rule, _ in self._rules]

    @property
    def has_rules(self) -> bool:
        """Whether there are any."""
        return bool(self._rules)

    @property
    def is_active(self) -> bool:
        """Whether anything may happen."""
        return bool(self._rules or self._calamities)

    def struck(self, name: str) -> int:
        """Return how often the rule of a name has struck, 0 where there is none."""
        return next((tally.struck for rule, tally in self._rules if rule.name == name), 0)

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a rule of a name that may strike."""
        return any(rule.name == name and rule.enabled for rule, _ in self._rules)

    def put(self, rule: Rule) -> None:
        """Add a rule, or replace the one of the same name, which counts anew unless it is only switched on or off."""
        former = next((each for each in self._rules if each[0].name == rule.name), None)
        if former is None:
            self._rules = (*self._rules, (rule, self._tally(rule.name)))
            return
        is_switched = rule != former[0] and rule.model_copy(update={"enabled": former[0].enabled}) == former[0]
        made = (rule, former[1] if is_switched else self._tally(rule.name))
        self._rules = tuple(made if each is former else each for each in self._rules)

    def remove(self, name: str) -> bool:
        """Remove a rule, and end what it has begun; tell whether there was one."""
        kept = tuple(each for each in self._rules if each[0].name != name)
        was_there, self._rules = len(kept) < len(self._rules), kept
        return was_there

    def fire(self, name: str) -> bool:
        """Let a rule strike whatever its conditions; tell whether there is one.

        What happens to the engine as a whole does so now; anything else strikes what comes next of what it looks at.
        """
        for rule, tally in self._rules:
            if rule.name == name:
                tally.due.append(None)
                return True
        return False

    # What happens.

    def add(self, calamity: Calamity) -> None:
        """Have something happen to the engine now, without a rule."""
        self._calamities.append(calamity)
        if self._listener is not None:
            self._listener.fault_fired(calamity.rule, calamity.what.fault, calamity.rank, None)

    def begin(self, now: float) -> None:
        """Take note that the engine is ready, from when on times count."""
        self._ready_at = now

    def on_request(self, asked: Asked, rank: int, now: float, named: str | None = None) -> Struck | None:
        """Return what strikes a request that may be accepted.

        Of what becomes of its reply the first rule decides; what is done to messages adds up.

        Args:
            asked: the request.
            rank: that it came to.
            now: the time, in engine seconds.
            named: the rule that its client asks for, if it does.

        Raises:
            ReplyError: there is no rule of that name that requests may ask for.

        """
        if named is not None:
            self._check_name(named)
        wish: Wish | None = None
        edits: list[Edit] = []
        request_id = asked.request.request_id
        for rule, tally in self._looking_at(Event.REQUEST):
            is_asked_for = rule.name == named
            if not is_asked_for and (rule.when.steered or not _holds(rule, asked)):
                if not _is_let(tally):
                    continue
            elif not self._strikes(rule, tally, rank, now):
                continue
            what = rule.what
            if isinstance(what, RequestFault):
                if wish is not None:
                    continue
                wish = what.wish()
            elif isinstance(what, OutputFault):
                edits.append(what.edit(request_id))
            elif isinstance(what, EngineFault):
                self._calamities.append(Calamity(rule.name, what, rank))
            self._note(rule, tally, rank, request_id)
        return Struck(wish, edits) if wish is not None or edits else None

    def on_call(self, call: UtilityCall, rank: int, now: float) -> list[Edit]:
        """Return what is done to the answer to a utility call."""
        edits: list[Edit] = []
        for rule, tally in self._looking_at(Event.CALL):
            method = rule.when.method
            if (method is None or method == call.method) and self._strikes(rule, tally, rank, now):
                if isinstance(rule.what, CallFault):
                    edits.append(rule.what.edit(call.call_id))
                elif isinstance(rule.what, EngineFault):
                    self._calamities.append(Calamity(rule.name, rule.what, rank))
                self._note(rule, tally, rank)
        return edits

    def on_join(self) -> list[JoinFault]:
        """Return what goes wrong with a join that begins."""
        faults: list[JoinFault] = []
        for rule, tally in self._looking_at(Event.JOIN):
            if self._strikes(rule, tally, None, None):
                if isinstance(rule.what, JoinFault):
                    faults.append(rule.what)
                elif isinstance(rule.what, EngineFault):
                    self._calamities.append(Calamity(rule.name, rule.what))
                self._note(rule, tally, None)
        return faults

    def on_time(self, now: float) -> list[Calamity]:
        """Return what happens to the engine now, because its time has come, or with what has happened since."""
        for rule, tally in self._rules:
            if rule.enabled and isinstance(rule.what, EngineFault):
                is_due = rule.looks_at is Event.TIME and not tally.struck and self._is_in_time(rule, now)
                if is_due or _is_let(tally):
                    self._calamities.append(Calamity(rule.name, rule.what, rule.when.rank))
                    self._note(rule, tally, rule.when.rank)
        # Others may add to it meanwhile.
        return [self._calamities.popleft() for _ in range(len(self._calamities))]

    def next_deadline(self, now: float) -> float | None:
        """Return when something happens because of the time alone, `now` being at once, or None."""
        if self._calamities:
            return now
        moments = []
        for rule, tally in self._rules:
            if not rule.enabled or not isinstance(rule.what, EngineFault):
                continue
            if tally.due:
                return now
            if rule.looks_at is Event.TIME and not tally.struck and self._ready_at is not None:
                moments.append(self._ready_at + (rule.when.from_s or 0.0))
        return min(moments, default=None)

    # Whether a rule strikes.

    def _looking_at(self, event: Event) -> Iterator[tuple[Rule, _Tally]]:
        return ((rule, tally) for rule, tally in self._rules if rule.enabled and rule.looks_at is event)

    def _strikes(self, rule: Rule, tally: _Tally, rank: int | None, now: float | None) -> bool:
        """Count one more of what a rule looks at, and tell whether it strikes that."""
        if _is_let(tally):
            return True
        when = rule.when
        if (when.rank is not None and when.rank != rank) or not self._is_in_time(rule, now):
            return False
        tally.seen += 1
        number = tally.seen
        is_spared = when.after is not None and number <= when.after
        if when.after is not None:
            number -= when.after
        is_meant = (when.nth is None or number in when.nth) and (when.every is None or number % when.every == 0)
        is_drawn = when.probability is None or uniform(tally.key ^ mixed(tally.seen)) <= when.probability
        has_more = when.times is None or tally.struck < when.times
        return is_meant and is_drawn and has_more and not is_spared

    def _is_in_time(self, rule: Rule, now: float | None) -> bool:
        when = rule.when
        if when.from_s is None and when.until_s is None:
            return True
        if now is None or self._ready_at is None:
            return False
        since = now - self._ready_at
        return (when.from_s or 0.0) <= since and (when.until_s is None or since < when.until_s)

    def _note(self, rule: Rule, tally: _Tally, rank: int | None, request_id: str | None = None) -> None:
        tally.struck += 1
        if self._listener is not None:
            self._listener.fault_fired(rule.name, rule.what.fault, rank, request_id)

    def _check_name(self, named: str) -> None:
        names = [rule.name for rule, _ in self._looking_at(Event.REQUEST)]
        if named not in names:
            known = ", ".join([*BY_NAME, *names])
            raise ReplyError(f"fault: there is none of the name {named} (requests may ask for {known})")

    def _tally(self, name: str) -> _Tally:
        digest = blake2b(name.encode(), digest_size=8, key=self._seed.to_bytes(8, "little")).digest()
        return _Tally(int.from_bytes(digest, "little") ^ mixed(_PROBABILITY))


def _is_let(tally: _Tally) -> bool:
    """Whether somebody lets a rule strike, which is done with that."""
    if not tally.due:
        return False
    tally.due.popleft()
    return True


def _holds(rule: Rule, asked: Asked) -> bool:
    """Whether a request is one that a rule is about, but for its number."""
    when, request = rule.when, asked.request
    lora = request.lora_request
    return (
        (when.request_id is None or when.request_id in request.request_id)
        and (when.min_prompt_tokens is None or request.num_prompt_tokens >= when.min_prompt_tokens)
        and (when.lora is None or (lora is not None and lora.name == when.lora))
        and (when.prompt_contains is None or when.prompt_contains in (asked.prompt_text or ""))
    )


def check_needs(rules: Sequence[Rule], *, has_tokenizer: bool, has_load_model: bool) -> None:
    """Refuse rules that this engine cannot follow.

    Raises:
        RulesError: some of them take what it does not have.

    """
    problems = [
        f"{rule.name}: prompt_contains takes tokenizer, the folder of the frontend's model"
        for rule in rules
        if rule.when.prompt_contains is not None and not has_tokenizer
    ]
    problems += [
        f"{rule.name}: kv_cache_full takes load_model=vllm"
        for rule in rules
        if rule.what.fault == "kv_cache_full" and not has_load_model
    ]
    if problems:
        raise RulesError(problems)
