"""Log lines: each is one unbuffered write to standard output, so that a killed rank has lost none."""

import os


def log(line: str) -> None:
    """Print one line at once."""
    os.write(1, f"{line}\n".encode())


def tag(line: str) -> None:
    """Print one line the way the engine itself speaks."""
    log(f"[tensorfold] {line}")
