"""Run as root inside a fresh node: the owner's account, sudo, SSH, and the stub commands, as on a new DGX Spark."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

USER, UID, HOME = "spark", 1000, Path("/home/spark")
PASSWORD = "a-password-of-the-lab"
CAP_SYS_RESOURCE = 1 << 24
STUBS = Path("/usr/local/lib/lab/stub.py")
STUB_NAMES = ("nvidia-smi", "ibdev2netdev", "systemctl", "swapoff", "swapon", "nvidia-container-runtime-hook")
SUDOERS = """Defaults env_reset
Defaults secure_path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
Defaults use_pty
root ALL=(ALL:ALL) ALL
%sudo ALL=(ALL:ALL) ALL
"""
SSHD_CONFIG = """HostKey /etc/ssh/ssh_host_ed25519_key
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM yes
X11Forwarding yes
PrintMotd no
AcceptEnv LANG LC_*
Subsystem sftp /usr/lib/openssh/sftp-server
"""
ENVIRONMENT = (
    'PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/games:/usr/local/games:/snap/bin"\n'
)
RELEASE = 'DGX_NAME="DGX Spark"\nDGX_PRETTY_NAME="NVIDIA DGX Spark"\nDGX_PLATFORM="DGX Server for KVM"\n'


@dataclass(frozen=True)
class Furniture:
    """What a node is given by the lab."""

    hostname: str
    addresses: list[str]
    user_key: str
    user_public_key: str
    host_key: str
    host_public_key: str
    authorized_key: str
    stub: str
    runc: str
    python_folders: list[str]

    def to_json(self) -> str:
        """Write it down for the node."""
        return json.dumps(asdict(self))


def main() -> None:
    """Read what to do from standard input and do it."""
    furniture = Furniture(**json.load(sys.stdin))
    open_parents(furniture.python_folders)
    make_account()
    make_sudo()
    make_user_ssh(furniture)
    make_sshd(furniture)
    make_names(furniture.hostname)
    install_stubs(furniture.stub)
    if not may_raise_limits():
        write(Path("/usr/local/sbin/runc"), furniture.runc, 0o755)


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file anew; never through a link that the machine's own system may have there."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=mode)
    path.write_text(text)
    path.chmod(mode)


def open_parents(folders: list[str]) -> None:
    """Let the owner reach the Python that runs sparkserve, wherever the machine keeps it."""
    for folder in folders:
        for parent in Path(folder).parents:
            if not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o001)


def make_account() -> None:
    """Make uid 1000 the owner, in the groups docker and sudo."""
    passwd = read_table("/etc/passwd")
    replaced = {row[0] for row in passwd if row[2] == str(UID)} | {USER}
    passwd = [row for row in passwd if row[0] not in replaced]
    passwd.append([USER, "x", str(UID), str(UID), "", str(HOME), "/bin/bash"])
    shadow = [row for row in read_table("/etc/shadow") if row[0] not in replaced]
    shadow.append([USER, password_hash(), "20000", "0", "99999", "7", "", "", ""])
    groups = [row for row in read_table("/etc/group") if row[2] != str(UID) and row[0] != USER]
    groups.append([USER, "x", str(UID), ""])
    for name in ("docker", "sudo"):
        group = next(row for row in groups if row[0] == name)
        group[3] = USER
    for path, rows, mode in (
        ("/etc/passwd", passwd, 0o644),
        ("/etc/shadow", shadow, 0o640),
        ("/etc/group", groups, 0o644),
    ):
        write(Path(path), "".join(":".join(row) + "\n" for row in rows), mode)
    shutil.copytree("/etc/skel", HOME, dirs_exist_ok=True)
    own(HOME)


def read_table(path: str) -> list[list[str]]:
    """Split one of the account files into its fields."""
    return [line.split(":") for line in Path(path).read_text().splitlines() if line.strip()]


def password_hash() -> str:
    """Hash the owner's password as passwd(1) would."""
    done = subprocess.run(
        ["openssl", "passwd", "-6", "-stdin"], input=PASSWORD, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def own(folder: Path) -> None:
    """Give a folder and all below it to the owner."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, UID, UID, follow_symlinks=False)


def make_sudo() -> None:
    """Ask for the password, whatever the machine's own rules say."""
    shutil.rmtree("/etc/sudoers.d", ignore_errors=True)
    write(Path("/etc/sudoers"), SUDOERS, 0o440)


def make_user_ssh(furniture: Furniture) -> None:
    """Give the owner a key pair and the other node's key."""
    folder = HOME / ".ssh"
    folder.mkdir(mode=0o700)
    write(folder / "id_ed25519", furniture.user_key, 0o600)
    write(folder / "id_ed25519.pub", furniture.user_public_key)
    write(folder / "authorized_keys", furniture.authorized_key, 0o600)
    own(folder)


def make_sshd(furniture: Furniture) -> None:
    """Replace the machine's SSH identity and settings by the node's."""
    for path in Path("/etc/ssh").glob("ssh_host_*"):
        path.unlink()
    shutil.rmtree("/etc/ssh/sshd_config.d", ignore_errors=True)
    listen = "".join(f"ListenAddress {address}\n" for address in furniture.addresses)
    write(Path("/etc/ssh/sshd_config"), listen + SSHD_CONFIG)
    write(Path("/etc/ssh/ssh_host_ed25519_key"), furniture.host_key, 0o600)
    write(Path("/etc/ssh/ssh_host_ed25519_key.pub"), furniture.host_public_key)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)


def make_names(hostname: str) -> None:
    """Name the node, and answer every other name at once with `unknown` instead of waiting for a far resolver."""
    write(Path("/etc/hostname"), hostname + "\n")
    write(Path("/etc/hosts"), f"127.0.0.1 localhost\n127.0.1.1 {hostname}\n::1 localhost ip6-localhost\n")
    write(Path("/etc/resolv.conf"), "")
    write(Path("/etc/environment"), ENVIRONMENT)
    write(Path("/etc/dgx-release"), RELEASE)
    write(Path("/etc/sysctl.conf"), "")


def install_stubs(stub: str) -> None:
    """Put the stub commands first on everybody's PATH, sudo's included."""
    write(STUBS, stub, 0o755)
    commands = Path("/usr/local/bin")
    (commands / "docker").unlink(missing_ok=True)  # a newer client of the machine's; the node has its engine's own
    for name in STUB_NAMES:
        (commands / name).unlink(missing_ok=True)
        (commands / name).symlink_to(STUBS)


def may_raise_limits() -> bool:
    """Whether the machine lets root exceed a hard limit; a sandbox may not, and `--ulimit memlock=-1` needs it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) & CAP_SYS_RESOURCE)


if __name__ == "__main__":
    main()
