"""What holds for every test: a busy machine changes no result.

One thread a process, because tests share the cores with each other, and products as small as
theirs wait for a second thread longer than they take. No deadlines for drawn examples.
"""

import gc
import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import settings

from moetune.app.training import _search
from moetune.domain.errors import MoetuneError
from moetune.domain.profile import Profile

if TYPE_CHECKING:
    from playwright.sync_api import Browser

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts jobs in the background so, and commands that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

FOLDER = Path(__file__).parent
THOROUGH = (
    "adapters/test_alone.py", "adapters/test_titan.py", "cuda_kit", "docs/test_site.py",
    "launch/test_launch_oracle.py", "launch/test_torch_runtimes.py",
    "measure/test_measuring_ranks.py", "measure/test_profile_command.py",
    "runtime/test_gpu_streams.py",
    "runtime/test_layer_memory.py", "runtime/test_layer_under_faults.py",
    "runtime/test_random_layouts.py", "service/hostile",
    "service/test_service_fuzz.py", "service/test_training_with_the_service.py",
    "store/test_store_availability.py", "store/test_store_pages.py",
    "solve/test_ppmoe_table2.py", "store/test_store_postgresql.py",
    "store/test_store_processes.py", "test_make_gpu.py",
    "test_make_gpu_streams.py",
    "app/test_verify_on_ranks.py",
)  # fmt: skip
"""Files and folders that only `make test-thorough` runs, by what they take."""
THOROUGH_PAGES = frozenset({
    "SKILL", "check", "days-and-cost", "describe-a-machine", "fine-tuning", "fit-into-memory",
    "measure", "model-config", "notebook", "plan-lookup", "serve", "speed-up-a-layer", "store",
    "train", "train-adapt", "train-checkpoints", "train-layouts", "train-states", "train-wrap",
    "what-if", "when-wrong", "why-not",
})  # fmt: skip
"""Pages of the guide whose blocks measure, train, serve, or plan many whole models."""
THOROUGH_FIXTURES = frozenset({"browser", "server"})
"""A real browser, and a real PostgreSQL."""
LONGEST = (
    "runtime/test_random_layouts.py", "docs/test_docs.py", "measure/test_profile_command.py",
    "app/test_verify_on_ranks.py", "adapters/test_adapted_models.py",
    "measure/test_measuring_ranks.py", "service/test_page_in_a_browser.py",
    "solve/model/test_search.py", "test_make_gpu.py", "app/test_parallelize.py",
    "service/hostile/test_solves.py",
)  # fmt: skip
"""Files that begin first: one that begins last leaves the other workers without any."""


PLANNING = frozenset({"cli", "docs", "golden", "launch", "service"})
"""Folders whose tests ask for the same plans of whole models again and again."""


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        yield opened
        opened.close()


@pytest.fixture(scope="session", autouse=True)
def _the_store_of_nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the store of the person who runs the tests, which may have another schema."""
    folder = str(tmp_path_factory.mktemp("data"))
    with mock.patch.dict(os.environ, {"XDG_DATA_HOME": folder}):
        yield


@pytest.fixture(autouse=True)
def _equal_questions_are_searched_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep the last searches of layouts, which are values, for tests that patch nothing."""
    folder = request.path.relative_to(FOLDER).parts[0]
    if folder not in PLANNING or "monkeypatch" in inspect.signature(request.function).parameters:
        yield
        return
    with mock.patch("moetune.app.training._search", _SEARCHES):
        yield


class _Searches:
    """The last searches by what was asked: an answer, or an error."""

    def __init__(self, num: int) -> None:
        self._num, self._last = num, dict[tuple[str, str, str], Any]()

    def __call__(self, request: Any, profile: Profile, **options: bool) -> Any:
        key = f"{request}{options}", profile.name, profile.digest
        if key not in self._last:
            if len(self._last) == self._num:
                del self._last[next(iter(self._last))]
            try:
                self._last[key] = _search(request, profile, **options)
            except MoetuneError as error:
                self._last[key] = error
        answer = self._last[key]
        if isinstance(answer, MoetuneError):
            raise answer.with_traceback(None)
        return answer


_SEARCHES = _Searches(32)


def pytest_configure(config: pytest.Config) -> None:
    """Stop the measuring that pytest-cov 7.1 starts in a worker before the worker's own."""
    plugin = config.pluginmanager.getplugin("_cov")
    if hasattr(config, "workerinput") and plugin is not None and plugin.cov_controller is not None:
        plugin.cov_controller.cov.stop()


def pytest_collection_finish() -> None:
    """Look for garbage seldom, and not among modules and tests: it was an eighth of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what only `make test-thorough` runs, and begin with the longest files."""
    for item in items:
        if _is_thorough(item):
            item.add_marker(pytest.mark.thorough)
    if "not thorough" in config.option.markexpr:
        _draw_fewer({item.obj for item in items if isinstance(item, pytest.Function)})
    first = {FOLDER / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path, len(LONGEST)))


def _draw_fewer(tests: set[Any]) -> None:
    """Draw a third of the examples of properties, which are other ones in the next gate."""
    for test in tests:
        if drawn := getattr(test, "_hypothesis_internal_use_settings", None):
            num = max(min(drawn.max_examples, 5), drawn.max_examples // 3)
            test._hypothesis_internal_use_settings = settings(drawn, max_examples=num)


def _is_thorough(item: pytest.Item) -> bool:
    folders = {FOLDER / name for name in THOROUGH}
    if not folders.isdisjoint((item.path, *item.path.parents)):
        return True
    if not isinstance(item, pytest.Function):
        return False
    values = item.callspec.params if hasattr(item, "callspec") else {}
    page = values.get("page")
    is_page = isinstance(page, Path) and page.stem in THOROUGH_PAGES
    runs_page = is_page and "reader" in item.fixturenames
    needs_server = "postgresql" in {str(value) for value in values.values()}
    return runs_page or needs_server or not THOROUGH_FIXTURES.isdisjoint(item.fixturenames)
