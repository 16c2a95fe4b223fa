from replicator.rpc.keepalive import MAX_CALLS, Keepalive, Ping, Pong


def signs():
    return Keepalive("the server", heartbeat_s=1.0)


def test_pings_are_a_heartbeat_apart():
    known = signs()
    assert known.is_due(10.0)
    assert known.ping(10.0, [7]) == Ping(1, [7])
    assert not known.is_due(10.9)
    assert known.is_due(11.0)
    assert known.ping(11.0, [7, 8]) == Ping(2, [7, 8])


def test_a_pong_says_what_calls_do_and_which_are_unknown():
    known = signs()
    known.ping(0.0, [7, 8, 9])
    pong = known.pong(1, [[7, "runs", 1], [9, "waits", 2.5]])
    assert pong == Pong({7: ("runs", 1.0), 9: ("waits", 2.5)}, [8])


def test_an_old_pong_says_nothing():
    known = signs()
    known.ping(0.0, [7])
    known.ping(1.0, [7, 8])
    assert known.pong(1, []) == Pong({}, [])


def test_a_server_is_silent_from_the_first_ping_without_an_answer():
    known = signs()
    assert known.silent_s(100.0) == 0.0
    known.ping(10.0, [])
    assert known.silent_s(11.0) == 0.0
    known.ping(11.0, [])
    assert known.silent_s(13.5) == 3.5


def test_any_message_is_a_sign_of_life():
    known = signs()
    known.ping(0.0, [])
    known.hear()
    assert known.silent_s(100.0) == 0.0


def test_a_long_silence_is_logged_once_and_the_next_one_again(caplog):
    known = signs()
    for second in range(9):
        known.ping(float(second), [1, 2])
    assert caplog.text.count("the server has given no sign of life for 5.0 s") == 1
    known.hear()
    for second in range(20, 26):
        known.ping(float(second), [])
    assert caplog.text.count("no sign of life") == 2


def test_a_ping_names_the_oldest_of_too_many_calls():
    assert signs().ping(0.0, list(range(1000))).call_ids == list(range(MAX_CALLS))
