"""The lab by hand: `python -m tests.lab up | down | status | exec NODE -- COMMAND | shell NODE | run -- COMMAND`."""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.lab.machine import LabError
from tests.lab.nodes import Lab, LabNode
from tests.lab.pair import HOME, paired

CHECKOUT = Path(__file__).parents[2]
OWNER = """
The pair is up: hub, registry, the engine's source, settings ({home}/.env) and a recipe ({home}/recipes/lab).
In another terminal:  python -m tests.lab shell head
and there, as its owner:  sparkserve doctor;  sparkserve up --dry-run;  sparkserve up
From the beginning:  sparkserve init spark@{worker} --recipe recipes/lab --force
Password of sudo: {password}. Ctrl-C here takes everything down."""


def main() -> int:
    """Do one thing with the lab of this checkout."""
    arguments = _parser().parse_args()
    lab = Lab.for_checkout(CHECKOUT)
    try:
        return _carry_out(lab, arguments)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        return 128 + int((*interrupt.args, signal.SIGINT)[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.lab")
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="bring both nodes up")
    up.add_argument(
        "--pair", action="store_true", help="with hub, recipe and settings, until Ctrl-C: to play the owner"
    )
    verbs.add_parser("down", help="end everything").add_argument("--purge", action="store_true", help="images too")
    verbs.add_parser("status", help="show addresses")
    verbs.add_parser("shell", help="a shell on a node")
    verbs.add_parser("exec", help="a command on a node")
    for verb in ("shell", "exec"):
        verbs.choices[verb].add_argument("node", choices=("head", "worker"))
        verbs.choices[verb].add_argument("--user", default=LabNode.user)
    verbs.add_parser("run", help="bring the lab up, run a command on the machine, take the lab down")
    verbs.add_parser("guard", help="run a command that makes the lab itself, take down what it leaves")
    for verb in ("exec", "run", "guard"):
        verbs.choices[verb].add_argument("command", nargs="+", metavar="COMMAND")
    return parser


def _carry_out(lab: Lab, arguments: argparse.Namespace) -> int:
    match arguments.verb:
        case "up" if arguments.pair:
            _play()
        case "up":
            lab.up()
        case "down":
            lab.down(purge=arguments.purge)
        case "status":
            return _status(lab)
        case "run":
            with lab.session():
                return subprocess.run(arguments.command, check=False).returncode
        case "guard":
            return guard(lab, arguments.command)
        case "shell":
            return _inside(lab, arguments, ["script", "--quiet", "--command", "bash --login", "/dev/null"])
        case "exec":
            return _inside(lab, arguments, arguments.command)
    return 0


def guard(lab: Lab, argv: list[str]) -> int:
    """Run a command, and take down the lab that it cannot take down itself: it hung, or Ctrl-C came twice."""
    signal.signal(signal.SIGINT, lambda *_: None)  # the terminal gives it to the command, too
    with subprocess.Popen(argv) as command:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: command.send_signal(number))
        code = command.wait()
    lab.down()
    return code if code >= 0 else 128 - code


def _play() -> None:
    """Keep a pair with all that is around it, until Ctrl-C, and say how to be its owner."""
    with paired(CHECKOUT) as pair:
        pair.head.run(["ln", "-sf", pair.command()[-1], "/usr/local/bin/sparkserve"], user="root")
        place = {"home": HOME, "worker": pair.worker.management_address, "password": pair.head.password}
        print(OWNER.format(**place), flush=True)
        while True:
            time.sleep(1)
            for node in pair.lab.nodes:
                _return_memory(node)


def _return_memory(node: LabNode) -> None:
    """Give back what a rank took of the node's figures that was killed: only the next one would."""
    note = node.root / "var/lib/lab/meminfo.taken"
    if note.exists() and not node.docker("ps", "-q"):
        note.unlink(missing_ok=True)
        node.set_meminfo(MemAvailable=119_000_000, MemFree=118_000_000)


def _inside(lab: Lab, arguments: argparse.Namespace, argv: list[str]) -> int:
    node = lab.head if arguments.node == "head" else lab.worker
    return node.popen(argv, user=arguments.user).wait()


def _status(lab: Lab) -> int:
    if not lab.is_up:
        print("down")
        return 1
    print(f"machine  {lab.gateway_address}")
    for node in lab.nodes:
        interfaces = (node.management_interface, node.link_interface, node.twin_interface)
        addresses = (node.management_address, node.link_address, node.twin_address)
        places = "  ".join(f"{interface} {address}" for interface, address in zip(interfaces, addresses, strict=True))
        print(f"{node.name:<7}  {node.hostname}  pid {node.pid}  {places}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
