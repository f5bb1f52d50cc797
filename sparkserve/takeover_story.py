"""The stories of a pair that a script of the owner's started: writing it down, and comparing it with ours."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import SecretStr, ValidationError

from sparkserve import blueprint, image, link, takeover_facts
from sparkserve.against import Difference, Wanted, compare
from sparkserve.cluster import ROLES, Cluster, Deployment, Node, Role, connect
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
from sparkserve.takeover import Pair, Served, Takeover, find_pair, translate
from sparkserve.takeover_facts import Facts, Running
from sparkserve.takeover_texts import API_KEY, find_secrets

_HEADING = "# Written by `sparkserve init --from-running`. docs/recipes.md explains every key.\n"
# Where engines listen that are not told a port.
_USUAL_PORTS = (8000, 8080, 8888, 30000)


@dataclass(frozen=True)
class Taken:
    """What was written: the recipe, the settings, the files with secrets; and how to end the pair that runs."""

    recipe: Path
    env_file: Path
    settings: Mapping[str, str]
    secret_files: tuple[Path, ...]
    pair: Mapping[Role, str]
    stop: Mapping[Role, str]
    notes: tuple[str, ...]


def take_over(loaded: Loaded, text: str, directory: Path, *, force: bool = False) -> Taken:
    """Write the recipe of the pair that runs, and then its settings, onto the `text` of a settings file.

    On the nodes only its image gets one more name.
    """
    settings, env_file = loaded.settings, loaded.env_file
    _check_overrides(loaded)
    directory = directory.expanduser().resolve()
    if (directory / "recipe.toml").exists() and not force:
        raise usage_error("recipe_exists", f"{directory} holds a recipe already", "--recipe-dir DIR, or --force")
    with connect(settings) as cluster:
        links = cluster.on_both(link.gather)
        _check_link(links)
        facts = cluster.on_both(takeover_facts.gather)
        pair = find_pair(facts)
        found = translate(pair, facts, links, _look_at_api(pair))
        _check_secrets(found)
        recipe = _write_recipe(directory, found)
        _name_image(cluster, pair, image.tag_of(recipe, _write_lock(directory, env_file, recipe)))
    lines, secret_files = _write_secrets(env_file.parent, found)
    lines = {"recipe": str(directory), "api_host": "127.0.0.1", **lines}
    for name, value in lines.items():
        text = put(text, name, value)
    LocalHost("head").write(env_file, text.encode(), 0o600)
    both: dict[Role, Running] = {"head": pair.head, "worker": pair.worker}
    return Taken(
        recipe=directory / "recipe.toml",
        env_file=env_file,
        settings={variable_name(name): value for name, value in lines.items()},
        secret_files=secret_files,
        pair={role: running.name for role, running in both.items()},
        stop={role: running.stop_hint for role, running in both.items()},
        notes=found.notes,
    )


def _check_overrides(loaded: Loaded) -> None:
    """Refuse settings that would change what was read from the pair."""
    names = (
        "model_name",
        "context",
        "requests",
        "drafts",
        "thinking",
        "api_port",
        "master_port",
        "image",
        "extra_args",
    )
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


def _look_at_api(pair: Pair) -> Served:
    """Ask for what their arguments leave open: the port, and the name of the model."""
    told = pair.told()
    if {"ports.api", "model_name"} <= told.keys():
        return Served(None, None)
    secrets = find_secrets(pair.head, pair.family.label)
    key = next((value for value, name in secrets.items() if name == API_KEY), None)
    host = told.get("api_host", "")
    host = host if host not in ("", "0.0.0.0", "::") else "127.0.0.1"  # noqa: S104 - compared
    for port in [int(told["ports.api"])] if told.get("ports.api", "").isdigit() else _USUAL_PORTS:
        endpoint = Endpoint(f"http://{host}:{port}", "", SecretStr(key) if key else None)
        try:
            names = endpoint.models()
        except SparkserveError:  # another port may answer; that none does is told where the answer is needed
            continue
        finally:
            endpoint.close()
        return Served(port, names[0] if names else None)
    return Served(None, None)


def _write_recipe(directory: Path, found: Takeover) -> Recipe:
    text = to_toml(found.recipe)
    try:
        recipe = Recipe.model_validate({**tomllib.loads(text), "directories": [directory]})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        message = f"no recipe can say what runs: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        hint = "the model's directory must be mounted into both containers"
        raise SparkserveError("takeover_recipe", message, hint, exit_code=EXIT_NOT_READY) from error
    directory.mkdir(parents=True, exist_ok=True)
    LocalHost("head").write(directory / "recipe.toml", (_HEADING + text).encode())
    return recipe


def _write_lock(directory: Path, env_file: Path, recipe: Recipe) -> Lock:
    """Write the recipe's own lock; that of another recipe is put aside under the name that it then has."""
    lock = Lock(schema=1, recipe=recipe.name, weights=(), image=LockedImage(reference=recipe.image.reference))
    main = lock_path(env_file)
    if main.exists() and recipe_of(main) != recipe.name:
        main.replace(main.with_name(f"sparkserve.{recipe_of(main) or 'broken'}.lock.json"))
    for path in (directory / NAME, main):
        write_lock(path, lock)
    return lock


def _name_image(cluster: Cluster, pair: Pair, tag: str) -> None:
    """Give the image that runs our name on both nodes, so that a start has nothing to build, pull or ship."""

    def name(node: Node) -> None:
        running = pair.head if node.role == "head" else pair.worker
        node.host.run(["docker", "tag", running.image_id, tag])

    cluster.on_both(name)


def _check_secrets(found: Takeover) -> None:
    broken = [name for name, value in found.secrets.items() if len(value.splitlines()) != 1]
    if broken:
        raise usage_error("secret_invalid", f"{', '.join(broken)} of theirs is more than one line of text")


def _write_secrets(directory: Path, found: Takeover) -> tuple[dict[str, str], tuple[Path, ...]]:
    """Write each kind of secret to a file that only its owner can read; gives the settings that name them."""
    settings, files = dict(found.settings), []
    others = {name: value for name, value in found.secrets.items() if name != API_KEY}
    texts = {"api_key_file": f"{found.secrets[API_KEY]}\n"} if API_KEY in found.secrets else {}
    texts |= {"secrets_file": "".join(f"{name}={quote(value)}\n" for name, value in others.items())} if others else {}
    for setting, text in texts.items():
        path = directory / f"taken-over.{'api-key' if setting == 'api_key_file' else 'secrets'}"
        LocalHost("head").write(path, text.encode(), 0o600)
        settings[setting] = str(path)
        files.append(path)
    return settings, tuple(files)


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
        specs = blueprint.build_specs(Deployment(settings, recipe, known, cluster), links)
        running = _find_running(cluster.on_both(takeover_facts.gather))
        reference = known.image.reference
        wanted = {
            node.role: Wanted(
                with_secrets(specs[node.role], read_secrets(settings)),
                reference,
                _image_id(node, specs[node.role].image),
            )
            for node in cluster.nodes
        }
    rows = [row for role in ROLES for row in compare(running[role], wanted[role])]
    secrets = _all_secrets(settings, running)
    shown = [replace(row, theirs=mask(row.theirs, secrets), ours=mask(row.ours, secrets)) for row in rows]
    return Comparison(tuple(shown), {role: running[role].name for role in ROLES})


def _find_running(facts: Mapping[Role, Facts]) -> dict[Role, Running]:
    ours = {role: one for role in ROLES for one in facts[role].running if one.is_ours}
    if ours.keys() == set(ROLES):
        return ours
    try:
        pair = find_pair(facts)
    except SparkserveError as error:
        if error.code == "takeover_none":
            error.message, error.hint = (
                "no pair runs on these nodes, neither ours nor one of others",
                "sparkserve start",
            )
        raise
    return {"head": pair.head, "worker": pair.worker}


def _image_id(node: Node, name: str) -> str:
    page = f"/images/{name}/json"
    answer = node.session.ask("facts", docker=[page])["docker"][page]
    return str(answer["body"]["Id"]) if answer.get("status") == 200 else ""


def _all_secrets(settings: Settings, running: Mapping[Role, Running]) -> list[SecretStr]:
    theirs = [SecretStr(value) for one in running.values() for value in find_secrets(one, "")]
    return [*read_secrets(settings).values(), *theirs]
