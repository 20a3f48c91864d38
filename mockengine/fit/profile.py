# SPDX-License-Identifier: Apache-2.0
"""The profile: a YAML file with the coefficients of a deployment, where they come from, and how far off they are.

The coefficients have the names and units of the settings that they stand for.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any, Final

_DIGITS: Final = 6
_HOW: Final = "make it with `mockengine fit`"
_HEAD: Final = (
    "# Made by `mockengine fit`, used with `timing: fitted`. Durations are in milliseconds, errors are fractions.\n"
)


class ProfileError(Exception):
    """A profile cannot be read or written; the text names file, cause and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Those of the step model, under the names and in the units of the settings."""

    step_base_ms: float
    step_ms_per_prefill_token: float
    step_ms_per_decode: float
    step_ms_per_context_token: float
    step_jitter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A deployment.

    Attributes:
        coefficients: what its steps cost.
        model: what it served.
        gpu: what it ran on, and how many of them.
        engine: what ran it, with its version.
        source: where the figures are published; nothing where `fit` has found them.
        max_num_seqs: what its scheduler was set to, as `fit` was told; 0 is unknown.
        max_num_batched_tokens: likewise.
        async_scheduling: likewise; None is unknown.
        overhead_ms: what a first token took besides the engine; not played, since the frontend in use has its own.
        most_decodes: requests that decoded at the same time in what was measured, at most; more is extrapolation. 0 is
            unknown.
        runs: what was measured, and the errors of the model on it.
        notes: what a person should know before relying on it.

    """

    coefficients: Coefficients
    model: str = ""
    gpu: str = ""
    engine: str = ""
    source: str = ""
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    async_scheduling: bool | None = None
    overhead_ms: float = 0.0
    most_decodes: int = 0
    runs: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def differences(self, *, max_num_seqs: int, max_num_batched_tokens: int, async_scheduling: bool) -> list[str]:
        """Return, in a sentence each, what was set otherwise, and whether more requests may decode together."""
        said = []
        if self.max_num_seqs not in (0, max_num_seqs):
            said.append(f"max_num_seqs: {max_num_seqs} here, {self.max_num_seqs} there")
        elif not self.max_num_seqs and 0 < self.most_decodes < max_num_seqs:
            said.append(
                f"max_num_seqs: {max_num_seqs} here, where steps of more than {self.most_decodes} decodes were not "
                f"measured: what they take is extrapolated ({self.most_decodes} or less avoids that)"
            )
        if self.max_num_batched_tokens not in (0, max_num_batched_tokens):
            said.append(f"max_num_batched_tokens: {max_num_batched_tokens} here, {self.max_num_batched_tokens} there")
        if self.async_scheduling not in (None, async_scheduling):
            here, there = str(async_scheduling).lower(), str(self.async_scheduling).lower()
            said.append(f"async_scheduling: {here} here, {there} there")
        return said


_NAMES: Final = (
    *(each.name for each in fields(Coefficients)),
    *(each.name for each in fields(Profile) if each.name != "coefficients"),
)
"""What a profile's file may hold."""


def save(profile: Profile, path: Path) -> None:
    """Write the profile to `path`; raises `ProfileError`."""
    import yaml  # noqa: PLC0415 - most processes have no profile and need not pay for this import

    values = {name: value for name, value in asdict(profile).items() if value not in ("", None)}
    document = values.pop("coefficients") | values
    text = _HEAD + yaml.safe_dump(_rounded(document), sort_keys=False, width=100, allow_unicode=True)
    try:
        path.write_text(text)
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror} (give a path that can be written)") from None


def load(path: Path) -> Profile:
    """Read a profile; raises `ProfileError`. Only coefficients are required, so that one can be written by hand."""
    import yaml  # noqa: PLC0415 - see above

    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror} (give the path of a profile, {_HOW})") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ProfileError(f"{path}: not YAML: {' '.join(str(error).split())} ({_HOW})") from None
    if not isinstance(document, dict):
        raise ProfileError(f"{path}: no profile, it holds a {type(document).__name__} ({_HOW})")
    unknown = sorted(str(name) for name in document if name not in _NAMES)
    if unknown:
        raise ProfileError(f"{path}: {unknown[0]}: no such entry (use some of {', '.join(_NAMES)})")
    is_async = document.get("async_scheduling")
    if is_async is not None and not isinstance(is_async, bool):
        raise ProfileError(f"{path}: async_scheduling: {is_async!r} is not allowed (use true or false)")
    return Profile(
        coefficients=Coefficients(
            **{each.name: _number(path, document, each.name) for each in fields(Coefficients)},
        ),
        **{name: _text(path, document, name) for name in ("model", "gpu", "engine", "source")},
        max_num_seqs=int(_number(path, document, "max_num_seqs", 0)),
        max_num_batched_tokens=int(_number(path, document, "max_num_batched_tokens", 0)),
        async_scheduling=is_async,
        overhead_ms=_number(path, document, "overhead_ms", 0),
        most_decodes=int(_number(path, document, "most_decodes", 0)),
        runs=list(_list(path, document, "runs")),
        notes=[str(note) for note in _list(path, document, "notes")],
    )


def _number(path: Path, document: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = document.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        shown = "missing" if value is None else f"{value!r} is not allowed"
        raise ProfileError(f"{path}: {name}: {shown} (use a number of 0 or more, or {_HOW})")
    return float(value)


def _text(path: Path, document: Mapping[str, Any], name: str) -> str:
    value = document.get(name, "")
    if not isinstance(value, str):
        raise ProfileError(f"{path}: {name}: {value!r} is not allowed (use text)")
    return value


def _list(path: Path, document: Mapping[str, Any], name: str) -> list[Any]:
    value = document.get(name) or []
    if not isinstance(value, list):
        raise ProfileError(f"{path}: {name}: {value!r} is not allowed (use a list)")
    return value


def _rounded(value: Any) -> Any:
    """Return `value` with all fractions shortened to what they are worth."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
