"""Shared by all tests. In CI, a skip fails the run (see ci_no_skips).

Hypothesis draws the same examples in every run and sets no time to any of them:
on a busy machine an example takes as long as it takes.

Who runs tests imports Hypothesis, and not the process that hands them out.
"""

from __future__ import annotations

import pytest
from xdist import is_xdist_controller

pytest_plugins = ["tests.ci_no_skips"]


def pytest_sessionstart(session: pytest.Session) -> None:
    if not is_xdist_controller(session):
        _use_repeatable_examples()


def _use_repeatable_examples() -> None:
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "repeatable",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("repeatable")
