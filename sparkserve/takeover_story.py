"""The stories of a pair that a script of the owner's started: writing it down, and comparing it with ours."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr, ValidationError

from sparkserve import blueprint, image_facts, link, takeover_facts
from sparkserve.against import Difference, Wanted, compare
from sparkserve.blueprint import Links
from sparkserve.cluster import ROLES, Deployment, Role, connect
from sparkserve.container import with_secrets
from sparkserve.endpoint import Endpoint
from sparkserve.env_file import put, quote
from sparkserve.errors import EXIT_NOT_READY, SparkserveError, usage_error
from sparkserve.hosts import LocalHost, mask
from sparkserve.lifecycle import Session, require_lock
from sparkserve.link import LinkFacts
from sparkserve.lock import NAME, Lock, LockedImage, lock_path, recipe_of, write_lock
from sparkserve.parameters import read_secrets
from sparkserve.recipe import Recipe
from sparkserve.recipe_text import to_toml
from sparkserve.settings import Loaded, Settings, variable_name
from sparkserve.takeover import Pair, Takeover, find_pair, translate
from sparkserve.takeover_facts import Facts, Running
from sparkserve.takeover_texts import API_KEY, find_secrets

if TYPE_CHECKING:
    from sparkserve.setup import Setup

_HEADING = "# Written by `sparkserve init --from-running`. docs/recipes.md explains every key.\n"
# Where engines listen that are not told a port.
_USUAL_PORTS = ("8000", "8080", "8888", "30000")


@dataclass(frozen=True)
class Taken:
    """What is written: the recipe and its text, the settings, the files with secrets; how to end the pair that runs."""

    recipe: Path
    text: str
    env_file: Path
    settings: Mapping[str, str]
    secret_files: tuple[Path, ...]
    pair: Mapping[Role, str]
    stop: Mapping[Role, str]
    notes: tuple[str, ...]


def take_over(setup: Setup, directory: Path, *, force: bool = False, dry_run: bool = False) -> Taken:
    """Write the recipe of the pair that runs, and then its settings, onto the text of the settings under way.

    On the nodes only its image gets one more name; until it has that, nothing is written. A dry run ends before that.
    """
    cluster, settings, env_file = setup.cluster, setup.loaded.settings, setup.loaded.env_file
    _check_overrides(setup.loaded)
    directory = directory.expanduser().resolve()
    if (directory / "recipe.toml").exists() and not force:
        raise usage_error("recipe_exists", f"{directory} holds a recipe already", "--recipe-dir DIR, or --force")
    links = cluster.on_both(link.gather)
    _check_link(links)
    facts = cluster.on_both(takeover_facts.gather)
    pair = find_pair(facts)
    found = translate(pair, facts, links, _look_at_api(pair))
    toml = _HEADING + to_toml(found.recipe)
    recipe = _parse_recipe(directory, toml)
    files = _secret_files(env_file.parent, found)
    lines = {"recipe": str(directory), "api_host": "127.0.0.1", **found.settings}
    lines |= {name: str(path) for name, (path, _) in files.items()}
    lock = Lock(schema=1, recipe=recipe.name, weights=(), image=LockedImage(reference=recipe.image.reference))
    wanted = Settings.model_validate({**settings.model_dump(), **lines})
    _check_equal(Deployment(wanted, recipe, lock, cluster), links, pair, found.secrets)
    for name, value in lines.items():
        setup.text = put(setup.text, name, value)
    if not dry_run:
        # With our name on the image a start has nothing to build, pull or ship.
        tag, head = image_facts.tag_of(recipe, lock), LocalHost("head")
        cluster.on_both(lambda node: node.host.run(["docker", "tag", pair.ranks[node.role].image_id, tag]))
        for path, content in files.values():
            head.write(path, content.encode(), 0o600)
        _write_locks((directory / NAME, lock_path(env_file)), lock)
        head.write(directory / "recipe.toml", toml.encode())
        head.write(env_file, setup.text.encode(), 0o600)
    return Taken(
        recipe=directory / "recipe.toml",
        text=toml,
        env_file=env_file,
        settings={variable_name(name): value for name, value in lines.items()},
        secret_files=tuple(path for path, _ in files.values()),
        pair={role: running.name for role, running in pair.ranks.items()},
        stop={role: running.stop_hint for role, running in pair.ranks.items()},
        notes=found.notes,
    )


def _check_overrides(loaded: Loaded) -> None:
    """Refuse settings that would change what was read from the pair."""
    own = ("model_name", "context", "requests", "drafts", "thinking")
    names = (*own, "api_port", "master_port", "image", "extra_args")
    set_here = [variable_name(name) for name in names if loaded.sources[name] != "default"]
    if set_here:
        message = f"{', '.join(set_here)} would change what the pair that runs was given"
        raise usage_error("takeover_settings", message, f"take it out of {loaded.env_file} and the environment")


def _check_link(links: Mapping[Role, LinkFacts]) -> None:
    for role in ROLES:
        if not links[role].interface:
            message = f"no interface of this node has the address {links[role].address or 'of the cable'}"
            hint = f"add --{role}-link ADDRESS; docs/network.md shows how to give its port one"
            raise SparkserveError("takeover_link", message, hint, role, exit_code=EXIT_NOT_READY)


def _look_at_api(pair: Pair) -> dict[str, str]:
    """Ask for what their arguments leave open: the port, and the name of the model; empty where nobody answers."""
    told = pair.told()
    if {"ports.api", "model_name"} <= told.keys():
        return {}
    secrets = find_secrets(pair.head, pair.family.label)
    key = next((SecretStr(value) for value, name in secrets.items() if name == API_KEY), None)
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - compared
    for port in [told["ports.api"]] if told.get("ports.api", "").isdigit() else _USUAL_PORTS:
        address = told.get("api_host", "")
        endpoint = Endpoint(f"http://{host.get(address, address)}:{port}", "", key)
        with contextlib.suppress(SparkserveError), contextlib.closing(endpoint):  # another port may answer
            return {"ports.api": port, "model_name": "".join(endpoint.models()[:1])}
    return {}


def _parse_recipe(directory: Path, toml: str) -> Recipe:
    try:
        return Recipe.model_validate({**tomllib.loads(toml), "directories": [directory]})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        message = f"no recipe can say what runs: {place or 'the whole'}: {first['msg']}"
        hint = f"start your own script without that {place}" if place else "mount the model's directory into both"
        raise SparkserveError("takeover_recipe", message, hint, exit_code=EXIT_NOT_READY) from error


def _check_equal(deployment: Deployment, links: Links, pair: Pair, secrets: Mapping[str, str]) -> None:
    """Refuse a pair of which our recipe would not make the very same one."""
    values = {name: SecretStr(value) for name, value in secrets.items()}
    images = {role: running.image_id for role, running in pair.ranks.items()}
    rows = [row for row in _differences(deployment, links, pair.ranks, values, images) if not row.reason]
    if rows:
        what = ", ".join(dict.fromkeys(f"{row.what} {row.name}".strip() for row in rows))
        hint = "start your own script without them, or with the same on both nodes; then this command again"
        told = [f"{row.node}: {row.what} {row.name}: {row.theirs}; ours would be {row.ours}" for row in rows]
        details = mask("\n".join(told), tuple(values.values()))
        message = f"no recipe can say all that runs: {what}"
        raise SparkserveError("takeover_unequal", message, hint, details=details, exit_code=EXIT_NOT_READY)


def _write_locks(paths: tuple[Path, Path], lock: Lock) -> None:
    """Write the recipe's own lock; that of another recipe is put aside under the name that it then has."""
    main = paths[-1]
    if main.exists() and recipe_of(main) != lock.recipe:
        main.replace(main.with_name(f"sparkserve.{recipe_of(main) or 'broken'}.lock.json"))
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lock(path, lock)


def _secret_files(directory: Path, found: Takeover) -> dict[str, tuple[Path, str]]:
    """Give by setting the files in which their secrets will be kept, with what each will hold."""
    broken = [name for name, value in found.secrets.items() if len(value.splitlines()) != 1]
    if broken:
        message = f"{', '.join(broken)} of theirs is more than one line of text"
        raise usage_error("secret_invalid", message, "mount it into both as a file, and start your own script again")
    others = "".join(f"{name}={quote(value)}\n" for name, value in found.secrets.items() if name != API_KEY)
    key = f"{found.secrets[API_KEY]}\n" if API_KEY in found.secrets else ""
    texts = {("api_key_file", "api-key"): key, ("secrets_file", "secrets"): others}
    return {name: (directory / f"taken-over.{kind}", text) for (name, kind), text in texts.items() if text}


# -- what runs against what we would run ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Every difference of both ranks, and the names of the containers that run."""

    differences: tuple[Difference, ...]
    pair: Mapping[Role, str]

    @property
    def unexplained(self) -> int:
        """How many differences have no reason."""
        return sum(not row.reason for row in self.differences)


def compare_with_running(session: Session) -> Comparison:
    """Compare the pair that runs, ours or another, with what a start would make; a secret shows as ***."""
    settings, recipe = session.settings, session.recipe
    known = require_lock(session)
    with connect(settings) as cluster:
        links = cluster.on_both(link.gather)
        running = _find_running(cluster.on_both(takeover_facts.gather))
        tagged = cluster.on_both(lambda node: image_facts.look(node, image_facts.tag_of(recipe, known)))
        images = {role: image.id if image else "" for role, image in tagged.items()}
        deployment = Deployment(settings, recipe, known, cluster)
        rows = _differences(deployment, links, running, read_secrets(settings), images)
    theirs = [SecretStr(value) for one in running.values() for value in find_secrets(one, "")]
    secrets = [*read_secrets(settings).values(), *theirs]
    shown = [replace(row, theirs=mask(row.theirs, secrets), ours=mask(row.ours, secrets)) for row in rows]
    return Comparison(tuple(shown), {role: running[role].name for role in ROLES})


def _differences(
    deployment: Deployment,
    links: Links,
    running: Mapping[Role, Running],
    secrets: Mapping[str, SecretStr],
    images: Mapping[Role, str],
) -> list[Difference]:
    specs, reference = blueprint.build_specs(deployment, links), deployment.lock.image.reference
    wanted = {role: Wanted(with_secrets(specs[role], secrets), reference, images[role]) for role in ROLES}
    return [row for role in ROLES for row in compare(running[role], wanted[role])]


def _find_running(facts: Mapping[Role, Facts]) -> dict[Role, Running]:
    ours = {role: one for role in ROLES for one in facts[role].running if one.is_ours}
    if ours.keys() == set(ROLES):
        return ours
    try:
        return find_pair(facts).ranks
    except SparkserveError as error:
        if error.code == "takeover_none":
            error.message = "no pair runs on these nodes, neither ours nor one of others"
            error.hint = "sparkserve start"
        raise
