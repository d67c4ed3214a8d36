"""Shared by all tests. In CI, a skip fails the run (see ci_no_skips).

Hypothesis draws the same examples in every run and sets no time to any of them:
on a busy machine an example takes as long as it takes.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.ci_no_skips"]


def pytest_configure() -> None:
    settings.register_profile(
        "repeatable",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("repeatable")
