"""What a channel sends, in which order: sshd cuts the whole connection for anything that follows a close."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import paramiko
import pytest
from paramiko.common import MSG_CHANNEL_CLOSE, MSG_CHANNEL_EOF, MSG_CHANNEL_REQUEST

from sparkserve.ssh_host import SshProcess


class EndsMeanwhile:
    """A transport on which the command's own end arrives in the very moment in which we send our first message."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self.channel: Any = channel
        self.sent: list[int] = []
        self.arrival = threading.Thread(target=lambda: self.channel._handle_close(None))
        self.begun = False

    def _send_user_message(self, message: paramiko.Message) -> None:
        if not self.begun:
            self.begun = True
            self.arrival.start()
            self.arrival.join(0.3)
        self.sent.append(message.asbytes()[0])

    def _unlink_channel(self, number: int) -> None:
        assert number == 1

    def _sanitize_packet_size(self, size: int) -> int:
        return size

    def get_log_channel(self) -> str:
        return "paramiko.test"

    def is_active(self) -> bool:
        return True


def opened() -> tuple[SshProcess, EndsMeanwhile]:
    channel: Any = paramiko.Channel(1)
    transport = EndsMeanwhile(channel)
    channel._set_transport(transport)
    channel._set_window(1 << 20, 1 << 15)
    channel._set_remote_channel(1, 1 << 20, 1 << 15)
    return SshProcess("worker", channel, threading.Semaphore(0)), transport


@pytest.mark.parametrize(
    ("act", "first"),
    [
        (lambda process: process.stdin.close(), MSG_CHANNEL_EOF),
        (lambda process: process._end_input(), MSG_CHANNEL_EOF),
        (lambda process: process._send_signal("TERM"), MSG_CHANNEL_REQUEST),
    ],
)
def test_nothing_follows_a_close(act: Callable[[SshProcess], None], first: int) -> None:
    process, transport = opened()
    act(process)
    transport.arrival.join(10)
    assert transport.sent[0] == first
    assert transport.sent[-1] == MSG_CHANNEL_CLOSE
    act(process)
    assert transport.sent[-1] == MSG_CHANNEL_CLOSE
    process.close()
    assert transport.sent.count(MSG_CHANNEL_CLOSE) == 1
