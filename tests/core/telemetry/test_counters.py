from autopipe.core.telemetry.counters import (
    AskOnce,
    CounterRate,
    CounterTotal,
    Unreadable,
    Unsupported,
    counter_delta,
)


def test_delta_of_a_counter_that_wrapped_counts_both_sides_of_the_wrap():
    assert counter_delta(2**32 - 10, 5, 2**32) == 15


def test_delta_of_a_counter_that_was_reset_is_unknown():
    assert counter_delta(1000, 5, 2**64) is None


def test_total_goes_on_over_a_wrap():
    total = CounterTotal(joules_per_unit=0.5)
    total.update(96, 100)
    after = total.update(4, 100)
    assert (after.total_j, after.epoch) == (52.0, 0)


def test_total_after_a_reset_begins_a_new_epoch_and_does_not_fall():
    total = CounterTotal(joules_per_unit=1.0)
    total.update(1000, 2**64)
    after = total.update(3, 2**64)
    assert (after.total_j, after.epoch) == (1000.0, 1)
    assert total.update(8, 2**64).total_j == 1005.0


def test_rate_needs_two_readings():
    rate = CounterRate()
    assert rate.update(10.0, 100, 2**64) is None
    assert rate.update(12.0, 500, 2**64) == 200.0


def test_rate_after_a_reset_is_unknown_once():
    rate = CounterRate()
    rate.update(1.0, 1000, 2**64)
    assert rate.update(2.0, 10, 2**64) is None
    assert rate.update(3.0, 30, 2**64) == 20.0


def test_rate_forgets_a_gap():
    rate = CounterRate()
    rate.update(1.0, 1000, 2**64)
    rate.forget()
    assert rate.update(2.0, 2000, 2**64) is None


def _raises(error, calls):
    def ask():
        calls.append(1)
        raise error("no")

    return ask


def test_unsupported_figures_are_asked_once():
    ask, calls = AskOnce("cuda:0"), []
    assert [ask("power", _raises(Unsupported, calls)) for _ in range(3)] == [None] * 3
    assert len(calls) == 1


def test_unreadable_figures_are_asked_again():
    ask, calls = AskOnce("cuda:0"), []
    assert [ask("power", _raises(Unreadable, calls)) for _ in range(3)] == [None] * 3
    assert len(calls) == 3


def test_second_way_is_asked_when_the_first_is_unsupported():
    ask, calls = AskOnce("cuda:0"), []
    assert [ask("power", _raises(Unsupported, calls), lambda: 7) for _ in range(3)] == [7] * 3
    assert len(calls) == 1
