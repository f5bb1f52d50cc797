#!/usr/bin/env bash
# Make .venv from a Python of at least 3.11; install sparkserve and its developer tools there, as .ci/requirements.lock says.
set -euo pipefail
cd "$(dirname "$0")/.."

names=${PYTHON:-python3.13 python3.12 python3.11 python3}

find_python() {
  local name
  for name in $names; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  return 1
}

if ! python=$(find_python); then
  [[ -n ${PYTHON:-} ]] || .ci/debian_packages.sh python3 python3-venv
  if ! python=$(find_python); then
    echo "no Python 3.11 or later among: $names; install one, or type make PYTHON=/path/of/python3" >&2
    exit 1
  fi
fi

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  # Debian has ensurepip, without which there is no venv, in a package of its own.
  "$python" -c 'import ensurepip, venv' 2>/dev/null || .ci/debian_packages.sh "$(basename "$python")-venv"
  "$python" -m venv --clear .venv
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet install --constraint .ci/requirements.lock)
# The build backend comes first, so that building takes the pinned one and not a second one from the index.
"${pip[@]}" hatchling editables
"${pip[@]}" --no-build-isolation --editable '.[dev]'
