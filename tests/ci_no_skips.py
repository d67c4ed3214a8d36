"""In CI a skipped test is a failed run: nothing stops being tested unseen.

A pytest plugin, switched on by CI=true. Tests marked gpu, and modules under
tests/gpu, may skip, and those marked root where we aren't; xfail counts as a skip.
Knows nothing of the project.
"""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI") == "true":
        config.pluginmanager.register(NoSkips())


class NoSkips:
    """Collects what was skipped, names it at the end and fails the run."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not _may_skip(report):
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped and not report.nodeid.startswith("tests/gpu/"):
            self.skipped.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.skipped:
            terminalreporter.section("skipped, which CI=true does not allow", red=True, bold=True)
            for nodeid in self.skipped:
                terminalreporter.line(nodeid)


def _may_skip(report: pytest.TestReport) -> bool:
    return "gpu" in report.keywords or ("root" in report.keywords and os.geteuid() != 0)
