"""The page as HTML: what is on it, what it refuses, and what it never does."""

import re
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import httpx
import pytest

from moetune.app.files import profile_to_toml
from moetune.app.planner import ServicePlanner, open_planner
from moetune.config import Settings
from moetune.domain.plan import Plan
from moetune.domain.targets import find_target
from moetune.domain.units import format_seconds
from moetune.report.svg import STATIC
from moetune.service.access import Access
from moetune.service.app import create_app
from tests.report.lab import fill, lab_profile
from tests.service.asking import Client, client_of
from tests.store.values import observed_run
from tests.training_plans import TRAINING as TRAINING_PLAN
from tests.training_plans import training_plan

MARKUP = '<b onclick="x">&profile'
TRAINING = training_plan().id
OTHER = training_plan(
    id="fedcba98" * 8, layout=TRAINING_PLAN["layout"] | {"dp": 16, "tp": 1, "pp": 1, "ep": 1}
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages") / "moetune.db"


@pytest.fixture(scope="module")
def plans(file: Path) -> tuple[Plan, Plan]:
    return fill(file)


@pytest.fixture(scope="module")
def full_planner(file: Path, plans: tuple[Plan, Plan]) -> Iterator[ServicePlanner]:
    assert plans
    with open_planner(Settings(db=str(file))) as opened:
        opened.store.save_profile(replace(lab_profile(), name=MARKUP))
        opened.store.save_plan(training_plan())
        opened.store.save_plan(OTHER)
        yield opened


@pytest.fixture(scope="module")
def full(full_planner: ServicePlanner) -> Iterator[Client]:
    with client_of(create_app(full_planner, Access()), accept="text/html") as made:
        yield made


@pytest.fixture(scope="module")
def addresses(plans: tuple[Plan, Plan]) -> list[str]:
    first, second = (plan.id for plan in plans)
    return [
        "/",
        f"/plans/{first}",
        f"/plans/{second}",
        f"/plans/{TRAINING}",
        "/compare",
        f"/compare?first={TRAINING}&second={OTHER.id}",
        f"/compare?first={first[:8]}&second={second}",
        "/machines",
        "/profiles/lab",
        "/profiles/rtx2080ti-x64",
        "/new?model=gpt-s&profile=rtx2080ti-x64",
        "/new?model=olmoe&profile=h100-x8&world_size=8&global_batch=32&seq=2048&target=megatron",
        "/plans/ffffffff",
        "/profiles/nobody",
    ]


def words(answer: httpx.Response) -> str:
    """Return the text of a page."""
    body = re.sub(r"<script.*?</script>|<style.*?</style>", "", answer.text, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_an_empty_store_says_what_to_run_first(client: Client) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    text = words(answer)
    order = [text.index(f"moetune {verb}") for verb in ("plan", "profile", "verify")]
    assert order == sorted(order)
    for page in ("/machines", "/compare"):
        assert client.get(page).status_code == 200
    assert "rtx2080ti-x64" in words(client.get("/machines"))


def test_every_page_is_whole_and_loads_nothing_else(full: Client, addresses: list[str]) -> None:
    for page in addresses:
        answer = full.get(page)
        assert answer.status_code in {200, 404}, page
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        html = answer.text
        assert html.rstrip().endswith("</html>")
        assert not re.search(r"\sstyle=|\son\w+=\"|javascript:", html), page
        for tag in re.findall(r"<script[^>]*>", html):
            assert 'src="/static/' in tag
        for link in re.findall(r'(?:href|src|action)="([^"]*)"', html):
            assert re.match(r"#|/(?!/)", link), (page, link)


def test_every_link_on_a_page_leads_somewhere(full: Client, addresses: list[str]) -> None:
    links: set[str] = set()
    for page in addresses:
        links |= set(re.findall(r'(?:href|src)="([^"#]+)', full.get(page).text))
    assert len(links) > 40
    for link in sorted(links):
        status = full.get(unescape(link)).status_code
        assert status in {200, 303}, link


def test_names_are_shown_as_text_and_never_as_markup(full: Client) -> None:
    answer = full.get("/machines")
    assert MARKUP not in answer.text
    assert MARKUP in words(answer)
    link = next(url for url in re.findall(r'href="(/profiles/[^"]+)"', answer.text) if "%3C" in url)
    page = full.get(link)
    assert page.status_code == 200
    assert MARKUP not in page.text


def test_a_profile_is_never_a_file_of_the_machine_that_serves(full: Client, tmp_path: Path) -> None:
    stray = tmp_path / "stray.toml"
    stray.write_text(profile_to_toml(replace(lab_profile(), name="stray")))
    for name in (str(stray), str(stray).replace("/", "%2F"), "..%2Fpyproject.toml"):
        answer = full.get(f"/profiles/{name}")
        assert answer.status_code == 404
        assert "stray" not in words(answer) or "unknown" in words(answer)


def test_a_plan_is_found_by_the_beginning_of_its_id(full: Client, plans: tuple[Plan, Plan]) -> None:
    assert full.get(f"/plans/{plans[1].id[:9]}").text == full.get(f"/plans/{plans[1].id}").text


def test_plans_are_filtered_and_tell_their_step(full: Client, plans: tuple[Plan, Plan]) -> None:
    for query in ("", "?profile=lab"):
        text = words(full.get(f"/{query}"))
        for plan in plans:
            assert plan.id[:8] in text
            assert format_seconds(plan.predicted.step_seconds) in text
    for query in ("?profile=nobody", "?model=gpt-xl"):
        assert "No plan matches." in words(full.get(f"/{query}"))
    # A page goes on after a plan with the filter of the one before.
    rest = full.get(f"/?profile=lab&after={plans[1].id}").text
    assert plans[1].id[:12] not in rest
    assert plans[0].id[:12] in rest
    assert 'href="/?profile=lab">Newest' in rest


def test_a_plan_that_another_program_broke_is_named_in_the_list(
    file: Path, full: Client, plans: tuple[Plan, Plan]
) -> None:
    connection = sqlite3.connect(file)
    mine = (plans[0].id,)
    (document,) = connection.execute("SELECT document FROM plans WHERE id = ?", mine).fetchone()
    try:
        with connection:
            connection.execute("UPDATE plans SET document = '{}' WHERE id = ?", mine)
        answer = full.get("/")
        assert answer.status_code == 200
        assert "cannot be read" in words(answer)
    finally:
        with connection:
            connection.execute(
                "UPDATE plans SET document = ? WHERE id = ?", (document, plans[0].id)
            )
        connection.close()


@pytest.mark.parametrize(("address", "status", "said"), [
    ("/?profile=lab&after=nothing", 404, "nothing"),
    ("/plans/0123450000", 404, "no plan has an id that begins with"),
    ("/plans/not-an-id", 404, "not-an-id"),
    ("/profiles/nobody", 404, "nobody"),
    ("/v1/observations", 404, "/v1/observations does not exist"),
    ("/observed", 404, "/observed does not exist"),
    ("/whatif", 404, "/whatif does not exist"),
    ("/models/olmoe", 404, "/models/olmoe does not exist"),
    ("/?after=nothing", 404, "nothing"),
    ("/compare?first=zz&second=zz", 404, "zz"),
])  # fmt: skip
def test_what_is_missing_has_next_steps(full: Client, address: str, status: int, said: str) -> None:
    answer = full.get(address)
    assert answer.status_code == status
    assert said in words(answer)


def test_observed_runs_stand_on_pages_of_their_machine_and_of_its_plans_and_calibrate_new_plans(
    full_planner: ServicePlanner, full: Client
) -> None:
    new = "/new?model=olmoe&profile=h100-x8&world_size=8&global_batch=32&seq=2048&target=megatron"
    plan, machine = f"/plans/{TRAINING}", "/profiles/h100-x8"
    texts = [words(full.get(page)) for page in (plan, machine, new)]
    assert not [text for text in texts if "Observed runs" in text or "Calibrated by" in text]
    now = full_planner.sources.profile("h100-x8").profile.digest
    of_plan, version = training_plan().inputs.profile_fingerprint, find_target("megatron").number
    runs = [
        observed_run("olmoe", 1.25, profile_fingerprint=of_plan),
        observed_run("olmoe", 1.5, profile_fingerprint=of_plan, target="torchtitan"),
        observed_run("olmoe", 1.75, profile_fingerprint=now, target_version=version),
    ]
    numbers = [full_planner.store.add_observed_run(run) for run in runs]
    try:
        texts = [words(full.get(page)) for page in (plan, machine, new)]
    finally:
        full_planner.store.remove_observed_runs(numbers)
    shown = [[number for number in numbers if f" r{number} 20" in text] for text in texts]
    assert shown == [numbers[:1], numbers[2:], []]
    step = format_seconds(runs[0].seconds)
    assert re.search(rf"r{numbers[0]} 20.* {format_seconds(1 / 3)} {step} 1\.25", texts[0])
    assert "Calibrated by 1 run of yours" in texts[2]


def test_files_are_kept_by_browsers_until_they_change(full: Client) -> None:
    page = full.get("/").text
    for link in re.findall(r'"(/static/[^"]+)"', page):
        answer = full.get(link)
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "private, no-cache"
        tag = {"If-None-Match": answer.headers["etag"]}
        assert full.get(link, headers=tag).status_code == 304
    script = full.get("/static/moetune.js")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert full.get("/static/moetune.css").content == (STATIC / "moetune.css").read_bytes()
    assert full.get("/static/..%2Fhtml.py").status_code == 404


def test_pages_are_no_part_of_the_api(full: Client) -> None:
    paths = full.get("/openapi.json").json()["paths"]
    assert not [
        path for path in paths if not path.startswith(("/v1/", "/healthz", "/readyz", "/metrics"))
    ]


def test_training_plans_are_listed_and_compared(full: Client, plans: tuple[Plan, Plan]) -> None:
    assert TRAINING[:12] in full.get("/").text
    page = unescape(full.get(f"/plans/{TRAINING}").text)
    assert "Lay it out as dp 4 · tp 2 · pp 2 · ep 8" in page
    assert full.get(f"/v1/plans/{TRAINING}").json() == training_plan().document
    both = unescape(full.get(f"/compare?first={TRAINING}&second={OTHER.id}").text)
    assert "takes dp 16 · micro-batch 1 instead of dp 4" in both
    mixed = unescape(full.get(f"/compare?first={TRAINING}&second={plans[0].id}").text)
    assert "not of the same work" in mixed


def test_at_an_unknown_address_a_browser_gets_a_page_a_program_a_problem(steady: Client) -> None:
    page = steady.get("/nothing", headers={"Accept": "text/html,*/*"})
    assert page.status_code == 404
    assert page.headers["content-type"].startswith("text/html")
    assert "/nothing does not exist" in page.text
    for address, accept in (("/nothing", "*/*"), ("/v1/nothing", "text/html")):
        problem = steady.get(address, headers={"Accept": accept})
        assert problem.status_code == 404
        assert problem.json()["detail"] == f"{address} does not exist"


def test_a_training_plan_leads_with_its_memory_and_to_a_new_plan(full: Client) -> None:
    page = full.get(f"/plans/{TRAINING}").text
    assert re.findall(r'data-table="([\w-]+)"', page)[0] == "memory"
    anew = re.search(r'href="(/new\?model[^"]+)"', page)
    assert anew is not None
    asked = httpx.URL(unescape(anew[1])).params
    assert asked["memory_limit"] == f"{training_plan().inputs.memory_limit_bytes}B"
    assert asked["dtype"] == "bfloat16"
    for name in training_plan().memory.parts:
        assert name in page
