"""Both ends prove the secret, in four messages, and nothing else opens a connection."""

import os

import pytest

from replicator.errors import AuthenticationError
from replicator.rpc.security import authentication
from replicator.rpc.security.authentication import ClientHandshake, ServerHandshake
from replicator.rpc.security.secret import Secret

SECRET = Secret.generate()


def shake(server, client):
    client.finish(server.verify(client.answer(server.challenge(client.hello()))))


def transcript(server, client):
    hello = client.hello()
    challenge = server.challenge(hello)
    answer = client.answer(challenge)
    return hello, challenge, answer, server.verify(answer)


def changed(message, place):
    return message[:place] + bytes([message[place] ^ 1]) + message[place + 1 :]


def test_ends_with_one_secret_meet():
    shake(
        ServerHandshake(SECRET, binding="unix"), ClientHandshake(SECRET, binding="unix")
    )


def test_each_message_has_its_fixed_size():
    sizes = [
        len(m) for m in transcript(ServerHandshake(SECRET), ClientHandshake(SECRET))
    ]
    assert sizes == [
        authentication.HELLO_BYTES,
        authentication.CHALLENGE_BYTES,
        authentication.ANSWER_BYTES,
        authentication.WELCOME_BYTES,
    ]


def test_no_message_holds_the_secret_or_comes_twice():
    said = transcript(ServerHandshake(SECRET), ClientHandshake(SECRET))
    again = transcript(ServerHandshake(SECRET), ClientHandshake(SECRET))
    assert not set(said) & set(again)
    assert not any(SECRET._key[:8] in message for message in said)


def test_a_server_refuses_another_secret():
    server, client = ServerHandshake(SECRET), ClientHandshake(Secret.generate())
    with pytest.raises(AuthenticationError, match="a client did not prove"):
        shake(server, client)


def test_a_client_is_told_that_it_was_refused():
    server, client = ServerHandshake(SECRET), ClientHandshake(Secret.generate())
    with pytest.raises(AuthenticationError):
        server.verify(client.answer(server.challenge(client.hello())))
    with pytest.raises(AuthenticationError, match="the server refused this process"):
        client.finish(server.refusal)


def test_a_client_refuses_a_server_that_does_not_know_the_secret():
    client, impostor = ClientHandshake(SECRET), ServerHandshake(Secret.generate())
    challenge = impostor.challenge(client.hello())
    client.answer(challenge)
    lie = transcript(ServerHandshake(SECRET), ClientHandshake(SECRET))[-1]
    with pytest.raises(AuthenticationError, match="the server did not prove"):
        client.finish(lie)


@pytest.mark.parametrize("bindings", [("unix", "grpc:1"), ("grpc:1", "grpc:2")])
def test_a_proof_for_one_transport_or_port_is_none_for_another(bindings):
    server = ServerHandshake(SECRET, binding=bindings[0])
    client = ClientHandshake(SECRET, binding=bindings[1])
    with pytest.raises(AuthenticationError):
        shake(server, client)


def test_a_replayed_answer_opens_nothing():
    hello, _, answer, _ = transcript(ServerHandshake(SECRET), ClientHandshake(SECRET))
    server = ServerHandshake(SECRET)
    server.challenge(hello)
    with pytest.raises(AuthenticationError):
        server.verify(answer)


def test_a_replayed_welcome_opens_nothing():
    _, challenge, _, welcome = transcript(
        ServerHandshake(SECRET), ClientHandshake(SECRET)
    )
    client = ClientHandshake(SECRET)
    client.hello()
    client.answer(challenge)
    with pytest.raises(AuthenticationError):
        client.finish(welcome)


def test_a_server_as_an_oracle_answers_no_challenge_of_its_own():
    """A peer without the secret sends back whatever the server says."""
    server = ServerHandshake(SECRET)
    hello = ClientHandshake(Secret.generate()).hello()
    challenge = server.challenge(hello)
    with pytest.raises(AuthenticationError):
        server.verify(challenge)


def test_a_client_does_not_take_its_own_proof_for_the_servers():
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET)
    answer = client.answer(server.challenge(client.hello()))
    for reflected in (answer, answer.replace(b"rpc-an", b"rpc-ok")):
        client._transcript = server._transcript
        with pytest.raises(AuthenticationError):
            client.finish(reflected)


def test_a_client_does_not_take_its_own_hello_for_a_challenge():
    client = ClientHandshake(SECRET)
    with pytest.raises(AuthenticationError, match="Check the address"):
        client.answer(client.hello())


def test_an_answer_may_be_tried_once():
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET)
    answer = client.answer(server.challenge(client.hello()))
    with pytest.raises(AuthenticationError):
        server.verify(changed(answer, 20))
    with pytest.raises(AuthenticationError):
        server.verify(answer)


def test_no_message_may_come_before_its_turn():
    with pytest.raises(AuthenticationError):
        ServerHandshake(SECRET).verify(bytes(authentication.ANSWER_BYTES))
    server = ServerHandshake(SECRET)
    challenge = server.challenge(ClientHandshake(SECRET).hello())
    with pytest.raises(AuthenticationError):
        ClientHandshake(SECRET).answer(challenge)
    with pytest.raises(AuthenticationError):
        ClientHandshake(SECRET).finish(bytes(authentication.WELCOME_BYTES))


def shake_with_a_change(turn, place):
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET)
    message = client.hello()
    for number, step in enumerate(
        [server.challenge, client.answer, server.verify, client.finish]
    ):
        message = step(changed(message, place) if number == turn else message)


@pytest.mark.parametrize("place", range(authentication.HELLO_BYTES))
def test_one_changed_bit_of_any_message_ends_it(place):
    for turn in range(4):
        with pytest.raises(AuthenticationError):
            shake_with_a_change(turn, place)


@pytest.mark.parametrize("size", [0, 1, 39, 41, 65_536])
def test_garbage_of_any_size_is_refused_by_both(size):
    garbage = os.urandom(size)
    client = ClientHandshake(SECRET)
    client.hello()
    for take in (ServerHandshake(SECRET).challenge, client.answer, client.finish):
        with pytest.raises(AuthenticationError):
            take(garbage)


def test_versions_that_differ_are_told_to_both():
    client = ClientHandshake(SECRET, peer="the server at unix:/x")
    newer = client.hello()[:6] + b"\0\2" + bytes(32)
    server = ServerHandshake(SECRET, peer="a client of process 7")
    with pytest.raises(
        AuthenticationError, match=r"process 7 speaks version 2.*version 1"
    ):
        server.challenge(newer)
    with pytest.raises(AuthenticationError, match=r"unix:/x speaks version 1.*Install"):
        client.answer(server.refusal)


def test_a_refusal_is_as_long_as_what_the_client_waits_for():
    server = ServerHandshake(SECRET)
    with pytest.raises(AuthenticationError):
        server.challenge(b"GET / HTTP/1.1\r\n")
    assert len(server.refusal) == authentication.CHALLENGE_BYTES
    client = ClientHandshake(SECRET)
    client.hello()
    with pytest.raises(AuthenticationError, match="not recognise this as a client"):
        client.answer(server.refusal)
