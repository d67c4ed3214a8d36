#!/usr/bin/env bash
# Generates orca_dist/proto/v1 from protos/v1 with the oldest grpcio-tools that
# pyproject.toml's lower bounds promise; --check only compares.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=.venv-stubs
if [ ! -x "$tools/bin/grpc-stubs-ready" ]; then
  .venv/bin/python -m virtualenv -q "$tools"
  "$tools/bin/pip" install -q "grpcio-tools==1.76.0" "protobuf==6.31.1" "setuptools<81"
  install -m 755 /dev/stdin "$tools/bin/grpc-stubs-ready" <<<'#!/bin/sh'
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$tools/bin/python" -m grpc_tools.protoc -Iorca_dist/proto=protos \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" protos/v1/*.proto
if [ "${1:-}" = --check ]; then
  diff -ru --exclude=__init__.py --exclude=__pycache__ orca_dist/proto/v1 "$out/orca_dist/proto/v1" ||
    { echo "orca_dist/proto/v1 differs from protos/v1: run 'make stubs'" >&2; exit 1; }
else
  cp "$out"/orca_dist/proto/v1/* orca_dist/proto/v1/
fi
