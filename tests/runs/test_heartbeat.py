"""Who is frozen, who is slow, and who is not to blame."""

from memtrain.runs.heartbeat import FROZEN, GONE, LOST, OUTSIDE, SLOW, TRAINING, Beat, Watch


def beat(count: int, exchanges: int = 7, phase: int = TRAINING) -> Beat:
    return Beat(count, phase, 12, exchanges, "host")


def seconds_until_it_ends(
    watch: Watch, beats, *, own=lambda second: 7, most: int = 2 * int(LOST)
) -> tuple[int, str]:
    """Look once per second; when the run ends, and why."""
    for second in range(most):
        if reason := watch.judge(1.0, beats(second), own(second)):
            return second, reason
    return most, ""


def test_a_silent_process_ends_the_run_within_a_minute():
    watch = Watch(0, 3, main_keeps_store=True)
    after, reason = seconds_until_it_ends(watch, lambda s: [beat(s), beat(s), beat(min(s, 9))])
    assert FROZEN <= after - 9 <= 60
    assert reason == "process 2 (host, last seen at step 12) has not answered for 45 s"
    assert watch.speaks()


def test_the_first_live_process_reports():
    silent_main = [Watch(rank, 3, main_keeps_store=False) for rank in range(3)]
    for watch in silent_main:
        seconds_until_it_ends(watch, lambda s: [beat(0), beat(s), beat(s)])
    assert [watch.speaks() for watch in silent_main[1:]] == [True, False]


def test_heartbeats_suffice_during_long_steps():
    watch = Watch(0, 2, main_keeps_store=True)
    assert seconds_until_it_ends(watch, lambda s: [beat(s), beat(s)]) == (2 * LOST, "")
    assert not watch.slow()


def test_missing_heartbeats_are_ignored_while_collectives_succeed():
    watch = Watch(0, 2, main_keeps_store=True)
    found = seconds_until_it_ends(watch, lambda s: [beat(s), beat(0)], own=lambda second: second)
    assert found == (2 * LOST, "")


def test_a_slow_process_is_reported_and_ends_the_run_much_later():
    watch = Watch(0, 2, main_keeps_store=True)

    def beats(second: int) -> list[Beat]:
        return [beat(second, exchanges=8), beat(second)]

    assert seconds_until_it_ends(watch, beats, most=int(SLOW) - 1)[1] == "" == watch.slow()
    assert seconds_until_it_ends(watch, beats, most=3)[1] == ""
    assert "process 1 (host, last seen at step 12) keeps the others waiting" in watch.slow()
    assert not watch.slow(), "it is reported once"
    after, reason = seconds_until_it_ends(watch, beats)
    assert LOST - SLOW - 3 <= after <= LOST and "has kept the others waiting" in reason


def test_silence_is_allowed_outside_of_training_and_after_the_end():
    for phase, limit in ((OUTSIDE, LOST), (GONE, 2 * LOST)):
        watch = Watch(0, 2, main_keeps_store=True)
        silent = beat(0, phase=phase)
        after, reason = seconds_until_it_ends(watch, lambda s, silent=silent: [beat(s), silent])
        assert limit - 1 <= after <= limit and bool(reason) == (phase == OUTSIDE)


def test_an_unresponsive_store_is_blamed_on_the_main_process_or_the_launcher():
    for keeps, limit, who in ((True, FROZEN, "process 0"), (False, LOST, "the launcher")):
        watch = Watch(1, 3, main_keeps_store=keeps)
        watch.judge(1.0, [beat(0), beat(0), beat(0)], 7)
        after, reason = seconds_until_it_ends(watch, lambda second: None)
        assert limit - 2 <= after <= limit and reason.startswith(f"{who} has not answered")
        assert watch.speaks() is keeps  # the main process speaks, if it can
