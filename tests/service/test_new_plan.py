"""The page New plan: its answer is the plan of its command and of the API, and is kept when asked.

A question has the same arguments on the page and in the API: refusals are tested on both at once.
"""

import html
import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest

from moetune.app.planner import ServicePlanner
from moetune.domain.units import format_bytes, format_seconds
from moetune.service.access import Access
from moetune.service.app import create_app
from tests.cli.conftest import cli, home  # noqa: F401 - fixtures
from tests.cli.running import Cli
from tests.huggingface.configs import QWEN3
from tests.report.lab import lab_profile
from tests.service.asking import READ, WRITE, Client, client_of

LAYER = {"model": "gpt-s", "profile": "rtx2080ti-x64", "world_size": "64", "tokens": "4096"}
MODEL = {"model": "olmoe", "profile": "h100-x8", "world_size": "8", "global_batch": "32",
         "seq": "2048", "target": "megatron"}  # fmt: skip
CONFIG = {
    **QWEN3, "hidden_size": 1024, "num_hidden_layers": 8, "head_dim": 128, "vocab_size": 32_000,
    "moe_intermediate_size": 512, "intermediate_size": 2048,
}  # fmt: skip
PASTED = {name: text for name, text in MODEL.items() if name != "model"}


def post(client: Client, path: str, fields: dict[str, str], **more: Any) -> httpx.Response:
    return client.ask("POST", path, data=fields, **more)


def body(fields: dict[str, str]) -> dict[str, object]:
    """Return the same question as values of JSON."""
    return {name: int(text) if text.isdecimal() else text for name, text in fields.items()}


def command_in(page: httpx.Response) -> list[str]:
    [command] = re.findall(r"<code>moetune (plan --.*?)</code>", page.text)
    return shlex.split(html.unescape(command))


def sections_in(page: httpx.Response) -> list[list[str]]:
    """Return the words of each section; parts of one size may change places."""
    text = re.sub(r'<a class="csv".*?</a>|<svg.*?</svg>', "", page.text, flags=re.DOTALL)
    sections = re.findall(r'<section id="[\w-]+">.*?</section>', text, re.DOTALL)
    return [sorted(re.sub(r"<[^>]+>", " ", section).split()) for section in sections]


def plain(page: httpx.Response) -> str:
    """Return a page without its tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", page.text))


@pytest.mark.parametrize("fields", [
    LAYER, {**LAYER, "tokens": "6k", "memory_limit": "1GiB"},
    {**LAYER, "world_size": "32", "allow_modelled": "yes", "forward_degree": "2"},
    {"d_model": "1024", "d_hidden": "2048", "num_experts": "64", "top_k": "2", "tokens": "4k",
     "activation": "relu", "profile": "rtx2080ti-x64"},
    MODEL, {**MODEL, "target": "torchtitan", "model": "deepseek-v2-lite"},
    {**MODEL, "memory_limit": "60GiB", "pp": "2", "micro_batch": "1", "recompute": "norm"},
    pytest.param({**MODEL, "front": "yes", "optimizer": "adam-bf16", "routing": "natural"},
                 marks=pytest.mark.thorough),
    {**MODEL, "vpp": "1", "nodes": "1", "world_size": ""},
])  # fmt: skip
def test_an_answer_is_the_plan_of_its_command_and_the_page_of_the_kept_plan(
    client: Client, cli: Cli, fields: dict[str, str]  # noqa: F811 - a fixture
) -> None:  # fmt: skip
    page = client.get("/new", params={name: text for name, text in fields.items() if text})
    assert page.status_code == 200
    plan = json.loads(cli(*command_in(page), "--json", "--no-save").out)
    text = html.unescape(page.text)
    assert format_seconds(plan["predicted"]["step_seconds"]) in text
    assert format_bytes(plan["memory"]["peak_bytes"]) in text
    assert ('id="front"' in text) == ("front" in fields)
    assert client.get("/v1/plans").json()["items"] == []
    kept = post(client, "/new/keep", fields)
    assert kept.headers["location"] == f"/plans/{plan['id']}"
    assert client.get(f"/v1/plans/{plan['id']}").json() == plan
    shown, stored = sections_in(page), sections_in(client.get(kept.headers["location"]))
    assert len(shown) > 3
    assert shown == stored[: len(shown)]
    assert post(client, "/new/keep", fields).headers["location"] == f"/plans/{plan['id']}"
    assert len(client.get("/v1/plans").json()["items"]) == 1


def test_the_api_plans_models_as_the_command_does_and_whatif_changes_them(
    client: Client, cli: Cli  # noqa: F811 - a fixture
) -> None:  # fmt: skip
    flags = [word for name, text in MODEL.items() for word in (f"--{name.replace('_', '-')}", text)]
    plan = json.loads(cli("plan", *flags, "--tp", "2", "--json", "--no-save").out)
    asked = {**body(MODEL), "tp": 2}
    made = client.post("/v1/plans:resolve", asked)
    assert made.json() == plan
    assert client.get(made.headers["content-location"]).content == made.content
    config = client.post("/v1/plans:resolve", {**body(PASTED), "config": CONFIG})
    assert config.json()["inputs"]["model"] == "pasted"
    changed = client.post(
        "/v1/whatif", {"inputs": asked, "changes": {"constraints": {"tp": None}}}
    ).json()
    assert changed["before"] == plan
    assert changed["after"]["id"] == client.post("/v1/plans:resolve", body(MODEL)).json()["id"]


@pytest.mark.parametrize(("name", "value", "said"), [
    ("routing", "/etc/passwd", "routing must be balanced or natural"),
    ("model", "/etc/passwd", "model must be a name of the list"),
    ("world-size", str(2**20), "changes.world_size must be from 1 to 16384"),
])  # fmt: skip
def test_a_changed_question_is_held_to_the_limits_of_a_new_question(
    client: Client, name: str, value: str, said: str
) -> None:
    question = {"inputs": body(MODEL), "changes": {"constraints": {name: value}}}
    answer = client.post("/v1/whatif", question)
    assert answer.status_code == 422
    assert said in answer.json()["detail"]


REFUSED = [
    (LAYER, {"world_size": "0"}, 422, "world_size", "must be from 1 to"),
    (LAYER, {"memory_limit": "24"}, 422, "memory_limit", "size '24' has no unit"),
    (LAYER, {"memory_limit": "1B"}, 409, "", "1 B"),
    (LAYER, {"world_size": "32"}, 424, "", "--allow-modelled"),
    (LAYER, {"model": "nobody"}, 422, "model", "model must be a name of the list"),
    (LAYER, {"profile": "/etc/passwd"}, 422, "profile", "profile must be a name"),
    (LAYER, {"global_batch": "32"}, 422, "global_batch", "is for whole models"),
    (MODEL, {"model": "/etc"}, 422, "model", "model must be a name of the list"),
    (MODEL, {"routing": "/etc/passwd"}, 422, "routing", "routing must be balanced or natural"),
    (MODEL, {"global_batch": "7", "tp": "1", "pp": "1"}, 422, "tp", "--tp 8"),
    (MODEL, {"pp": "3"}, 422, "pp", "nearest that agree: --pp 4"),
    (MODEL, {"memory_limit": "4GiB"}, 409, "", "memory binds"),
    (MODEL, {"config": "e30"}, 422, "config", "an address has no configuration"),
]


@pytest.mark.parametrize(("base", "change", "status", "where", "said"), REFUSED)
def test_a_wrong_field_is_said_next_to_it_and_the_same_by_the_api(
    steady: Client, base: dict[str, str], change: dict[str, str], status: int, where: str, said: str
) -> None:
    fields = {**base, **change}
    page = steady.get("/new", params=fields)
    assert page.status_code == status
    text = html.unescape(page.text)
    assert said in plain(page)
    if where:
        assert re.search(rf'name="{where}(_text)?"[^>]* aria-invalid="true"', text)
        assert text.count('role="alert"') == 1
    for path in ("/new", "/new/keep"):
        again = post(steady, path, fields)
        assert again.status_code == (303 if path == "/new" else status)
    if base is MODEL and fields["model"] == "olmoe":
        answer = steady.post("/v1/plans:resolve", body(fields))
        assert answer.status_code == status


def test_an_address_has_what_is_filled_in_and_asks_the_same(steady: Client) -> None:
    sent = post(steady, "/new", {**MODEL, "pp": "", "token": "secret", "stages": " "})
    assert sent.status_code == 303
    there = httpx.URL(sent.headers["location"])
    assert dict(there.params) == MODEL
    page = steady.get(str(there))
    for name, text in MODEL.items():
        assert re.search(rf'name="{name}"[^>]*value="{text}"|<option selected>{text}<', page.text)


def test_a_pasted_configuration_is_planned_as_its_file_is(
    steady: Client, cli: Cli  # noqa: F811 - a fixture
) -> None:  # fmt: skip
    page = post(steady, "/new", {**PASTED, "config_text": json.dumps(CONFIG, indent=1)})
    assert page.status_code == 200
    [shown] = re.findall(r'name="config_text"[^>]*>(.*?)</textarea>', page.text, re.DOTALL)
    assert json.loads(html.unescape(shown)) == CONFIG
    Path("pasted").mkdir()
    Path("pasted/config.json").write_text(json.dumps(CONFIG))
    plan = json.loads(cli(*command_in(page), "--json", "--no-save").out)
    assert format_seconds(plan["predicted"]["step_seconds"]) in page.text


NOT_CONFIGS = [
    ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12", "Git LFS"),
    ("<!doctype html></textarea><script>alert(1)</script>", "HTML"),
    ("[" * 100_000, "nested too deeply"),
    ('{"model_type": "qwen3_moe", "note": "' + "x" * 300_000 + '"}', "longer than the 256"),
]


@pytest.mark.parametrize(("text", "said"), NOT_CONFIGS)
def test_no_configuration_is_refused_by_name(planner: ServicePlanner, text: str, said: str) -> None:
    with client_of(create_app(planner, Access())) as client:
        answer = post(client, "/new/keep", {**PASTED, "config_text": text})
    assert answer.status_code == 422
    assert said in plain(answer)
    assert "<script>alert" not in answer.text


def test_a_form_larger_than_the_service_takes_is_refused(steady: Client) -> None:
    assert post(steady, "/new", {**PASTED, "config_text": "x" * 100_000}).status_code == 413


def test_a_session_reads_answers_and_keeps_with_the_write_token_alone(
    guarded: Client, planner: ServicePlanner
) -> None:
    entered = post(guarded, "/login", {"token": WRITE, "next": "/new"})
    pair = {"Cookie": entered.headers["set-cookie"].partition(";")[0]}
    assert 'name="token"' in guarded.get("/new", params=LAYER, headers=pair).text
    assert post(guarded, "/new", LAYER, headers=pair).status_code == 303
    for token in ("", READ, "wrong"):
        refused = post(guarded, "/new/keep", {**LAYER, "token": token}, headers=pair)
        assert refused.status_code == 403
    elsewhere = {**pair, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    stolen = post(guarded, "/new/keep", {**LAYER, "token": WRITE}, headers=elsewhere)
    assert stolen.status_code == 403
    assert not planner.reading.plans()
    assert post(guarded, "/new/keep", {**LAYER, "token": WRITE}, headers=pair).status_code == 303
    assert len(planner.reading.plans()) == 1
    assert post(guarded, "/new", LAYER).status_code == 401


def test_a_visit_asks_for_this_machine_alone(client: Client, planner: ServicePlanner) -> None:
    assert "<option selected>h100-x8<" in client.get("/new").text
    planner.store.save_profile(lab_profile())
    page = client.get("/new")
    assert page.status_code == 200
    assert "<option selected>lab<" in page.text
    assert 'id="planned"' not in page.text
