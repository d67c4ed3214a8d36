"""Shared by all tests. In CI, a skip fails the run (see ci_no_skips)."""

from __future__ import annotations

pytest_plugins = ["tests.ci_no_skips"]
