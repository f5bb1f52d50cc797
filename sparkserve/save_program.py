"""`docker save` without the layers that the other node has: the program between the engine and the stream.

Standard library only. Its arguments: names of files that are left out, in one word, and the command whose archive it
passes on. A name that is not in the archive leaves nothing out. It ends as that command does.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Collection
from typing import IO

BLOCK = 1 << 20


def sift(source: IO[bytes], target: IO[bytes], left_out: Collection[str]) -> None:
    """Pass an archive on, member by member, as it comes."""
    with (
        tarfile.open(fileobj=source, mode="r|", bufsize=BLOCK) as whole,
        tarfile.open(fileobj=target, mode="w|", bufsize=BLOCK) as thin,
    ):
        for member in whole:
            if member.name not in left_out:
                thin.addfile(member, whole.extractfile(member) if member.isreg() else None)
    while source.read(BLOCK):  # a writer that is cut off in its padding would say that it failed
        pass


def main(words: list[str]) -> int:
    """Run the command and pass its archive on; a half archive is as bad as none, and the command tells why."""
    left_out, *argv = words
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as command:
        if command.stdout is None:
            raise RuntimeError("no pipe")
        try:
            sift(command.stdout, sys.stdout.buffer, left_out.split())
        except tarfile.TarError as error:
            sys.stderr.write(f"not an archive: {error}\n")
            return command.wait() or 1
    return command.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
