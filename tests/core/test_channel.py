from __future__ import annotations

import pytest

from autopipe.core.channel import Channel, ChannelClosedError, Doorbell


def test_messages_arrive_whole_and_in_order() -> None:
    ours, theirs = Channel.pair()
    big = {"ids": list(range(5000))}
    ours.send({"n": 1})
    ours.send(big)
    received = []
    while len(received) < 2:
        theirs.wait(5)
        message = theirs.receive()
        if message is not None:
            received.append(message)
    assert received == [{"n": 1}, big]


def test_receive_never_blocks() -> None:
    _, theirs = Channel.pair()
    assert theirs.receive() is None


def test_a_sender_never_waits_for_a_reader_that_does_not_read() -> None:
    ours, theirs = Channel.pair()
    big = {"ids": list(range(400_000))}
    ours.send(big)
    assert ours.flush(), "it should not have fitted into the socket's buffer"
    message = None
    while message is None:
        ours.flush()
        message = theirs.receive()
    assert message == big
    assert ours.flush() is False


def test_what_was_sent_before_closing_is_received_then_the_end_is_told() -> None:
    ours, theirs = Channel.pair()
    ours.send({"last": True})
    ours.close()
    assert theirs.receive() == {"last": True}
    with pytest.raises(ChannelClosedError):
        theirs.receive()


def test_sending_to_nobody_is_told() -> None:
    ours, theirs = Channel.pair()
    theirs.close()
    with pytest.raises(ChannelClosedError):
        ours.send({"n": 1})


def test_a_ring_before_the_wait_is_not_lost_and_many_are_one() -> None:
    import select

    bell = Doorbell.create()
    for _ in range(3):
        bell.ring()
    assert select.select([bell.read_descriptor], [], [], 0)[0]
    bell.silence()
    assert not select.select([bell.read_descriptor], [], [], 0)[0]
    bell.close()
