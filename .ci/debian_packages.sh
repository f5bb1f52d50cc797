#!/usr/bin/env bash
# Install Debian packages, or print the one command that does.
#   debian_packages.sh PACKAGE | COMMAND=PACKAGE ...     (COMMAND=PACKAGE is left out where the command is there)
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

# Units that a new package would start at once; the lab runs its own daemons in its own namespaces.
units=(docker.service docker.socket containerd.service ssh.service ssh.socket docker-registry.service rsync.service)

wanted=()
for word in "$@"; do
  [[ $word == *=* ]] && command -v "${word%%=*}" >/dev/null && continue
  wanted+=("${word#*=}")
done
((${#wanted[@]})) || exit 0

command="apt-get update && apt-get install --yes --no-install-recommends ${wanted[*]}"
as_root=(env)
if ! command -v apt-get >/dev/null; then
  echo "missing, by their Debian names: ${wanted[*]}; install them with this system's own package tool" >&2
  exit 1
elif ((EUID != 0)); then
  if ! sudo -n true 2>/dev/null; then
    echo "missing: ${wanted[*]}. This command installs them: sudo sh -c '$command'" >&2
    exit 1
  fi
  as_root=(sudo)
fi

# A unit that is masked while its package is set up is not started. The mask is in /run and only for new units.
masked=()
unmask() { ((${#masked[@]} == 0)) || "${as_root[@]}" systemctl --quiet unmask --runtime "${masked[@]}"; }
trap unmask EXIT
if [[ -d /run/systemd/system ]]; then
  for unit in "${units[@]}"; do
    systemctl cat "$unit" >/dev/null 2>&1 || masked+=("$unit")
  done
  ((${#masked[@]} == 0)) || "${as_root[@]}" systemctl --quiet mask --runtime "${masked[@]}" 2>/dev/null
fi

echo "installing Debian packages: ${wanted[*]}" >&2
"${as_root[@]}" apt-get update --quiet=2
# RUNLEVEL=1 does for System V init what the mask does for systemd.
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
  apt-get install --yes --quiet=2 --no-install-recommends "${wanted[@]}" >/dev/null
