"""What holds for every test: a busy machine changes no result.

One thread a process, because tests share the cores with each other, and products as small as
theirs wait for a second thread longer than they take. No deadlines for drawn examples.
"""

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts jobs in the background so, and commands that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


MEASURED = ("domain", "fit", "solve", "workflows", "store")
"""Folders of the tests by which every line of what is computed has to be run."""
LONGEST = (
    "runtime/test_random_layouts.py", "docs/test_docs.py", "measure/test_profile_command.py",
    "workflows/test_verify_on_ranks.py", "service/test_new_plan_in_a_browser.py",
    "measure/test_measuring_ranks.py", "service/test_page_in_a_browser.py",
    "solve/joint/test_search.py", "test_make_gpu.py",
    "workflows/test_parallelize.py", "service/hostile/test_solves.py",
)  # fmt: skip
"""Files that begin first: one that begins last leaves the other workers without any."""


def pytest_configure(config: pytest.Config) -> None:
    """Stop the measuring that pytest-cov 7.1 starts in a worker before the worker's own.

    Nobody reads it, and it goes on whenever the worker's own pauses: no test would be unmeasured.
    """
    plugin = config.pluginmanager.getplugin("_cov")
    if hasattr(config, "workerinput") and plugin is not None and plugin.cov_controller is not None:
        plugin.cov_controller.cov.stop()


def pytest_collection_finish() -> None:
    """Look for garbage seldom, and not among modules and tests: it was an eighth of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Measure the coverage of tests that ask the solver itself, and of no drawn examples.

    Measured, a solver takes three times as long: the others ask whole plans of it, and those that
    are `unmeasured` run the same lines again and again. Which lines drawn examples run is luck: a
    line that they alone run would be covered today and not tomorrow.
    `make test-thorough` (`--cov-context`) measures every test.
    """
    _sort(items)
    if config.getoption("cov_context", default=None) is not None:
        return
    measured = [Path(__file__).parent / folder for folder in MEASURED]
    for item in items:
        is_drawn = isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)
        is_left_out = is_drawn or item.get_closest_marker("unmeasured") is not None
        if is_left_out or not any(folder in item.path.parents for folder in measured):
            item.add_marker(pytest.mark.no_cover)


def _sort(items: list[pytest.Item]) -> None:
    first = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path, len(LONGEST)))
