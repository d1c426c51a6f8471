"""Durations, learning rate and intervals are functions of the samples seen."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.config import Optim, Train
from multimodal.train.schedule import Schedule, plan, to_steps

BATCH, DATA = 7, 101


def schedule(total=100, warmup=10, **changes):
    base = Schedule(
        batch_size=BATCH,
        data_size=DATA,
        total_steps=total,
        warmup_steps=warmup,
        peak_lr=0.5,
        final_lr=0.1,
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("duration", "steps"),
    [
        ("40 steps", 40),
        ("3 epochs", math.ceil(3 * DATA / BATCH)),
        ("0.5 epochs", math.ceil(DATA / 2 / BATCH)),
        ("70 samples", 10),
        ("71 samples", 11),
        ("1e3 samples", math.ceil(1000 / BATCH)),
        ("5%", 10),
    ],
)
def test_a_duration_is_the_fewest_steps_that_cover_it(duration, steps):
    assert to_steps(duration, batch_size=BATCH, data_size=DATA, total_steps=200) == steps


def test_the_rate_rises_to_the_peak_and_falls_to_the_final_share():
    s = schedule()
    assert s.lr(0) == pytest.approx(0.05)
    assert s.lr(9) == s.lr(10) == 0.5
    assert s.lr(55) == pytest.approx(0.5 * (0.1 + 0.9 / 2))
    assert s.lr(99) == pytest.approx(0.05, rel=0.01)
    assert s.lr(100) == pytest.approx(0.05)
    rates = [s.lr(step) for step in range(100)]
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)


def test_without_warm_up_the_first_step_has_the_peak_rate():
    assert schedule(warmup=0).lr(0) == 0.5


def test_the_rate_is_positive_at_every_step_even_when_it_ends_at_zero():
    assert all(schedule(final_lr=0.0).lr(step) > 0 for step in range(100))


@given(
    every=st.sampled_from(
        [
            *("1 steps", "3 steps", "0.1 epochs", "1 epochs", "2.5 epochs"),
            *("1 samples", "50 samples", "1e9 samples", "5%", "33%"),
        ]
    ),
    total=st.integers(1, 90),
)
def test_something_happens_once_for_each_interval_and_once_at_the_end(every, total):
    s = schedule(total=total)
    times = [step for step in range(1, total + 1) if s.is_time(every, step)]
    period = {"steps": BATCH, "epochs": DATA, "samples": 1}.get(every.split()[-1])
    value = float(every.rstrip("%").split()[0])
    samples = period * value if period else total * BATCH * value / 100
    expected = {math.ceil(n * samples / BATCH - 1e-9) for n in range(1, 10_000)}
    assert set(times) == {step for step in expected if step < total} | {total}


def test_null_means_only_at_the_end():
    assert [step for step in range(1, 101) if schedule().is_time(None, step)] == [100]


def test_minutes_are_counted_by_the_clock():
    s = schedule()
    assert not s.is_time("10 min", 5, minutes=(3.0, 9.9))
    assert s.is_time("10 min", 5, minutes=(9.9, 10.1))
    assert s.is_time("10 min", 5, minutes=(19.0, 41.0))
    assert s.is_time("10 min", 100, minutes=(0.0, 0.0))


def test_the_plan_does_not_depend_on_how_a_batch_is_shared():
    s = plan(
        Train(batch_size=20, duration="3 epochs"), Optim(lr=1e-3, warmup="10%"), data_size=1000
    )
    assert (s.total_steps, s.warmup_steps, s.samples(150), s.epoch(25)) == (150, 15, 3000, 0.5)


@pytest.mark.parametrize(
    ("duration", "data_size", "message"),
    [
        ("0 epochs", DATA, "at least 1 step"),
        ("50%", DATA, "cannot be a share of itself"),
        ("3 epochs", 0, "no sample"),
    ],
)
def test_a_run_without_length_is_refused(duration, data_size, message):
    with pytest.raises(ValueError, match=message):
        plan(Train(duration=duration), Optim(), data_size=data_size)


def test_a_warm_up_longer_than_the_run_is_told(caplog):
    plan(Train(duration="20 steps"), Optim(warmup="2000 steps"), data_size=DATA)
    assert "will not reach" in caplog.text
