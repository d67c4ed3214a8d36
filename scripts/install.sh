#!/usr/bin/env bash
# Sees to it that programs of other people are there, for tests that need them: PROGRAM=PACKAGE ...
# Installs the Debian packages of those that are missing, where root and apt are there; services
# that the packages would start are not started. Ends with 1, and says why, if one is missing still.
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin"
policy=/usr/sbin/policy-rc.d # asked before a package starts a service

say() { printf 'install: %s\n' "$*" >&2; }

is_missing() { ! type "${1%%=*}" >/dev/null 2>&1; }

missing_of() {
  local pair
  for pair in "$@"; do
    if is_missing "$pair"; then printf '%s\n' "${pair#*=}"; fi
  done
}

install_packages() {
  say "$* (apt)"
  export DEBIAN_FRONTEND=noninteractive
  if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' RETURN
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  apt-get -q update >&2 && apt-get -q install -y --no-install-recommends "$@" >&2
}

mapfile -t packages < <(missing_of "$@")
[ "${#packages[@]}" -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ]; then
  say "${packages[*]}: not here, and only root can install them"
  exit 1
elif ! type apt-get >/dev/null 2>&1; then
  say "${packages[*]}: not here, and there is no apt to install them with"
  exit 1
elif ! install_packages "${packages[@]}"; then
  say "${packages[*]}: could not be installed (see above)"
  exit 1
fi
