# SPDX-License-Identifier: Apache-2.0
"""How long things take: means, spreads, load, and that the seed decides."""

from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist, fmean, pstdev

import pytest

from mockengine.engine.distributions import DistributionName, counter, distribution
from mockengine.engine.timing import (
    LinearSteps,
    RequestTiming,
    StepLoad,
    TimingConfig,
    TimingName,
    make_timing,
)

DRAWS = 20_000
KEY = 0xFEDCBA9876543210
NAMES: tuple[DistributionName, ...] = ("normal", "lognormal", "gamma")
PER_REQUEST = TimingConfig(
    ttft_ms=100.0,
    ttft_stddev_ms=20.0,
    prefill_ms_per_token=0.5,
    prefill_stddev_ms_per_token=0.1,
    itl_ms=20.0,
    itl_stddev_ms=5.0,
)
STEP = TimingConfig(
    timing="step",
    step_base_ms=8.0,
    step_ms_per_prefill_token=0.05,
    step_ms_per_decode=0.1,
    step_ms_per_context_token=3e-5,
)


def per_request(config: TimingConfig = PER_REQUEST, *, max_num_seqs: int = 256, seed: int = 1) -> RequestTiming:
    timing = make_timing(replace(config, timing="per_request"), max_num_seqs=max_num_seqs, seed=seed)
    assert isinstance(timing, RequestTiming)
    return timing


def steps(config: TimingConfig = STEP, *, seed: int = 1, rank: int = 0) -> LinearSteps:
    timing = make_timing(config, max_num_seqs=256, seed=seed, rank=rank)
    assert isinstance(timing, LinearSteps)
    return timing


def draws(name: DistributionName, mean: float, stddev: float) -> list[float]:
    durations = distribution(name, mean, stddev)
    return [durations.draw(counter(KEY, position)) for position in range(DRAWS)]


# Distributions.


@pytest.mark.parametrize(
    ("name", "mean", "stddev"),
    [
        ("normal", 20.0, 5.0),
        ("lognormal", 20.0, 5.0),
        ("lognormal", 20.0, 20.0),
        ("gamma", 20.0, 5.0),
        ("gamma", 20.0, 20.0),
        ("gamma", 20.0, 50.0),
        ("gamma", 0.02, 0.001),
    ],
)
def test_draws_have_the_mean_and_the_spread_asked_for(name: DistributionName, mean: float, stddev: float) -> None:
    drawn = draws(name, mean, stddev)
    # Four standard errors of a mean; a spread is known the less, the heavier the tail.
    assert fmean(drawn) == pytest.approx(mean, abs=4 * stddev / DRAWS**0.5)
    assert pstdev(drawn) == pytest.approx(stddev, rel=0.01 if stddev < mean else 0.06)


@pytest.mark.parametrize("mean", [10.0, 20.0, 30.0])
def test_what_a_normal_distribution_loses_below_zero_raises_its_mean(mean: float) -> None:
    stddev = 10.0
    standard, ratio = NormalDist(), mean / stddev
    expected = mean + stddev * standard.pdf(ratio) / standard.cdf(ratio)
    assert fmean(draws("normal", mean, stddev)) == pytest.approx(expected, abs=4 * stddev / DRAWS**0.5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stddev", [0.0, 1.0, 10.0, 100.0])
def test_nothing_is_ever_below_zero(name: DistributionName, stddev: float) -> None:
    assert min(draws(name, 10.0, stddev)) >= 0


def test_extreme_counters_give_finite_durations() -> None:
    for name in NAMES:
        durations = distribution(name, 1.0, 3.0)
        assert all(0 <= durations.draw(each) < 1e6 for each in (0, 1, 2**63, 2**64 - 1))


@pytest.mark.parametrize("name", NAMES)
def test_shape_is_that_of_the_distribution(name: DistributionName) -> None:
    mean, stddev = 20.0, 10.0
    # The 99th percentile tells them apart: 2.33 stddev above the mean (less cut off), and known from tables.
    expected = {"normal": 43.4, "lognormal": 53.7, "gamma": 50.2}[name]
    assert sorted(draws(name, mean, stddev))[DRAWS * 99 // 100] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_neighbours_have_nothing_in_common(name: DistributionName) -> None:
    drawn = draws(name, 20.0, 5.0)
    mean = fmean(drawn)
    products = fmean([(one - mean) * (other - mean) for one, other in pairwise(drawn)])
    assert abs(products) / 25.0 < 4 / DRAWS**0.5


@pytest.mark.parametrize("name", NAMES)
def test_without_a_spread_every_draw_is_the_mean(name: DistributionName) -> None:
    assert set(draws(name, 12.5, 0.0)) == {12.5}


@pytest.mark.parametrize("name", NAMES)
def test_a_mean_of_zero_cannot_spread(name: DistributionName) -> None:
    with pytest.raises(ValueError, match="a mean of 0 cannot have a standard deviation of 5"):
        distribution(name, 0.0, 5.0)


# By request.


def test_only_uncached_prompt_tokens_take_time() -> None:
    timing = per_request(replace(PER_REQUEST, ttft_stddev_ms=0, prefill_stddev_ms_per_token=0))
    assert timing.first_token_s(KEY, 0) == pytest.approx(0.1)
    assert timing.first_token_s(KEY, 1_000) == pytest.approx(0.6)


def test_durations_of_a_request_do_not_depend_on_what_was_asked_before() -> None:
    timing = per_request()
    forwards = [timing.inter_token_s(KEY, position) for position in range(1, 50)]
    timing.first_token_s(KEY + 1, 10)
    again = per_request()
    backwards = [again.inter_token_s(KEY, position) for position in range(49, 0, -1)]
    assert forwards == backwards[::-1]
    assert again.first_token_s(KEY, 7) == timing.first_token_s(KEY, 7)


def test_seed_key_and_position_choose_the_durations() -> None:
    timing, other = per_request(seed=1), per_request(seed=2)
    durations = {
        timing.inter_token_s(KEY, 1),
        timing.inter_token_s(KEY, 2),
        timing.inter_token_s(KEY + 1, 1),
        other.inter_token_s(KEY, 1),
        timing.first_token_s(KEY, 0) / 5,
    }
    assert len(durations) == 5


def test_requests_have_the_mean_durations_asked_for() -> None:
    timing = per_request(replace(PER_REQUEST, timing_distribution="gamma"))
    firsts = [timing.first_token_s(key, 200) for key in range(10_000)]
    assert fmean(firsts) == pytest.approx(0.2, rel=0.005)
    # Two independent parts, 20 ms and 200 times 0.1 ms.
    assert pstdev(firsts) == pytest.approx((0.02**2 + 0.02**2) ** 0.5, rel=0.03)
    assert fmean([timing.inter_token_s(KEY, each) for each in range(10_000)]) == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize(("running", "factor"), [(0, 1.0), (1, 1.0), (6, 2.0), (11, 3.0), (20, 3.0)])
def test_load_factor_grows_from_one_request_to_a_full_batch(running: int, factor: float) -> None:
    timing = per_request(replace(PER_REQUEST, time_factor_under_load=3.0), max_num_seqs=11)
    assert timing.load_factor(running) == pytest.approx(factor)


def test_a_batch_of_one_knows_no_load() -> None:
    timing = per_request(replace(PER_REQUEST, time_factor_under_load=3.0), max_num_seqs=1)
    assert timing.load_factor(1) == 1.0


def test_load_multiplies_every_duration() -> None:
    timing = per_request()
    assert timing.inter_token_s(KEY, 3, 2.5) == pytest.approx(2.5 * timing.inter_token_s(KEY, 3))
    assert timing.first_token_s(KEY, 30, 2.5) == pytest.approx(2.5 * timing.first_token_s(KEY, 30))


# By step.


def test_a_step_costs_what_its_load_costs() -> None:
    assert steps().duration_s(StepLoad(0, 0, 0)) == pytest.approx(8e-3)
    assert steps().duration_s(StepLoad(1_000, 10, 20_000)) == pytest.approx(8e-3 + 50e-3 + 1e-3 + 0.6e-3)


def test_throughput_saturates() -> None:
    timing = steps(replace(STEP, step_ms_per_context_token=0))
    rates = [batch / timing.duration_s(StepLoad(0, batch, 0)) for batch in (1, 10, 100, 1_000, 10_000)]
    gains = [after / before for before, after in pairwise(rates)]
    assert gains == sorted(gains, reverse=True)
    # Ten times the requests bring hardly any more tokens, of 10 000 a second at most.
    assert gains[-1] < 1.08
    assert rates[-1] < 10_000


def test_jitter_spreads_steps_around_their_mean() -> None:
    timing = steps(replace(STEP, step_jitter=0.1, timing_distribution="lognormal"))
    durations = [timing.duration_s(StepLoad(0, 20, 0)) for _ in range(10_000)]
    assert fmean(durations) == pytest.approx(10e-3, rel=0.005)
    assert pstdev(durations) == pytest.approx(1e-3, rel=0.03)


def test_jitter_of_step_n_depends_on_seed_rank_and_n_alone() -> None:
    config = replace(STEP, step_jitter=0.2)
    load, heavy = StepLoad(0, 1, 100), StepLoad(8_000, 200, 100_000)
    one, other = steps(config), steps(config)
    one.duration_s(load)
    other.duration_s(heavy)
    assert one.duration_s(load) == other.duration_s(load)
    firsts = {steps(config, seed=seed, rank=rank).duration_s(load) for seed in (1, 2) for rank in (0, 1)}
    assert len(firsts) == 4


# All of it.


@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_time_scale_stretches_everything(scale: float) -> None:
    plain, scaled = per_request(), per_request(replace(PER_REQUEST, time_scale=scale))
    assert scaled.first_token_s(KEY, 50) == pytest.approx(scale * plain.first_token_s(KEY, 50))
    assert scaled.inter_token_s(KEY, 5) == pytest.approx(scale * plain.inter_token_s(KEY, 5))
    load = StepLoad(10, 20, 3_000)
    config = replace(STEP, step_jitter=0.1)
    expected = scale * steps(config).duration_s(load)
    assert steps(replace(config, time_scale=scale)).duration_s(load) == pytest.approx(expected)


def test_instant_steps_take_no_time() -> None:
    timing = make_timing(replace(STEP, timing="instant"), max_num_seqs=256, seed=0)
    assert not isinstance(timing, RequestTiming)
    assert timing.duration_s(StepLoad(8_192, 256, 100_000)) == 0.0


@pytest.mark.parametrize("name", ["step", "fitted"])
def test_fitted_is_the_step_model(name: TimingName) -> None:
    assert steps(replace(STEP, timing=name)).duration_s(StepLoad(0, 10, 0)) == pytest.approx(9e-3)
