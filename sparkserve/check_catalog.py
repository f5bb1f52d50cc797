"""What each check is for: why it matters, what puts it right, and whether `doctor --fix` may do that after asking."""

from __future__ import annotations

from dataclasses import dataclass

from sparkserve.errors import usage_error
from sparkserve.settings import nearest_name


@dataclass(frozen=True)
class Entry:
    """One check: why it matters, the command or deed that puts it right (`…` is what the node itself tells)."""

    why: str
    fix: str
    safe: bool = False


# Kernels by the beginning of their release; what is wrong with them is told by the check `kernel`.
KNOWN_BAD_KERNELS = ("7.0.",)
CATALOG: dict[str, Entry] = {
    # -- reaching the node --------------------------------------------------------------------------------------------
    "reach": Entry(
        "Everything on the worker goes over one SSH connection with a key that it knows; nothing is known without it.",
        "ssh-copy-id …; its host key is trusted once, after you compared it",
        safe=True,
    ),
    "same_machine": Entry(
        "Two ranks on one machine fight for its GPU and take each other for a local process.",
        "set SPARKSERVE_WORKER to the second machine",
    ),
    "python": Entry(
        "What is known of a node is read by a small program that runs on its own python3; older ones cannot run it.",
        "sudo apt-get install python3",
    ),
    "tools": Entry("The head fetches sources with git and copies over ssh.", "sudo apt-get install …"),
    "architecture": Entry(
        "An image of another architecture does not start, or serves without a GPU.",
        "choose a recipe for it: `sparkserve recipes`",
    ),
    "clock": Entry(
        "Logs of both ranks are put in one order by their times, and a wrong clock breaks TLS to the hub.",
        "sudo timedatectl set-ntp true",
    ),
    # -- kernel, driver, GPU ------------------------------------------------------------------------------------------
    "kernel": Entry(
        "Some kernels keep memory from the network card: RDMA registration then fails with `Cannot allocate memory`,"
        " though every limit is right. They show more free CMA than there is CMA. Reported of 7.0 kernels; 6.17.0-1032"
        " worked, and so did 7.0 with kho=off.",
        "boot 6.17.0-1032 from GRUB's menu, or add kho=off to the kernel's command line, as you like; then reboot",
    ),
    "gpu": Entry(
        "Without a driver that answers, no rank gets a GPU.",
        "`nvidia-smi` on that node tells why; a reboot often helps",
    ),
    "gpu_processes": Entry(
        "On GB10 the GPU has no memory of its own: what another process holds is missing for the model.",
        "end it, or stop its container: kill …",
    ),
    "driver_match": Entry(
        "Both ranks wait for each other at every token; a pair with different drivers was reported 2.4 times slower.",
        "bring both nodes to the same driver: sudo apt-get update && sudo apt-get dist-upgrade on both",
    ),
    "kernel_match": Entry(
        "Different kernels share memory out differently; a fault then shows on one rank only.",
        "bring both nodes to the same kernel, then reboot both",
    ),
    # -- Docker -------------------------------------------------------------------------------------------------------
    "docker": Entry(
        "The model runs in a container on both nodes, and Docker is asked as your own account.",
        "sudo systemctl start docker",
    ),
    "docker_group": Entry(
        "Only members of the docker group may ask the engine without root; a new member must log in again.",
        "sudo usermod -aG docker $USER, then log in again",
    ),
    "docker_runtime": Entry(
        "Docker gives a container the GPU through NVIDIA's container toolkit, or by a description of it (CDI); without"
        " either the start fails.",
        "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker",
    ),
    "docker_match": Entry(
        "An old and a new engine differ in storage and network: what works on one node may not on the other.",
        "bring both nodes to the same Docker version",
    ),
    "containers": Entry(
        "A container of somebody else with the GPU, with RDMA devices or on the host's network may take memory, the"
        " cable or ports of the model at any time.",
        "docker stop …",
    ),
    # -- memory -------------------------------------------------------------------------------------------------------
    "memory": Entry(
        "A rank that loads into too little memory freezes the whole machine: GPU and system share one pool.",
        "close other programs: `ps aux --sort=-rss | head` shows the largest",
    ),
    "swap": Entry(
        "Pages of the model in swap stall every token; without any swap the peak while it loads ends the rank.",
        "sudo swapoff -a && sudo swapon -a brings back what was swapped out",
    ),
    "oom_daemons": Entry(
        "Two daemons that end processes for want of memory act on different signs: one may kill the rank, or a"
        " bystander, where the other would have waited. An earlyoom that acts above what the recipe leaves free ends"
        " the pair as soon as it is ready.",
        "sudo systemctl disable --now systemd-oomd, or the same with earlyoom",
    ),
    "page_cache": Entry(
        "The driver takes free memory only, and lets the kernel keep what it caches of files: loads were seen to fail"
        " below 8 GiB free.",
        "sync; echo 3 | sudo tee /proc/sys/vm/drop_caches",
    ),
    "fragmentation": Entry(
        "The driver wants large pieces of memory. After a week of uptime plenty can be free and none of it large.",
        "reboot that node; compacting was reported to help little",
    ),
    # -- disks --------------------------------------------------------------------------------------------------------
    "disk": Entry(
        "A disk that fills up half-way leaves neither the old nor the new model. Mind the units: 500 GB are 466 GiB.",
        "free some space, or set SPARKSERVE_MODELS_DIR to a larger disk",
    ),
    "writable": Entry("Weights and caches are written as your own account.", "sudo install -d -o $USER …", safe=True),
    "local_disk": Entry(
        "The engine reads tables from disk for every token; over a network file system it is several times slower.",
        "set SPARKSERVE_MODELS_DIR to the node's own NVMe",
    ),
    "source": Entry(
        "What a container is given and runs must be there before it starts, open to its user: seen inside one like it.",
        "`sparkserve up`",
    ),
    # -- ports and addresses ------------------------------------------------------------------------------------------
    "port": Entry(
        "Both ranks use the host's network: on a port that somebody holds the start ends with an error that hides why.",
        "stop who holds it, or set SPARKSERVE_API_PORT or SPARKSERVE_MASTER_PORT",
    ),
    "hostname": Entry(
        "Debian and Ubuntu map a machine's own name to 127.0.1.1. An engine that looks its own name up then waits for"
        " the other rank on loopback, for ever.",
        "pin the interface in the recipe (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or correct /etc/hosts",
    ),
    "api_key": Entry(
        "An API beyond loopback without a key serves everybody who can reach this machine.",
        "`sparkserve key new --set`; or SPARKSERVE_API_HOST=127.0.0.1, and the tunnel that `sparkserve connect` shows",
    ),
    # -- the cable ----------------------------------------------------------------------------------------------------
    "link_address": Entry(
        "Each rank binds to its own address on the cable; the interface and RDMA devices are found from it.",
        "set SPARKSERVE_HEAD_LINK and SPARKSERVE_WORKER_LINK to the cable's addresses",
    ),
    "link_same": Entry("Two nodes with one address cannot talk.", "give each end its own address in netplan"),
    "link_rdma": Entry(
        "Without an active RDMA device the ranks talk over TCP, or die a minute after the start.",
        "is the cable in? `ibdev2netdev` shows which ports are up",
    ),
    "link_network": Entry(
        "An address in another network is sent to the default route: nothing goes over the cable.",
        "give both ends an address in one network, of its own and not of a single address (/32), in netplan",
    ),
    "link_kind": Entry(
        "Over Wi-Fi two ranks hang, or are many times slower.",
        "set SPARKSERVE_HEAD_LINK and SPARKSERVE_WORKER_LINK to the cable's addresses: `sparkserve link`",
    ),
    "link_halves": Entry(
        "One port is two interfaces with half of its rate each; NCCL uses both where both have an address.",
        "give the other half an address in a network of its own, on both nodes: docs/network.md",
    ),
    "link_route": Entry(
        "The cable must carry the ranks and nothing else: a default route over it leads nowhere, a link-local address"
        " may be another one after a reboot, and of two interfaces in one network the kernel may send from either.",
        "give the cable fixed addresses in networks of their own, without a gateway: docs/network.md",
    ),
    "link_mtu": Entry(
        "Different MTUs lose large packets only: the start hangs without an error. 9000 moves more than 1500.",
        "set MTU 9000 on both in netplan: docs/network.md",
    ),
    "link_mtu_path": Entry(
        "A frame that is too long for something on its way is thrown away without a word, and a transfer hangs.",
        "set MTU 9000 in netplan on both ends, and on a switch between them: docs/network.md",
    ),
    "link_tcp": Entry(
        "The ranks meet on one port, and NCCL then takes random high ones: a firewall that lets only the first in makes"
        " the start hang.",
        "let everything in from the cable: sudo ufw allow in on …",
    ),
    "link_bandwidth": Entry(
        "Every token crosses the cable many times. Links that say 200 Gb/s and move a tenth of it were reported, after"
        " some boots; only a measurement tells.",
        "MTU 9000 on both ends, both halves of the port addressed and up; then reboot the slow node: docs/network.md",
    ),
    "link_rdma_bandwidth": Entry(
        "NCCL uses RDMA, which TCP does not measure: a wrong GID, MTU or path shows here first. perftest measures it.",
        "MTU, GID index and halves of both ends right? `sparkserve link` shows them; then reboot the slow node",
    ),
    # -- root ---------------------------------------------------------------------------------------------------------
    "sudo": Entry(
        "The tuning step changes kernel settings; a start needs root for nothing else.",
        "run it on a terminal, set SPARKSERVE_SUDO_PASSWORD_FILE, or leave it out with --skip tune; `sparkserve doctor"
        " --fix` writes a rule that allows just these commands, for you to read; it takes the place of an earlier one",
        safe=True,
    ),
}


def find_entry(name: str) -> Entry:
    """Find a check by its id."""
    if name not in CATALOG:
        message = f"there is no check {name}{nearest_name(name, CATALOG)}"
        raise usage_error("check_unknown", message, "`sparkserve doctor --json` lists them")
    return CATALOG[name]
