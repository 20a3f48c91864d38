# SPDX-License-Identifier: Apache-2.0
"""What differs between vLLM's release lines, as one table (protocol sections 12 and 13b, and the released classes).

Arrays carry no field names, so both sides must agree on positions. A *line* is a run of releases with the same
layouts. The ADD a frontend sends tells its line, sometimes only down to a few: then the layout is what those have in
common, which all of them understand.

Schema rules the table rests on: positions were only appended, except where a row says otherwise; an array may be
shorter than its layout, never longer: a Rust frontend dies of one surplus item.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

_HEAD = (
    "request_id",
    "new_token_ids",
    "new_logprobs",
    "new_prompt_logprobs_tensors",
    "pooling_output",
    "finish_reason",
    "stop_reason",
    "events",
    "kv_transfer_params",
)
_OUTPUT_0_19 = (
    *_HEAD,
    "trace_headers",
    "num_cached_tokens",
    "num_external_computed_tokens",
    "routed_experts",
    "num_nans_in_logits",
)
# prefill_stats replaced the two counts.
_OUTPUT_0_20 = (*_HEAD, "trace_headers", "prefill_stats", "routed_experts", "num_nans_in_logits")
# ec_transfer_params was inserted, not appended.
_OUTPUT_0_26 = (
    *_HEAD,
    "ec_transfer_params",
    "trace_headers",
    "prefill_stats",
    "routed_experts",
    "num_nans_in_logits",
)
_OUTPUT_0_28 = (*_OUTPUT_0_26, "mm_cache_miss_hashes", "new_sampling_mask")
_OUTPUT_0_29 = (*_OUTPUT_0_28, "spec_decode_metrics")
_OUTPUT_0_33 = (*_OUTPUT_0_29, "prompt_token_id_logprobs", "error")


@dataclass(frozen=True, slots=True)
class Line:
    """One release line, or what several lines have in common.

    Attributes:
        name: the first release of the line; `"0.21|0.26"` for what two lines share.
        add_items: items of an EngineCoreRequest.
        output_fields: fields of an EngineCoreOutput by position; a longer array kills a Rust frontend.
        has_weight_version: whether position 8 of EngineCoreOutputs exists.
        wake_up_returns_bool: whether `wake_up` answers a bool (else nil); the wrong one is an HTTP 500 in Rust.
        stats_have_encoder_cache_usage: whether the stats map must hold `encoder_cache_usage`.
        rust_sampling_key: key of SamplingParams that Rust frontends always send from this line on.
        own_method: utility method that frontends call from this line on.
        output_positions: where each of `output_fields` is.

    """

    name: str
    add_items: int
    output_fields: tuple[str, ...]
    has_weight_version: bool = False
    wake_up_returns_bool: bool = False
    stats_have_encoder_cache_usage: bool = False
    rust_sampling_key: str | None = None
    own_method: str | None = None
    output_positions: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        positions = {name: position for position, name in enumerate(self.output_fields)}
        object.__setattr__(self, "output_positions", positions)


LINES: Final = (
    Line("0.19", 17, _OUTPUT_0_19, stats_have_encoder_cache_usage=True),
    Line("0.20", 18, _OUTPUT_0_20),
    Line("0.21", 20, _OUTPUT_0_20),
    Line("0.26", 20, _OUTPUT_0_26),
    Line("0.28", 21, _OUTPUT_0_28),
    Line("0.29", 21, _OUTPUT_0_29, rust_sampling_key="routed_experts_prompt_start"),
    # Rust 0.31 and 0.32 accept the item more that 0.33 has; the envelope's ninth item kills 0.31.
    Line("0.31", 22, _OUTPUT_0_33, wake_up_returns_bool=True),
    Line("0.32", 22, _OUTPUT_0_33, has_weight_version=True, wake_up_returns_bool=True),
    Line(
        "0.33",
        22,
        _OUTPUT_0_33,
        has_weight_version=True,
        wake_up_returns_bool=True,
        own_method="pause_generation",
    ),
)
"""Every line, oldest first."""

OLDEST: Final = LINES[0]
NEWEST: Final = LINES[-1]


def line_of_release(release: str) -> Line:
    """Return the line that a release such as `"0.27.1"` belongs to; later releases speak the newest line known.

    Raises:
        ValueError: no release number, or one older than the oldest line.

    """
    wanted = _release_key(release)
    lines = [line for line in LINES if _release_key(line.name) <= wanted]
    if not lines:
        raise ValueError(f"vLLM {release} is older than {OLDEST.name}, the oldest line spoken here")
    return lines[-1]


def lines_of_add(items: int, sampling_keys: AbstractSet[str], *, from_python: bool) -> tuple[Line, ...]:
    """Return the lines that a frontend may be of, oldest first.

    Args:
        items: length of its EngineCoreRequest. A length between two known ones belongs to the older, one beyond all
            to the newest.
        sampling_keys: keys of its SamplingParams.
        from_python: whether a Python frontend sent it. That one ignores surplus items, so of lines that only differ
            by appended ones the newest serves all.

    """
    known = [line.add_items for line in LINES if line.add_items <= items] or [OLDEST.add_items]
    lines = tuple(line for line in LINES if line.add_items == max(known))
    newest = lines[-1]
    if from_python:
        only_appended = all(newest.output_fields[: len(line.output_fields)] == line.output_fields for line in lines)
        return (newest,) if only_appended else lines
    if newest.rust_sampling_key is None:
        return lines
    return (newest,) if newest.rust_sampling_key in sampling_keys else lines[:-1]


def in_common(lines: tuple[Line, ...]) -> Line:
    """Return the layout that all of `lines` understand: the positions on which they agree.

    Where they disagree on an answer rather than a position, the newest decides.
    """
    newest = lines[-1]
    if len(lines) == 1:
        return newest
    positions = zip(*(line.output_fields for line in lines), strict=False)
    agreed = takewhile(lambda names: len(set(names)) == 1, positions)
    return Line(
        name="|".join(line.name for line in lines),
        add_items=newest.add_items,
        output_fields=tuple(names[0] for names in agreed),
        has_weight_version=all(line.has_weight_version for line in lines),
        wake_up_returns_bool=newest.wake_up_returns_bool,
        stats_have_encoder_cache_usage=any(line.stats_have_encoder_cache_usage for line in lines),
    )


def _release_key(release: str) -> tuple[int, int]:
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


ANY: Final = in_common(LINES)
"""What every line understands; spoken before a frontend has shown its own."""
