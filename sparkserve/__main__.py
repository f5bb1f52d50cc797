"""`sparkserve`, and `python -m sparkserve`: signals are taken before anything that costs time is imported."""

import gc
import sys

from sparkserve import signals


def main() -> None:
    """Run the command line."""
    signals.watch()
    # Imports make many objects and no garbage.
    gc.set_threshold(50_000)
    # paramiko wants it for one rule of SSH's configuration, which `ssh -G` reads for us; a third of its time.
    sys.modules["invoke"] = None  # type: ignore[assignment]
    from sparkserve import cli

    cli.main()


if __name__ == "__main__":
    main()
