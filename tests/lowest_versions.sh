#!/usr/bin/env bash
# Install the lowest versions that pyproject.toml claims into an environment of their own, and run the tests there.
#
#     tests/lowest_versions.sh [FOLDER of the environment] [arguments of pytest]
#
# Old builds of torch bring CUDA along: some gigabytes. Last run: see docs/results/performance.md, "Lowest versions".
set -euo pipefail
cd "$(dirname "$0")/.."
env="${1:-.lowest}"
shift || true
[ -d "$env" ] || python3 -m venv "$env"
lowest=$(python3 - <<'PY'
import re, tomllib
claimed = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]
print(" ".join(re.sub(r">=([0-9.]+).*", r"==\1", one) for one in claimed))
PY
)
# shellcheck disable=SC2086
"$env/bin/pip" install -q $lowest pytest pytest-xdist hypothesis mpmath
"$env/bin/pip" install -q --no-deps -e .
PYTHONPATH=src OMP_NUM_THREADS=1 "$env/bin/python" -m pytest -n auto "$@"
