#!/usr/bin/env bash
# Fail unless every pinned dependency has a wheel that a Spark can install: aarch64, Ubuntu 24.04, Python 3.12. Nothing is
# installed; the package index is asked, as a pip on that machine would ask it.
set -euo pipefail
cd "$(dirname "$0")/.."

platforms=(--platform manylinux2014_aarch64)
for minor in {17..39}; do
  platforms+=(--platform "manylinux_2_${minor}_aarch64")
done
nowhere=$(mktemp -d)
trap 'rm -rf "$nowhere"' EXIT
.venv/bin/python -m pip --disable-pip-version-check --quiet install --dry-run --ignore-installed --no-deps \
  --only-binary=:all: --target "$nowhere" --implementation cp --python-version 3.12 "${platforms[@]}" \
  --requirement .ci/requirements.lock
