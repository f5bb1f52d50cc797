"""`sparkserve`, and `python -m sparkserve`: signals are taken before anything that costs time is imported."""

from sparkserve import signals


def main() -> None:
    """Run the command line."""
    signals.watch()
    from sparkserve import cli

    cli.main()


if __name__ == "__main__":
    main()
