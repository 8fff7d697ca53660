#!/usr/bin/env bash
# Run the tests in a fresh environment of other packages, or against what is built from the source.
#
#     tests/versions.sh lowest|newest|wheel|sdist [arguments of pytest]
#     tests/versions.sh extras
#
# lowest   the lowest version of every range in pyproject.toml. Old builds of torch bring CUDA along: some gigabytes.
# newest   the newest that pip finds within the ranges, for all but torch: that stays as constraints.txt has it, since
#          another build is again some gigabytes. To try a newer torch too: TORCH='torch' tests/versions.sh newest
# wheel    the wheel that is built here, with the versions of constraints.txt.
# sdist    the wheel that is built from the sdist, as a packager would.
# extras   no tests: asks pip whether each extra, and all together, can be installed with constraints.txt. Four minutes.
#
# wheel and sdist test the installed package: tests, docs, examples, studies and settings are copied out of the repository
# without src/, so that nothing can be imported from there. What the package must hold besides Python files is compared
# file by file.
#
# Extras are left out unless named, as their packages are large and their tests are skipped without them:
#
#     EXTRAS=adapters,images,tensorboard,search tests/versions.sh lowest
#
# The environment and the copy are in a temporary folder, deleted at the end unless KEEP is set. PYTHON is the
# interpreter to start from (python3). Last runs: docs/results/performance.md, "Versions".
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
what=${1:-}
case "$what" in
lowest | newest | wheel | sdist | extras) shift ;;
*)
  sed -n '2,5p' "$0" >&2
  exit 2
  ;;
esac

work=$(mktemp -d "${TMPDIR:-/tmp}/versions-of-clipline-$what.XXXXXX")
[ -n "${KEEP:-}" ] || trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
pip() { "$work/env/bin/pip" --disable-pip-version-check -q "$@"; }
python() { "$work/env/bin/python" "$@"; }

# The requirements of pyproject.toml, a line each: those of the package and of extras, then those of the tests.
ranges() {
  python - "$root/pyproject.toml" "$1" "${EXTRAS:-}" <<'PY'
import re, sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
extras = project["optional-dependencies"]
used = [*project["dependencies"], *(one for name in filter(None, sys.argv[3].split(",")) for one in extras[name])]
for one in {re.split("[<>=]", one)[0]: one for one in used}.values():  # an extra may raise a bound of the package
    print(re.sub(r">=([0-9.]+).*", r"==\1", one) if sys.argv[2] == "lowest" else one)
print(*(one for one in extras["dev"] + extras["docs"] if not one.startswith("clipline[")), sep="\n")
PY
}

if [ "$what" = extras ]; then
  extras=$(python -c 'import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["optional-dependencies"])' "$root/pyproject.toml")
  for extra in $extras "${extras// /,}"; do
    echo "pip install -c constraints.txt '.[$extra]'"
    pip install --dry-run -c "$root/constraints.txt" "$root[$extra]"
  done
  exit
fi

case "$what" in
lowest)
  ranges lowest >"$work/requirements.txt"
  pip install -r "$work/requirements.txt"
  pip install --no-deps -e "$root"
  ;;
newest)
  grep '^torch==' "$root/constraints.txt" >"$work/constraints.txt"
  [ -z "${TORCH:-}" ] || echo "$TORCH" >"$work/constraints.txt"
  ranges newest >"$work/requirements.txt"
  pip install --upgrade --upgrade-strategy eager -c "$work/constraints.txt" -r "$work/requirements.txt"
  pip install --no-deps -e "$root"
  ;;
wheel | sdist)
  pip install -c "$root/constraints.txt" build
  # Built from what git knows: files that lie around in the folder must not make a wheel complete.
  git -C "$root" ls-files -z | (cd "$root" && tar --null -T - -cf -) | (mkdir "$work/source" && tar -C "$work/source" -xf -)
  if [ "$what" = wheel ]; then
    python -m build --wheel --outdir "$work/dist" "$work/source" >"$work/build.log"
  else
    python -m build --sdist --outdir "$work/dist" "$work/source" >"$work/build.log"
    pip wheel --no-deps --wheel-dir "$work/dist" "$work/dist/"*.tar.gz
  fi
  pip install -c "$root/constraints.txt" "$(echo "$work/dist/"*.whl)[dev${EXTRAS:+,$EXTRAS}]"
  for package in clipline clipline_paper; do python "$root/tests/package_files.py" "$work/source/src/$package"; done
  rm -r "$work/source/src"
  root=$work/source
  ;;
esac

"$work/env/bin/python" -m pip list --format=freeze >"$work/installed.txt"
grep -iE '^(clipline|torch|numpy|scipy|pyarrow|click|matplotlib|h5py|rich|safetensors|transformers|peft|pillow|tensorboard|optuna)==' "$work/installed.txt"
cd "$root"
python -c 'import clipline; print("testing", clipline.__file__)'
OMP_NUM_THREADS=1 PYTHONPATH="" "$work/env/bin/python" -m pytest -n auto -p no:cacheprovider "$@"
