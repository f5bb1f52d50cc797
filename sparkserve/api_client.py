"""What an app needs to use the pair: address, model name, key, and commands that can be typed as they are."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from sparkserve import link
from sparkserve.addresses import is_loopback
from sparkserve.cluster import Node
from sparkserve.errors import usage_error
from sparkserve.hosts import LocalHost
from sparkserve.parameters import api_address, decide_parameters, decide_ports, read_api_key
from sparkserve.recipe import Recipe
from sparkserve.settings import Settings

_QUESTION = "Why is the sky blue?"


@dataclass(frozen=True)
class Access:
    """How the API is used: on the head, and from another machine once `tunnel`, if there is one, runs there."""

    base_url: str
    model: str
    key_file: Path | None
    remote_urls: tuple[str, ...]
    tunnel: str
    curl: str
    python: str


def describe_access(settings: Settings, recipe: Recipe, user: str, addresses: tuple[str, ...]) -> Access:
    """Say how to use the API; `addresses` are those at which others may reach the head."""
    port = decide_ports(settings, recipe).api
    base_url = f"{api_address(settings, recipe)}/v1"
    model = decide_parameters(settings, recipe).model_name
    read_api_key(settings)  # or nobody could use what is shown
    key_file = Path.cwd() / settings.api_key_file.expanduser() if settings.api_key_file else None
    host = addresses[0] if addresses else "HEAD"
    is_local = is_loopback(settings.api_host)
    open_to = addresses if ipaddress.ip_address(settings.api_host).is_unspecified else (settings.api_host,)
    target = f"[{settings.api_host}]" if ":" in settings.api_host else settings.api_host
    return Access(
        base_url,
        model,
        key_file,
        (base_url,) if is_local else tuple(f"http://{one}:{port}/v1" for one in open_to),
        f"ssh -N -L {port}:{target}:{port} {user}@{host}" if is_local else "",
        _curl(base_url, model, key_file),
        _python(base_url, model, key_file),
    )


def find_addresses(settings: Settings) -> tuple[str, tuple[str, ...]]:
    """Give the user of the head, and its addresses on other networks than the cable, those of default routes first."""
    head = Node("head", LocalHost("head"), settings)
    try:
        facts = link.gather(head)
        user = str(head.identity["user"])
    finally:
        head.close()
    ports = {facts.interface, facts.twin, *(device.interface for device in facts.devices)}
    outside = [one for one in facts.interfaces if one.up and not one.soft and one.name not in ports]
    outside.sort(key=lambda one: one.name not in facts.default_routes)
    return user, tuple(address for one in outside for address in one.addresses)


def _curl(base_url: str, model: str, key_file: Path | None) -> str:
    """Write a request for a shell; the key goes over standard input, where no list of processes shows it."""
    key = f"printf 'Authorization: Bearer %s' \"$(cat {quote(str(key_file))})\" | " if key_file else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "{_QUESTION}"}}]}}'
    headers = "-H 'Content-Type: application/json'" + (" -H @-" if key_file else "")
    return f"{key}curl {base_url}/chat/completions {headers} \\\n  -d {quote(body)}"


def _python(base_url: str, model: str, key_file: Path | None) -> str:
    """Write a request for the OpenAI SDK, which wants a key even where none is looked at."""
    key = f"Path({json.dumps(str(key_file))}).read_text().strip()" if key_file else '"none"'
    return "\n".join(
        [
            *(["from pathlib import Path", ""] if key_file else []),
            "from openai import OpenAI",
            "",
            f'client = OpenAI(base_url="{base_url}", api_key={key})',
            f'messages = [{{"role": "user", "content": "{_QUESTION}"}}]',
            f"reply = client.chat.completions.create(model={json.dumps(model)}, messages=messages)",
            "print(reply.choices[0].message.content)",
        ]
    )


def make_key(path: Path, *, dry_run: bool = False) -> None:
    """Write a new API key to a file that only its owner can read; one that is there is never replaced.

    A dry run refuses a file that is there and a directory that is not, and writes nothing.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if dry_run:
            if path in path.parent.iterdir():
                raise FileExistsError
            return
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"sk-{secrets.token_urlsafe(32)}\n")
        path.hardlink_to(beside)  # unlike a rename, never over a file that is there
    except FileExistsError as error:
        raise usage_error("key_exists", f"{path} is there already", "use it, or name another with --file") from error
    except OSError as error:
        raise usage_error("key_unwritable", f"cannot write {path}: {error.strerror}", "name another --file") from error
    finally:
        with contextlib.suppress(OSError):  # what kept it from being written is told already
            beside.unlink()
