"""The command line, with the flags of the real engine; an unknown flag is refused."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = "tensorfold"


@dataclass(frozen=True)
class Settings:
    """One rank's settings."""

    model: Path
    rank: int
    master: str
    master_port: int
    context: int
    parallel: int
    mtp_drafts: int
    thinking: bool
    vision: bool
    host: str
    port: int
    name: str
    aliases: tuple[str, ...]
    max_tokens: int
    api_key_file: Path | None
    metrics_open: bool

    @property
    def shared(self) -> dict[str, Any]:
        """What every rank must be given alike, by flag name."""
        return {
            "--vision": self.vision,
            "--parallel": self.parallel,
            "--context": self.context,
            "--mtp-drafts": self.mtp_drafts,
        }


def build_parser() -> argparse.ArgumentParser:
    """The parser of `tensorfold serve`."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="the lab's stand-in for TensorFold")
    serve = parser.add_subparsers(dest="command", required=True).add_parser("serve", help="serve one model")
    serve.add_argument("model", type=Path, help="folder with the weights")
    serve.add_argument("--tp", type=int, default=2, choices=[2], help="ranks in all")
    serve.add_argument("--rank", type=int, required=True, choices=[0, 1])
    serve.add_argument("--master", required=True, help="address of rank 0")
    serve.add_argument("--master-port", type=_port, default=29551)
    serve.add_argument("--context", type=_positive, default=1_048_576, help="tokens in the window")
    serve.add_argument("--parallel", type=_positive, default=1, help="requests that share a round")
    serve.add_argument("--vision", action="store_true")
    serve.add_argument("--no-update-check", action="store_true")
    serve.add_argument("--backend", choices=["cuda"], default="cuda")
    _add_drafts(serve)
    _add_thinking(serve)
    _add_server(serve)
    return parser


def _add_drafts(serve: argparse.ArgumentParser) -> None:
    drafts = serve.add_mutually_exclusive_group()
    drafts.add_argument("--mtp-drafts", type=int, default=5, choices=range(1, 9), metavar="N")
    drafts.add_argument("--no-drafts", dest="mtp_drafts", action="store_const", const=0)


def _add_thinking(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=True)


def _add_server(serve: argparse.ArgumentParser) -> None:
    http = serve.add_argument_group("rank 0")
    http.add_argument("--host", default="127.0.0.1")
    http.add_argument("--port", type=_port, default=8080)
    http.add_argument("--name", default="", help="model name to serve under (default: the folder's name)")
    http.add_argument("--alias", action="append", default=[], help="one more name; may be repeated")
    http.add_argument("--max-tokens", type=_positive, default=32_768, help="longest reply")
    http.add_argument("--api-key-file", type=Path, help="file with one key a line, mode 0600")
    http.add_argument("--metrics-open", action="store_true", help="metrics need no key")


def read_arguments(argv: list[str]) -> Settings:
    """Read the command line, or leave with exit 2 as argparse does."""
    given = build_parser().parse_args(argv)
    key_file = given.api_key_file or (Path(path) if (path := os.environ.get("TF_API_KEY_FILE")) else None)
    return Settings(
        model=given.model,
        rank=given.rank,
        master=given.master,
        master_port=given.master_port,
        context=given.context,
        parallel=given.parallel,
        mtp_drafts=given.mtp_drafts,
        thinking=given.thinking,
        vision=given.vision,
        host=given.host,
        port=given.port,
        name=given.name or given.model.resolve().name,
        aliases=tuple(given.alias),
        max_tokens=given.max_tokens,
        api_key_file=key_file,
        metrics_open=given.metrics_open,
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 65_535:
        raise argparse.ArgumentTypeError(f"{text} is not a port")
    return value
