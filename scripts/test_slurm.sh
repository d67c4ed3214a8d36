#!/usr/bin/env bash
# Runs tests/slurm, which start a real Slurm of two nodes on this machine, as root; Debian's
# packages of it are installed first. Where that can't be, says so and runs what needs no
# Slurm; in CI, as root, it has to be. Arguments go to pytest.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin"

say() { printf 'test-slurm: %s\n' "$*" >&2; }

tests=()
if [ "$(id -u)" != 0 ]; then
  say "not root: the tests with a real Slurm are left out"
  tests=(-m "not slurm")
elif ! scripts/install.sh munged=munge slurmctld=slurmctld slurmd=slurmd sbatch=slurm-client; then
  [ "${CI:-}" != true ] || exit 1
  say "the tests with a real Slurm are left out"
  tests=(-m "not slurm")
fi
exec .venv/bin/python -m pytest "${tests[@]}" tests/slurm "$@"
