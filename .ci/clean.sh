#!/usr/bin/env bash
# Take this checkout's lab down, then remove what the targets made. Stops where the lab cannot be taken down.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ -e .lab ]]; then
  # The lab needs the standard library only, so that it can be taken down after .venv is gone.
  python=.venv/bin/python
  [[ -x $python ]] || python=python3
  "$python" -m tests.lab down --purge
fi
rm -rf --one-file-system .lab .bench .venv .mypy_cache .pytest_cache .ruff_cache dist build
find sparkserve tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
