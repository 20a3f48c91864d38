# SPDX-License-Identifier: Apache-2.0
"""Rules: which fault strikes, and when.

A rule looks at requests, at utility calls, at joins or at the clock; which of them follows from its fault, and for what
happens to the engine as a whole from its conditions (`Rule.looks_at`).
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Annotated, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from mockengine.faults.catalog import NAMES, AnyFault
from mockengine.faults.fault import LONGEST_S, CallFault, EngineFault, JoinFault
from mockengine.replies.located import Located, Place, Problem
from mockengine.replies.mishaps import RULE_NAME

MOST_RULES: Final = 1_000
_MOST_COUNT: Final = 2**31 - 1
_MOST_TEXT: Final = 1_000
_OF_REQUESTS: Final = ("request_id", "prompt_contains", "min_prompt_tokens", "lora", "steered")
_COUNTING: Final = ("probability", "nth", "every", "after")
_OF_TIME: Final = ("from_s", "until_s")

Count = Annotated[int, Field(ge=1, le=_MOST_COUNT)]
Moment = Annotated[float, Field(ge=0, le=LONGEST_S)]


def _listed(value: object) -> object:
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


class Event(Enum):
    """What a rule looks at."""

    REQUEST = auto()
    CALL = auto()
    JOIN = auto()
    TIME = auto()
    NOTHING = auto()


class When(BaseModel):
    """What must hold for a fault to strike; what is left out holds always."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    request_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=_MOST_TEXT,
        description="Part of the request's id, into which frontends put a client's `X-Request-Id`.",
    )
    prompt_contains: str | None = Field(
        default=None, min_length=1, max_length=_MOST_TEXT, description="Part of the prompt's text; takes `tokenizer`."
    )
    min_prompt_tokens: Count | None = Field(default=None, description="The prompt has so many tokens at least.")
    lora: str | None = Field(
        default=None, min_length=1, max_length=_MOST_TEXT, description="Name of the adapter that the request is for."
    )
    steered: bool = Field(default=False, description="Only requests are meant that name the rule as `mock_fault`.")
    method: str | None = Field(default=None, min_length=1, max_length=256, description="Method of a utility call.")
    at_join: bool = Field(default=False, description="The engine joins a frontend.")
    rank: Annotated[int, Field(ge=0, lt=2**16)] | None = Field(default=None, description="The rank that it is about.")
    from_s: Moment | None = Field(default=None, description="Seconds after the engine was ready, from which on.")
    until_s: Moment | None = Field(default=None, description="Seconds after the engine was ready, up to which.")
    probability: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Share of those of which all the above holds, by the engine's `seed`."
    )
    nth: Annotated[frozenset[Count], BeforeValidator(_listed), Field(min_length=1, max_length=1_000)] | None = Field(
        default=None, description="Which of them, from 1 on: a number or a list of them."
    )
    every: Count | None = Field(default=None, description="Every how manyth of them.")
    after: Count | None = Field(default=None, description="So many of them are spared at first.")
    times: Count | None = Field(default=None, description="It strikes so often at most.")

    def has(self, names: Sequence[str]) -> list[str]:
        """Return those of the conditions that are set."""
        return [name for name in names if getattr(self, name) not in (None, False)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.from_s is not None and self.until_s is not None and self.until_s <= self.from_s:
            raise ValueError(f"until_s {self.until_s:g} is not after from_s {self.from_s:g}")
        kinds = [name for names in (_OF_REQUESTS, ("method",), ("at_join",)) for name in self.has(names)[:1]]
        if len(kinds) > 1:
            raise ValueError(f"{' and '.join(kinds)} cannot hold of one thing: a request, a call and a join are three")
        return self


class Rule(BaseModel):
    """A fault, and when it strikes."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(pattern=f"^{RULE_NAME}$", description="Of the rule; left out it is that of the fault.")
    enabled: bool = Field(default=True, description="Whether it may strike at all.")
    when: When = Field(default=When(), description="When it strikes; left out is always.")
    what: AnyFault = Field(description="Name of a fault, or a mapping of `fault` and what that takes.")

    @model_validator(mode="before")
    @classmethod
    def _name_it(cls, value: object) -> object:
        if isinstance(value, Mapping) and "name" not in value:
            what = value.get("what")
            name = what.get("fault") if isinstance(what, Mapping) else what
            return {**value, "name": name} if isinstance(name, str) else value
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        when, what = self.when, self.what
        if isinstance(what, CallFault):
            wrong, of = when.has([*_OF_REQUESTS, "at_join"]), "calls"
        elif isinstance(what, JoinFault):
            wrong, of = when.has([*_OF_REQUESTS, "method", *_OF_TIME]), "joins"
        elif isinstance(what, EngineFault):
            wrong, of = [], ""
            if self.looks_at is Event.TIME and when.has(_COUNTING):
                raise ValueError(
                    f"{', '.join(when.has(_COUNTING))}: of what? (add min_prompt_tokens: 1, method or at_join: true)"
                )
        else:
            wrong, of = when.has(["method", "at_join"]), "requests"
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: {what.fault} strikes {of}, of which that cannot hold")
        return self

    @property
    def looks_at(self) -> Event:
        """Return what the rule looks at.

        What happens to the engine as a whole strikes with a request, a call or a join if there is a condition on one,
        at `from_s` if there is a time alone, and with a request if some of them are counted; without any condition it
        strikes only when somebody lets it.
        """
        when = self.when
        if isinstance(self.what, CallFault) or when.method is not None:
            return Event.CALL
        if isinstance(self.what, JoinFault) or when.at_join:
            return Event.JOIN
        if not isinstance(self.what, EngineFault) or when.has([*_OF_REQUESTS, *_COUNTING]):
            return Event.REQUEST
        return Event.TIME if when.has(_OF_TIME) else Event.NOTHING


class RulesError(ValueError):
    """Rules that cannot be used; `problems` has a line for each reason."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  ".join([f"the rules have {count}:", *problems]))


_RULES: Final = TypeAdapter(list[Rule])


def rules_of(located: Located, label: str | None = None) -> list[Rule]:
    """Make rules of what was read.

    Args:
        located: a list of rules, or a mapping whose `rules` are one.
        label: of the file, where problems have lines; None is a text, of which no line is told.

    Raises:
        RulesError: anything is wrong with them, all of it at once.

    """
    found = located.value
    place: Place = ()
    if isinstance(found, dict) and found.keys() == {"rules"}:
        found, place = found["rules"], ("rules",)
    problems: list[Problem] = []
    rules: list[Rule] = []
    if not isinstance(found, list):
        problems.append(Problem(located.line(place), "a list of rules is expected, each with what and perhaps when"))
    elif len(found) > MOST_RULES:
        problems.append(Problem(located.line(place), f"{len(found)} rules where at most {MOST_RULES} are allowed"))
    else:
        try:
            rules = _RULES.validate_python(found)
        except ValidationError as error:
            problems += _problems(error, located, place)
    seen: set[str] = set()
    for number, rule in enumerate(rules):
        if rule.name in seen:
            text = f"[{number}]: another rule has the name {rule.name} (give each a name of its own)"
            problems.append(Problem(located.line((*place, number)), text))
        seen.add(rule.name)
    if problems:
        raise RulesError(
            [each.text if label is None else f"{label}:{each.line}: {each.text}" for each in sorted(problems)]
        )
    return rules


def _problems(error: ValidationError, located: Located, place: Place) -> list[Problem]:
    problems = []
    for each in error.errors(include_url=False, include_input=False, include_context=False):
        inner = tuple(part for part in each["loc"] if not _is_tag(part))
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inner)
        text = each["msg"].removeprefix("Value error, ")
        if each["type"] in ("union_tag_invalid", "union_tag_not_found"):
            text = f"no fault has that name (there are {', '.join(NAMES)})"
        problems.append(Problem(located.line((*place, *inner)), f"{where}: {text}"))
    return problems


def _is_tag(part: str | int) -> bool:
    """Whether a part of a place is the name of a fault, which pydantic puts there and nobody has written."""
    return part in NAMES
