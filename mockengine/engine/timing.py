# SPDX-License-Identifier: Apache-2.0
"""How long things take: either every step has a duration, or every request has moments of its own.

Time is never read here, and nothing is paced here: these are durations in seconds, and whoever keeps deadlines adds
them to deadlines. The random part of a duration is a function of the seed and of what the duration belongs to.
`docs/load-model.md` explains the formulas to users.
"""

from dataclasses import dataclass
from typing import Final, Literal, Protocol, Self, TypeAlias

from mockengine.engine.distributions import DistributionName, counter, distribution, mix

TimingName = Literal["instant", "per_request", "step", "fitted"]
"""The models of time that can be asked for; `fitted` is `step` with coefficients that `mockengine fit` found."""

_MS: Final = 1e-3
# Every kind of duration has a stream of its own, so that they are independent of each other and of the reply's tokens.
_FIRST_TOKEN: Final = 1
_PREFILL: Final = 2
_INTER_TOKEN: Final = 3
_STEP: Final = 4


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step of the scheduler computes.

    Attributes:
        prefill_tokens: prompt tokens computed in this step; those found in the prefix cache are not.
        decodes: requests that get another token in this step, having had their first one before.
        context_tokens: sum over these of the tokens they attend to, which are their prompt and what they said so far.

    """

    prefill_tokens: int
    decodes: int
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCoefficients:
    """What a step costs, in seconds: `base` + a · prefill tokens + b · decodes + c · context tokens."""

    base_s: float = 0.0
    per_prefill_token_s: float = 0.0
    per_decode_s: float = 0.0
    per_context_token_s: float = 0.0

    def duration_s(self, load: StepLoad) -> float:
        """Return how long a step with this load takes, without jitter."""
        return (
            self.base_s
            + self.per_prefill_token_s * load.prefill_tokens
            + self.per_decode_s * load.decodes
            + self.per_context_token_s * load.context_tokens
        )

    def scaled(self, factor: float) -> Self:
        """Return coefficients with which everything takes `factor` times as long."""
        return type(self)(
            base_s=factor * self.base_s,
            per_prefill_token_s=factor * self.per_prefill_token_s,
            per_decode_s=factor * self.per_decode_s,
            per_context_token_s=factor * self.per_context_token_s,
        )


class StepTiming(Protocol):
    """Every step has a duration, and all its tokens leave at its end."""

    def duration_s(self, load: StepLoad) -> float:
        """Return how long the next step takes, in seconds."""


class InstantSteps:
    """Steps that take no time."""

    def duration_s(self, load: StepLoad) -> float:  # noqa: ARG002 - the interface's; here it makes no difference
        """Return 0."""
        return 0.0


class LinearSteps:
    """Steps whose duration grows with their load, times a random factor of mean 1.

    The factor of step n depends on the seed, the rank and n alone.
    """

    def __init__(
        self, coefficients: StepCoefficients, jitter: float, distribution_name: DistributionName, seed: int, rank: int
    ) -> None:
        """Count the steps from 0 on; `jitter` is the standard deviation of the factor."""
        self._coefficients = coefficients
        self._factor = distribution(distribution_name, 1.0, jitter)
        self._stream = mix(_stream(seed, _STEP) + rank)
        self._steps = 0

    def duration_s(self, load: StepLoad) -> float:
        """Return how long the next step takes, in seconds."""
        factor = self._factor.draw(counter(self._stream, self._steps))
        self._steps += 1
        return factor * self._coefficients.duration_s(load)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingConfig:
    """The timing part of the settings, under the same names and with the same meaning.

    `fitted` means that the `step_…` values come from a profile. Values that the chosen model does not use are ignored.

    Attributes:
        time_scale: everything takes so many times as long.
        timing_distribution: how durations spread around their mean, where a standard deviation is set.
        step_jitter: standard deviation of a step's duration, as a fraction of its mean.

    """

    timing: TimingName = "per_request"
    time_scale: float = 1.0
    timing_distribution: DistributionName = "normal"
    ttft_ms: float = 0.0
    ttft_stddev_ms: float = 0.0
    prefill_ms_per_token: float = 0.0
    prefill_stddev_ms_per_token: float = 0.0
    itl_ms: float = 0.0
    itl_stddev_ms: float = 0.0
    time_factor_under_load: float = 1.0
    step_base_ms: float = 0.0
    step_ms_per_prefill_token: float = 0.0
    step_ms_per_decode: float = 0.0
    step_ms_per_context_token: float = 0.0
    step_jitter: float = 0.0


class RequestTiming:
    """Every request has moments of its own, whatever runs beside it, but for a factor that grows with the load.

    All durations are functions of the seed, the reply's key and the position, so they do not depend on the order in
    which they are asked for.
    """

    def __init__(self, config: TimingConfig, max_num_seqs: int, seed: int) -> None:
        """Read the durations of `config`; raises `ValueError` where one of mean 0 has a spread."""
        name, unit_s = config.timing_distribution, _MS * config.time_scale
        self._ttft = distribution(name, unit_s * config.ttft_ms, unit_s * config.ttft_stddev_ms)
        self._prefill = distribution(
            name, unit_s * config.prefill_ms_per_token, unit_s * config.prefill_stddev_ms_per_token
        )
        self._itl = distribution(name, unit_s * config.itl_ms, unit_s * config.itl_stddev_ms)
        self._streams = [_stream(seed, kind) for kind in (_FIRST_TOKEN, _PREFILL, _INTER_TOKEN)]
        self._itl_stream = self._streams[-1]
        self._factor_per_request = (config.time_factor_under_load - 1) / (max_num_seqs - 1) if max_num_seqs > 1 else 0.0
        self._max_num_seqs = max_num_seqs

    def load_factor(self, num_running: int) -> float:
        """Return by what all durations are multiplied while `num_running` requests run, the one in question included.

        1 + (time_factor_under_load - 1) · (num_running - 1) / (max_num_seqs - 1), which is how llm-d-inference-sim
        defines it: 1 for a request alone, `time_factor_under_load` for a full batch; always 1 if `max_num_seqs` is 1.
        """
        return 1 + self._factor_per_request * (min(max(num_running, 1), self._max_num_seqs) - 1)

    def first_token_s(self, key: int, uncached_prompt_tokens: int, load_factor: float = 1.0) -> float:
        """Return the time from when a request is scheduled to its first token, in seconds.

        Args:
            key: the reply's key.
            uncached_prompt_tokens: prompt tokens that the prefix cache does not hold.
            load_factor: what `load_factor()` returns.

        """
        first, prefill, _ = self._streams
        ttft_s = self._ttft.draw(counter(key ^ first, 0))
        return load_factor * (ttft_s + uncached_prompt_tokens * self._prefill.draw(counter(key ^ prefill, 0)))

    def inter_token_s(self, key: int, position: int, load_factor: float = 1.0) -> float:
        """Return the time from the token before to the one at `position` (1 is the second token), in seconds."""
        return load_factor * self._itl.draw(counter(key ^ self._itl_stream, position))


Timing: TypeAlias = RequestTiming | StepTiming
"""How long things take, by request or by step."""


def make_timing(config: TimingConfig, *, max_num_seqs: int, seed: int, rank: int = 0) -> Timing:
    """Return the model of time that `config` asks for.

    Args:
        config: which model, and its durations.
        max_num_seqs: requests in a full batch, at which `time_factor_under_load` is reached.
        seed: chooses the random part of all durations.
        rank: makes the steps of ranks differ in their random part.

    Raises:
        ValueError: a duration of mean 0 has a spread.

    """
    match config.timing:
        case "instant":
            return InstantSteps()
        case "per_request":
            return RequestTiming(config, max_num_seqs, seed)
        case "step" | "fitted":
            coefficients = StepCoefficients(
                base_s=_MS * config.step_base_ms,
                per_prefill_token_s=_MS * config.step_ms_per_prefill_token,
                per_decode_s=_MS * config.step_ms_per_decode,
                per_context_token_s=_MS * config.step_ms_per_context_token,
            ).scaled(config.time_scale)
            return LinearSteps(coefficients, config.step_jitter, config.timing_distribution, seed, rank)


def _stream(seed: int, kind: int) -> int:
    return mix(counter(mix(seed), kind))
