#!/usr/bin/env bash
# Makes .venv with all that pyproject.toml and constraints.txt name, and does
# nothing, quietly, once that is done. PYTHON=/path/to/python3 chooses another.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0
stamp=.venv/.ready # written last, so that a killed set-up doesn't count
finished=no

say() { printf 'set-up: %s\n' "$*" >&2; }
fail() {
  say "$*"
  finished=told
  exit 3
}

# What the .venv must have been made from: this folder and these files.
wanted() {
  pwd -P
  cat pyproject.toml constraints.txt scripts/setup.sh | cksum
}

is_ready() {
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(wanted)" ] && .venv/bin/python -c '' 2>/dev/null
}

# A .venv of this folder that was finished once can be brought up to date in place.
can_update() {
  [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$(pwd -P)" ] && .venv/bin/python -c '' 2>/dev/null
}

wait_for_others() {
  command -v flock >/dev/null || return 0
  exec 9<scripts/setup.sh
  flock -n 9 && return 0
  say "another set-up of this folder is running: waiting for it"
  flock 9
}

version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
has() { "$1" -c "import $2" 2>/dev/null; }

# One interpreter that is new enough and can make environments; else says why not.
find_python() {
  local candidate version found="no ${PYTHON:-python3} here" fix='install it'
  local candidates=(python3 python3.13 python3.12 python3.11)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    version=$(version_of "$candidate") || continue
    if ! is_new_enough "$candidate"; then
      found="$candidate is Python $version"
    elif has "$candidate" venv && { has "$candidate" ensurepip || has "$candidate" pip; } ||
      has "$candidate" virtualenv; then
      python=$candidate
      return
    else
      found="$candidate is Python $version, but has no ensurepip, pip or virtualenv"
      fix="install python${version%.*}-venv (Debian, Ubuntu)"
    fi
  done
  fail "$found; Python >= 3.11 with venv is needed: $fix, or name one: PYTHON=/path/to/python3.11 make setup"
}

make_venv() {
  local python
  find_python
  [ ! -e .venv ] || say "the .venv here is unfinished or was moved: making it anew"
  rm -rf .venv
  say "making .venv with $python ($(version_of "$python"))"
  if has "$python" venv && has "$python" ensurepip; then
    "$python" -m venv .venv
  elif has "$python" virtualenv; then
    "$python" -m virtualenv -q .venv
  else
    "$python" -m venv --without-pip .venv
    "$python" -m pip --python .venv/bin/python install -q pip
  fi
}

install_packages() {
  say "installing packages; the first time takes some minutes"
  .venv/bin/python -m pip install -c constraints.txt "$(grep '^torch==' constraints.txt)"
  .venv/bin/python -m pip install -c constraints.txt -e '.[dev]'
}

is_ready && exit 0
wait_for_others
is_ready && exit 0
trap '[ $finished != no ] || say "did not finish (see above); run it again to start over"' EXIT
can_update || make_venv
rm -f "$stamp"
install_packages
wanted >.venv/.ready.new
mv .venv/.ready.new "$stamp"
finished=yes
say "ready"
