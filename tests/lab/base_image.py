"""The base image of all that the lab's containers run: a small system of the machine's own release, with Python."""

import shutil
from pathlib import Path

from tests.lab.machine import LabError, command

NAME = "lab/python-base"
PACKAGES = "python3-minimal,libpython3-stdlib"
DROPPED = (
    "usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian", "usr/share/i18n",
    "usr/share/zoneinfo", "usr/lib/*/gconv", "var/lib/apt/lists", "var/cache", "var/log",
)  # fmt: skip


def tag() -> str:
    """The machine's release number."""
    return _release()["VERSION_ID"]


def archive(cache: Path) -> Path:
    """Return the image's file system as a tar, made on first use."""
    path = cache / f"python-base-{tag()}.tar"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        folder = cache / "python-base"
        shutil.rmtree(folder, ignore_errors=True)
        _bootstrap(folder)
        _strip(folder)
        fresh = path.with_suffix(".new")
        command("tar", "--create", "--numeric-owner", "--sort=name", "--file", fresh, "--directory", folder, ".")
        fresh.replace(path)
        shutil.rmtree(folder)
    return path


def _bootstrap(folder: Path) -> None:
    namespaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child")  # nothing stays mounted, whatever happens
    codename = _release()["VERSION_CODENAME"]
    options = ("--variant=minbase", f"--include={PACKAGES}")
    command(*namespaces, "debootstrap", *options, codename, folder, _mirror(codename))


def _mirror(codename: str) -> str:
    """Ask apt where it fetches this release's main packages from."""
    form = "$(CODENAME) $(COMPONENT) $(REPO_URI)"
    for line in command("apt-get", "indextargets", "--format", form, "Created-By: Packages").splitlines():
        suite, component, address = line.split()
        if (suite, component) == (codename, "main"):
            return address
    raise LabError(f"apt knows no source of {codename} main: apt-get update")


def _strip(folder: Path) -> None:
    for pattern in DROPPED:
        for place in folder.glob(pattern):
            for entry in place.iterdir():
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    for cached in list(folder.rglob("__pycache__")):
        shutil.rmtree(cached)


def _release() -> dict[str, str]:
    pairs = (line.partition("=")[::2] for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return {name: value.strip('"') for name, value in pairs}
