"""The chat template on two nodes with directories of their own: fetched from a hub, patched, proved, kept, repaired."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkserve import chat_template, sources, template_proof
from sparkserve.cluster import Cluster, Deployment, Node
from sparkserve.errors import SparkserveError
from sparkserve.hosts import LocalHost
from sparkserve.lock import Lock, LockedImage
from sparkserve.plan import Plan, apply
from sparkserve.recipe import Recipe
from sparkserve.recipe_source import load_recipe
from sparkserve.settings import Settings
from tests.fakes import RecordingReporter
from tests.lab.hub import Hub
from tests.lab.model_repo import ENGRAM_NAME, MODEL_NAME, TEMPLATE_NAME, make_template_repo
from tests.lab.recipe import write_lab_recipe

EFFORTS_ON = ("minimal", "low", "medium", "high", "xhigh", "max")
# As strict as the public one: it knows three names of efforts, and thinks unless it is told not to.
STRICT = """
{%- set thinking = enable_thinking if enable_thinking is defined else true -%}
{%- set level = reasoning_effort if reasoning_effort is defined and reasoning_effort is not none else 'high' -%}
{%- if level is string and level not in ['low', 'high', 'max'] -%}{{ raise_exception('no such effort') }}{%- endif -%}
{%- for message in messages -%}[{{ message.role }}]{{ message.content }}{{ message.tool_calls | tojson
 if message.tool_calls is defined }}{%- endfor -%}
{%- if tools %}{{ tools | tojson }}{% endif -%}
{{ '<think>' ~ level if thinking else '</think>' }}
"""


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repos")
    make_template_repo(root)
    return root


@pytest.fixture
def hub(repos: Path) -> Iterator[Hub]:
    with Hub(repos, hub_name="", content_name="") as running:
        yield running


@pytest.fixture
def recipe(repos: Path, tmp_path: Path) -> Recipe:
    commits = {MODEL_NAME: "a" * 40, ENGRAM_NAME: "b" * 40, TEMPLATE_NAME: make_template_repo(repos).head}
    write_lab_recipe(tmp_path / "lab", commits=commits, engine_repository="none", base="none")
    return load_recipe(str(tmp_path / "lab"))


@pytest.fixture
def deployment(hub: Hub, recipe: Recipe, tmp_path: Path) -> Iterator[Deployment]:
    directories = {"cache_dir": tmp_path / "head", "worker_cache_dir": tmp_path / "worker"}
    settings = Settings.model_validate({"hf_endpoint": hub.endpoint, "models_dir": tmp_path / "models", **directories})
    assert recipe.chat_template is not None
    template = sources._find_template(settings, recipe.chat_template)
    lock = Lock(schema=1, recipe=recipe.name, weights=(), chat_template=template, image=LockedImage())
    cluster = Cluster(*(Node(role, LocalHost(role), settings) for role in ("head", "worker")))
    yield Deployment(settings, recipe, lock, cluster)
    for node in cluster.nodes:
        node.close()


def plan(deployment: Deployment) -> Plan:
    facts = deployment.cluster.on_both(lambda node: chat_template.gather(node, deployment))
    return Plan(tuple(chat_template.plan(deployment, facts)))


def carry_out(deployment: Deployment) -> RecordingReporter:
    reporter = RecordingReporter()
    apply(plan(deployment), reporter).raise_failures()
    return reporter


def places(deployment: Deployment) -> list[Path]:
    return [Path(chat_template.path_on(node, deployment)) for node in deployment.cluster.nodes]


def test_both_nodes_get_the_patched_template_once(deployment: Deployment, hub: Hub) -> None:
    wanted = plan(deployment)
    head, worker = wanted.changes
    assert (head.before, worker.before) == ("absent", "absent")
    assert worker.needs == (head.key,)
    assert hub.log()[-1]["path"].startswith("/api/"), "a plan fetches nothing"
    finished = [event for event in carry_out(deployment).events if event[0] == "finished"]
    assert "thinking is off unless asked for" in finished[0][2]
    contents = [path.read_bytes() for path in places(deployment)]
    assert contents[0] == contents[1]
    assert finished[1][2].endswith(f"sha256 {hashlib.sha256(contents[0]).hexdigest()[:12]}")
    assert contents[0].endswith(Path(__file__).parents[1].joinpath("lab/chat_template.jinja").read_bytes())
    assert plan(deployment).is_empty


def test_later_runs_need_no_network(deployment: Deployment, hub: Hub) -> None:
    carry_out(deployment)
    hub.fault("status", status=503)
    for path in places(deployment):
        path.unlink()
    assert len(plan(deployment).changes) == 2
    carry_out(deployment)
    assert plan(deployment).is_empty


@pytest.mark.parametrize("index", [0, 1])
def test_other_content_is_seen_and_repaired(deployment: Deployment, index: int) -> None:
    carry_out(deployment)
    path = places(deployment)[index]
    good = path.read_bytes()
    path.write_bytes(good.replace(b"false", b"true ", 1))
    (change,) = plan(deployment).changes
    assert change.node == ("head", "worker")[index]
    assert change.before == "not as it was made"
    carry_out(deployment)
    assert path.read_bytes() == good


def test_a_changed_original_is_fetched_again(deployment: Deployment, hub: Hub) -> None:
    carry_out(deployment)
    assert deployment.lock.chat_template is not None
    original = Path(chat_template.original_path(deployment.cluster.head, deployment.lock.chat_template))
    original.write_bytes(original.read_bytes()[:-1])
    places(deployment)[0].unlink()
    carry_out(deployment)
    assert sum("/resolve/" in entry["path"] for entry in hub.log()) == 2
    assert plan(deployment).is_empty


@pytest.mark.parametrize(
    ("fault", "options", "code"),
    [
        ("wrong_byte", {"offset": 100}, "template_differs"),
        ("short", {"at_byte": 50}, "template_differs"),
        ("status", {"status": 403}, "hub_gated"),
        ("status", {"status": 429}, "hub_limit"),
        ("cut", {"at_byte": 50}, "source_unreachable"),
    ],
)
def test_what_is_not_the_locked_template_is_never_written(
    deployment: Deployment, hub: Hub, fault: str, options: dict[str, Any], code: str
) -> None:
    hub.fault(fault, match={"path_regex": "/resolve/"}, **options)
    with pytest.raises(SparkserveError) as caught:
        carry_out(deployment)
    assert caught.value.code == code
    assert not any(path.exists() for path in places(deployment))


def test_a_link_in_its_place_is_replaced(deployment: Deployment, tmp_path: Path) -> None:
    carry_out(deployment)
    path = places(deployment)[1]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert [(change.node, change.before) for change in plan(deployment).changes] == [("worker", "not as it was made")]
    carry_out(deployment)
    assert not path.is_symlink()
    assert plan(deployment).is_empty


def test_the_owner_decides_about_thinking(deployment: Deployment) -> None:
    carry_out(deployment)
    settings = deployment.settings.model_copy(update={"thinking": True})
    other = Deployment(settings, deployment.recipe, deployment.lock, deployment.cluster)
    assert chat_template.name_of(other) != chat_template.name_of(deployment)
    reporter = carry_out(other)
    assert any("thinking is on unless asked for" in str(event) for event in reporter.events)


def test_a_recipe_without_a_template_plans_nothing(deployment: Deployment) -> None:
    lock = deployment.lock.model_copy(update={"chat_template": None})
    bare = Deployment(deployment.settings, deployment.recipe, lock, deployment.cluster)
    assert plan(bare).is_empty


# -- the prologue and the proof ---------------------------------------------------------------------------------------


def patched(template: str, default: str = "false") -> bytes:
    prologue = load_recipe("tensorfold-1017").file("prologue.jinja").decode()
    return f"{{%- set default_thinking = {default} -%}}\n{prologue}{template}".encode()


def render(content: bytes, **variables: Any) -> str:
    compiled = template_proof._compile(content)
    return template_proof._render(compiled, "a question", [{"role": "user", "content": "hello"}], variables)


def lab_template() -> str:
    return Path(__file__).parents[1].joinpath("lab/chat_template.jinja").read_text()


@pytest.mark.parametrize("template", [STRICT, lab_template()], ids=["strict", "lab"])
def test_the_prologue_decides_what_requests_leave_open(template: str) -> None:
    content = patched(template)
    assert "<think>" not in render(content)
    assert "<think>" in render(content, enable_thinking=True)
    assert "<think>" not in render(content, reasoning_effort="none")
    assert "<think>" not in render(content, reasoning_effort=None)
    for effort in EFFORTS_ON:
        assert "<think>" in render(content, reasoning_effort=effort), effort
        assert "<think>" not in render(content, reasoning_effort=effort, enable_thinking=False)
    assert "<think>" in render(content, reasoning_effort="none", enable_thinking=True)
    assert "<think>" in render(patched(template, "true"))
    assert "<think>" not in render(patched(template, "true"), enable_thinking=False)
    assert render(content, enable_thinking=True).endswith(render(template.encode(), enable_thinking=True)[-20:])


def test_efforts_are_given_by_names_that_the_template_knows() -> None:
    levels = {effort: render(patched(STRICT), reasoning_effort=effort).strip()[-4:] for effort in EFFORTS_ON}
    known = {"minimal": ">low", "low": ">low", "medium": "high", "high": "high", "xhigh": ">max", "max": ">max"}
    assert levels == known
    assert render(patched(STRICT), reasoning_effort=60).strip().endswith("<think>60")
    with pytest.raises(SparkserveError, match="no such effort"):
        render(patched(STRICT), reasoning_effort="ultra")


def test_nothing_is_rendered_before_the_template() -> None:
    assert render(patched(STRICT), enable_thinking=True) == render(STRICT.encode(), enable_thinking=True)


def prove(content: bytes, default: bool | None = False) -> str:
    on, off = ({"chat_template_kwargs": {"enable_thinking": thinking}} for thinking in (True, False))
    return template_proof.prove(content, default=default, thinking_on=on, thinking_off=off)


def test_the_proof_names_the_efforts() -> None:
    assert prove(patched(STRICT)).endswith("efforts none, minimal, low, medium, high, xhigh, max")
    assert prove(STRICT.encode(), default=True).endswith("efforts low, high, max")


@pytest.mark.parametrize(
    ("content", "observed"),
    [
        (b"{% if %}", "no Jinja template"),
        (b"\xff\xfe", "no Jinja template"),
        (b"{{ raise_exception('never') }}", "does not render a plain question: never"),
        (b"{{ messages[0].content }}", "drops a message or the tools"),
        (b"{{ messages | tojson }}{{ tools | tojson }}", "render the same"),
        (STRICT.encode(), "says nothing of thinking is not rendered as thinking off"),
        (b"{{ messages.append(1) }}", "does not render"),
        (b"{{ ''.__class__.__mro__[1].__subclasses__() }}", "does not render"),
        (b"{{ 1 // 0 }}", "does not render"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(content: bytes, observed: str) -> None:
    with pytest.raises(SparkserveError, match=observed) as caught:
        prove(content)
    assert caught.value.code == "template_broken"
