"""Run one command inside a running node: `enter.py PID USER LOG ARGV...` (LOG: `-`, or a path to leave a daemon).

A file of its own without imports from the lab, so that it starts in a few hundredths of a second.
"""

import ctypes
import os
import pwd
import signal
import sys
from types import FrameType

NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # mount, UTS, IPC, PID, network
SET_PARENT_DEATH_SIGNAL = 1
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

LIBC = ctypes.CDLL(None, use_errno=True)


def join_namespaces(pid: int) -> None:
    """Join the namespaces of a node's first process; the PID namespace holds for children only."""
    if LIBC.setns(os.pidfd_open(pid), NAMESPACES) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the namespaces of process {pid}")


def become(user: str) -> None:
    """Take the user's identity, environment and home folder, as a login would."""
    account = pwd.getpwnam(user)
    os.initgroups(user, account.pw_gid)
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)
    os.chdir(account.pw_dir)
    os.umask(0o022)
    login = {"HOME": account.pw_dir, "USER": user, "LOGNAME": user, "SHELL": account.pw_shell}
    for name, value in {**login, "PATH": SEARCH_PATH, "LANG": "C.UTF-8"}.items():
        os.environ.setdefault(name, value)


def execute(argv: list[str]) -> None:
    """Replace this process by the command, with every signal as a shell would hand it over; never returns."""
    for number in (*FORWARDED, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)


def become_daemon(log: str) -> None:
    """Leave the caller for good: a new session, no input, output to the log, the node's first process as parent."""
    os.setsid()
    if os.fork():
        os._exit(0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)


def start_child(user: str, log: str, argv: list[str]) -> int:
    """Fork the command into the node and return its process id."""
    child = os.fork()
    if child:
        return child
    if log != "-":
        become_daemon(log)
    become(user)
    if log == "-":  # killing the outer process must not leave the inner one; set after setuid, which clears it
        LIBC.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    execute(argv)
    return 0


def main() -> None:
    """Join, start, forward signals, and end as the command ended."""
    pid, user, log, *argv = sys.argv[1:]
    join_namespaces(int(pid))
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    child = start_child(user, log, argv)

    def forward(number: int, _frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
