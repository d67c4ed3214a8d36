#!/usr/bin/env bash
# Runs tests/slurm, which start a real Slurm of two nodes on this machine. Installs Debian's
# slurmctld, slurmd, slurm-client and munge first, where they are missing and apt and root are
# there; where they are not, says so and runs what needs no Slurm. Services that the packages
# would start are not started. Arguments go to pytest.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin"
programs=(munged slurmctld slurmd sbatch)
policy=/usr/sbin/policy-rc.d # asked before a package starts a service

say() { printf 'test-slurm: %s\n' "$*" >&2; }
is_installed() { type "${programs[@]}" >/dev/null 2>&1; }

install_slurm() {
  say "installing Slurm and munge (apt)"
  export DEBIAN_FRONTEND=noninteractive
  if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' RETURN
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  apt-get -q update >&2 &&
    apt-get -q install -y --no-install-recommends slurmctld slurmd slurm-client munge >&2
}

select_tests() {
  if [ "$(id -u)" != 0 ]; then
    say "not root: the tests with a real Slurm are left out"
  elif is_installed; then
    return 0
  elif ! type apt-get >/dev/null 2>&1; then
    say "no Slurm here, and no apt to install it with: the tests with a real Slurm are left out"
  elif install_slurm; then
    return 0
  elif [ "${CI:-}" = true ]; then
    say "Slurm could not be installed (see above)"
    exit 1
  else
    say "Slurm could not be installed (see above): the tests with a real one are left out"
  fi
  tests=(-m "not slurm")
}

tests=()
select_tests
exec .venv/bin/python -m pytest "${tests[@]}" tests/slurm "$@"
