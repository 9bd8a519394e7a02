"""The page New plan: its numbers are those of the command line, and it stores only what is kept."""

import base64
import html
import json
import re
import shlex
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from moetune.domain.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from moetune.huggingface.registry import model_names
from moetune.service.access import Access
from moetune.service.app import create_app
from moetune.solve.joint.front import LARGE, SAVING, SLOW
from moetune.workflows.open_planner import ServicePlanner
from tests.cli.conftest import cli, home  # noqa: F401 - fixtures
from tests.cli.running import Cli
from tests.huggingface.configs import QWEN3
from tests.report.lab import lab_profile
from tests.service.asking import READ, WRITE, Client, client_of

LAYER = {
    "kind": "layer", "model": "gpt-s", "profile": "rtx2080ti-x64", "world_size": "64",
    "tokens_per_rank": "4096",
}  # fmt: skip
ROUNDED = 1.006
"""Of numbers with three digits."""
MODEL = {
    "kind": "model", "decoder": "olmoe", "profile": "h100-x8", "world_size": "8",
    "global_batch": "32", "seq": "2048", "target": "megatron",
}  # fmt: skip
CONFIG = {
    **QWEN3, "hidden_size": 1024, "num_hidden_layers": 8, "head_dim": 128, "vocab_size": 32_000,
    "moe_intermediate_size": 512, "intermediate_size": 2048,
}  # fmt: skip


def answer(client: Client, **fields: str) -> httpx.Response:
    return client.get("/new/answer", params=fields)


def texts(found: httpx.Response, pattern: str) -> list[str]:
    return [html.unescape(one) for one in re.findall(pattern, found.text, re.DOTALL)]


def command_in(found: httpx.Response) -> list[str]:
    [command] = texts(found, r'id="command"><code>(.*?)</code>')
    assert command.startswith("moetune plan ")
    return shlex.split(command)[1:]


def rows(found: httpx.Response, name: str = "layouts") -> list[list[str]]:
    [table] = re.findall(rf'data-table="{name}".*?<tbody>(.*?)</tbody>', found.text, re.DOTALL)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in table.split("</tr>")]
    return [[html.unescape(cell).strip() for cell in row] for row in cells if row]


@pytest.mark.parametrize(
    "change",
    [
        {}, {"tokens_per_rank": "6k"}, {"memory_limit": "1GiB"},
        {"world_size": "32", "modelled": "1"}, {"dtype": "fp32"},
        {"model": "custom", "d_model": "1024", "d_hidden": "2048", "num_experts": "64",
         "top_k": "2", "activation": "relu"},
    ],
)  # fmt: skip
def test_a_layer_has_the_numbers_of_its_command(
    steady: Client, cli: Cli, change: dict[str, str]  # noqa: F811 - a fixture
) -> None:  # fmt: skip
    found = answer(steady, **{**LAYER, **change})
    assert found.status_code == 200
    command = command_in(found)
    plan = json.loads(cli(*command, "--json", "--no-save").out)
    chosen, *others = rows(found)
    degrees = [plan["pipeline"][f"{phase}_degree"] for phase in ("forward", "backward")]
    assert chosen[0] == f"{degrees[0]} and {degrees[1]}"
    assert chosen[1] == plan["memory"]["strategy"]
    assert chosen[2] == format_seconds(plan["predicted"]["step_seconds"])
    assert chosen[5] == format_bytes(plan["memory"]["peak_bytes"])
    assert [row[2] for row in others] == [
        format_seconds(one["step_seconds"]) for one in plan["alternatives"]
    ]
    for row, one in zip(others, plan["alternatives"], strict=True):
        assert one["lost_because"][1:].rstrip(".") in row[-1]


@pytest.mark.parametrize(
    "change",
    [
        {}, {"world_size": "16", "global_batch": "64"},
        {"target": "torchtitan", "decoder": "deepseek-v2-lite"},
        {"memory_limit": "40GiB"}, {"pp": "2", "micro_batch": "1"}, {"training_dtype": "fp8"},
    ],
)  # fmt: skip
def test_a_model_has_the_numbers_of_its_command_and_its_exports(
    steady: Client, cli: Cli, tmp_path: Path, change: dict[str, str]  # noqa: F811 - a fixture
) -> None:  # fmt: skip
    asked = {**MODEL, **change}
    found = answer(steady, **asked)
    assert found.status_code == 200
    file = tmp_path / "plan.json"
    plan = json.loads(cli(*command_in(found), "--json", "--no-save", "--output", str(file)).out)
    every = [plan, *plan["alternatives"]]
    assert [row[2] for row in rows(found)] == [
        format_seconds(one["predicted"]["step_seconds"]) for one in every
    ]
    assert [row[5] for row in rows(found)] == [
        format_bytes(one["memory"]["peak_bytes"]) for one in every
    ]
    assert steady.get("/new/plan.json", params=asked).json() == plan
    for target in ("megatron", "bridge", "torchtitan", "transformers", "deepspeed", "moetune"):
        made = cli("export", str(file), "--to", target)
        shown = texts(found, rf'id="export-{target}"><code>(.*?)</code>')
        assert bool(shown) == (made.code == 0)
        if not shown:
            assert re.search(rf"<p class=.cannot.>{target} \(\S+", found.text)
            continue
        assert shown[0].strip() == made.out.strip()


def test_every_pipeline_rank_has_its_memory_and_the_step_its_parts(steady: Client) -> None:
    found = answer(steady, **MODEL, pp="4")
    plan = steady.get("/new/plan.json", params={**MODEL, "pp": "4"}).json()
    fullest = plan["memory"]
    drawn = found.text.partition('data-figure="memory-parts"')[2].partition("</figure>")[0]
    assert f"pipeline rank {fullest['rank']} " in drawn
    assert format_bytes(fullest["peak_bytes"]) in drawn
    parts = found.text.partition('data-table="memory-parts"')[2].partition("</table>")[0]
    numbers = [list(map(int, re.findall(r'data-key="(\d+)"', row))) for row in parts.split("<tr>")]
    for *parts_of_rank, total in filter(None, numbers):
        assert sum(parts_of_rank) == pytest.approx(total, abs=len(parts_of_rank))
    assert max(row[-1] for row in numbers if row) == fullest["peak_bytes"]
    for name in ("timeline", "stages", "phases"):
        assert f'data-figure="{name}"' in found.text
    step = found.text.partition('data-figure="phases"')[2].partition("</figure>")[0]
    assert format_seconds(plan["predicted"]["step_seconds"]) in step


@pytest.mark.parametrize("change", [{}, {"memory_limit": "40GiB"}])
def test_the_front_of_a_model_is_that_of_its_command(
    steady: Client, cli: Cli, change: dict[str, str]  # noqa: F811 - a fixture
) -> None:  # fmt: skip
    asked = {**MODEL, "tp": "1", "micro_batch": "2", **change}
    [address] = texts(answer(steady, **asked), r'<a href="(/new/front[^"]*)"')
    page = steady.get(address)
    assert page.status_code == 200
    assert page.text.count('data-figure="front"') == 1
    command = command_in(answer(steady, **asked))
    on_devices = ("--offload-activations", "0", "--offload-optimizer", "0")
    assert "plan&#39;s step, nothing in host memory" in page.text
    plan = json.loads(cli(*command, *on_devices, "--front", "--json", "--no-save").out)
    limit, step = plan["inputs"]["memory_limit_bytes"], plan["predicted"]["step_seconds"]
    wanted = [
        (one["memory"]["peak_bytes"], one["predicted"]["step_seconds"])
        for one in plan["front"]
        if one["predicted"]["step_seconds"] <= SLOW * step
        and one["memory"]["peak_bytes"] <= LARGE * limit
    ]
    shown = [row for row in rows(page, "front") if row[-1] != "The plan."]
    assert len(shown) > 3
    front = [(parse_bytes(row[2]), parse_seconds(row[3])) for row in rows(page, "front")]
    for memory, seconds in front:
        least = min(each for needed, each in wanted if needed <= memory * ROUNDED)
        assert seconds >= least / ROUNDED or parse_seconds(format_seconds(step)) == seconds
    for memory, seconds in wanted:
        found = [each for needed, each in front if needed <= memory * ROUNDED]
        assert min(found) <= seconds / (1 - SAVING) * ROUNDED
    for row in shown:
        assert re.match(r"Needs .* more than there is, to save|[\d.]+ % slower: .|As fast", row[-1])
    assert any(row[-1] == "The plan." for row in rows(page, "front"))


def test_a_layers_front_is_in_its_answer(steady: Client) -> None:
    found = answer(steady, **LAYER)
    assert 'data-figure="memory"' in found.text
    assert "/new/front" not in found.text
    assert steady.get("/new/front", params=LAYER).status_code == 422


def test_the_page_has_its_answer_and_its_address_asks_the_same(steady: Client) -> None:
    page = steady.get("/new", params=LAYER)
    assert page.status_code == 200
    [shared] = texts(page, r'<a href="(/new\?[^"]*)" data-share')
    again = steady.get(shared)
    part = 'id="layouts"'
    assert again.text.partition(part)[2] == page.text.partition(part)[2]
    first = steady.get("/new")
    assert first.status_code == 200
    assert "GPT-XL MoE layer" in first.text


@pytest.mark.parametrize(
    ("base", "change", "status", "said"),
    [
        (LAYER, {"world_size": "0"}, 422, "GPUs must be from 1"),
        (LAYER, {"world_size": "99999999"}, 422, "GPUs must be from 1"),
        (LAYER, {"world_size": "many"}, 422, "GPUs: count"),
        (LAYER, {"tokens_per_rank": "1e9"}, 422, "Tokens a GPU: count"),
        (LAYER, {"tokens_per_rank": "9" * 300}, 422, "Tokens a GPU is longer"),
        (LAYER, {"memory_limit": "24"}, 422, "Memory of a GPU: size"),
        (LAYER, {"memory_limit": "9PB"}, 422, "Memory of a GPU"),
        (LAYER, {"memory_limit": "0GiB"}, 422, "Memory of a GPU must be from"),
        (LAYER, {"memory_limit": "1B"}, 409, "1 B"),
        (LAYER, {"world_size": "48"}, 422, "divide"),
        (LAYER, {"world_size": "32"}, 424, "32 ranks"),
        (LAYER, {"model": "nobody"}, 422, "nobody"),
        (LAYER, {"model": "ppmoe-6.7b"}, 422, "ppmoe-6.7b is a whole model"),
        (LAYER, {"model": "custom"}, 422, "Width of tokens is missing"),
        (LAYER, {"profile": "nobody"}, 424, "nobody"),
        (LAYER, {"profile": "/etc/passwd"}, 424, "/etc/passwd"),
        (LAYER, {"dtype": "int3"}, 422, "int3"),
        (LAYER, {"kind": "elephant"}, 422, "Plan for must be"),
        (MODEL, {"decoder": "nobody"}, 422, "Model must be a name of the list, got 'nobody'"),
        (MODEL, {"decoder": "/etc"}, 422, "Model must be a name"),
        (MODEL, {"decoder": "gpt-xl"}, 422, "Model must be a name"),
        (MODEL, {"decoder": "pasted"}, 422, "no configuration was pasted"),
        (MODEL, {"target": "abacus"}, 422, "Runtime must be one of"),
        (MODEL, {"global_batch": "-4"}, 422, "Batch: count"),
        (MODEL, {"global_batch": "7", "tp": "1", "pp": "1"}, 422, "global_batch (7)"),
        (MODEL, {"seq": "0"}, 422, "Sequence must be from"),
        (MODEL, {"training_dtype": "float32"}, 422, "float32"),
        (MODEL, {"pp": "3"}, 422, "3"),
        (MODEL, {"world_size": "1000000"}, 422, "GPUs must be from 1 to 16,384"),
        (MODEL, {"memory_limit": "4GiB"}, 409, "memory binds"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_its_status(
    steady: Client, base: dict[str, str], change: dict[str, str], status: int, said: str
) -> None:
    found = answer(steady, **{**base, **change})
    assert found.status_code == status
    assert 'role="alert"' in found.text
    assert said in html.unescape(found.text)
    page = steady.get("/new", params={**base, **change})
    assert page.status_code == status
    assert said in html.unescape(page.text)


@pytest.mark.parametrize(
    ("base", "change", "hint"),
    [
        (LAYER, {"world_size": "32"}, 'or accept an estimate with "Estimate numbers of GPUs"'),
        (MODEL, {"pp": "3"}, "nearest that agree: Pipeline ranks 4"),
        (MODEL, {"global_batch": "7", "tp": "1", "pp": "1"}, "Tensor parallel 8, Pipeline ranks 1"),
        (MODEL, {"micro_batch": "5"}, "nearest that agree: Micro-batch 4"),
    ],
)  # fmt: skip
def test_a_hint_names_fields_of_the_page(
    steady: Client, base: dict[str, str], change: dict[str, str], hint: str
) -> None:
    for path in ("/new/answer", *(["/new/front"] if base is MODEL else [])):
        assert hint in html.unescape(steady.get(path, params={**base, **change}).text)


def post(client: Client, path: str, fields: dict[str, str], **more: Any) -> httpx.Response:
    return client.ask("POST", path, data=fields, **more)


def test_a_pasted_configuration_is_planned_and_shared_by_its_address(
    steady: Client, cli: Cli  # noqa: F811 - a fixture
) -> None:  # fmt: skip
    fields = {**MODEL, "decoder": "pasted", "config_text": json.dumps(CONFIG, indent=1)}
    found = post(steady, "/new/answer", fields)
    assert found.status_code == 200
    Path("pasted").mkdir()
    Path("pasted/config.json").write_text(json.dumps(CONFIG))
    plan = json.loads(cli(*command_in(found), "--json", "--no-save").out)
    assert plan["inputs"].pop("model_path") == str(Path("pasted/config.json").resolve())
    assert rows(found)[0][2] == format_seconds(plan["predicted"]["step_seconds"])
    moved = post(steady, "/new", fields)
    assert moved.status_code == 303
    address = moved.headers["location"]
    assert address in texts(found, r'data-address="([^"]*)"')
    page = steady.get(address)
    assert page.status_code == 200
    assert rows(page) == rows(found)
    [shown] = texts(page, r'<textarea[^>]*name="config_text"[^>]*>(.*?)</textarea>')
    assert json.loads(shown) == CONFIG
    asked = {name: some[0] for name, some in parse_qs(urlsplit(address).query).items()}
    assert steady.get("/new/plan.json", params=asked).json() == plan
    assert steady.get("/new", params=fields).headers["location"] == address


def test_a_configuration_that_no_address_can_hold_is_planned_all_the_same(steady: Client) -> None:
    words = base64.b64encode(bytes(at * at % 251 ^ at % 256 for at in range(20_000))).decode()
    noise = {f"_name_or_path_{at}": words[at : at + 600] for at in range(0, 24_000, 600)}
    config = {**CONFIG, "id2label": noise}
    fields = {**MODEL, "decoder": "pasted", "config_text": json.dumps(config)}
    found = post(steady, "/new", fields)
    assert found.status_code == 200
    assert "too long for an address" in found.text
    assert 'formmethod="post"' in found.text
    assert post(steady, "/new/plan.json", fields).json()["inputs"]["model"] == "pasted"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12", "Git LFS"),
        ("PK\x03\x04 config.json", "compressed or binary"),
        ("<!doctype html><p>config", "HTML"),
        ('{"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.6"}', "UNet2DCondition"),
        ('{"sample_size": 64}', "diffusion"),
        ('{"weight_map": {}}', "index of weights"),
        ("{'model_type': 'qwen3_moe'}", "not valid JSON"),
        ('{"model_type": NaN}', "not valid JSON"),
        ('{"model_type": "qwen3_moe", "num_experts": 1' + "0" * 30 + "}", "larger than any"),
        ('{"a":' * 40 + "1" + "}" * 40, "nested"),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps({"text_config": {**CONFIG, "num_hidden_layers": 10**7}}), "10,000,000"),
        (json.dumps({**CONFIG, "num_nextn_predict_layers": 10**7}), "10,000,000"),
        ("[1, 2]", "not an object"),
        ("{}", "model_type"),
        ('{"model_type": "elephant"}', "elephant"),
        ('{"model_type": "qwen3_moe", "note": "' + "x" * 300_000 + '"}', "longer than the 256 KiB"),
        ('{"model_type": "\\ud800"}', "characters"),
    ],
)  # fmt: skip
def test_what_is_no_configuration_is_refused_by_name(
    planner: ServicePlanner, text: str, said: str
) -> None:
    fields = {**MODEL, "decoder": "pasted", "config_text": text}
    with client_of(create_app(planner, Access())) as client:
        for path in ("/new/answer", "/new"):
            found = post(client, path, fields)
            assert found.status_code == 422 or (path, found.status_code) == ("/new", 303)
            if found.status_code != 303:
                assert said in html.unescape(found.text)


def test_a_form_larger_than_the_service_takes_is_refused(steady: Client) -> None:
    fields = {**MODEL, "decoder": "pasted", "config_text": "x" * 100_000}
    assert post(steady, "/new/answer", fields).status_code == 413


@pytest.mark.parametrize(
    "packed",
    ["x", "!!!", "e30", "a" * 7000,
     base64.urlsafe_b64encode(zlib.compress(b'{"a": "' + b"0" * 4_000_000 + b'"}')).decode(),
     base64.urlsafe_b64encode(zlib.compress(b"\xff\xfe")).decode(),
     base64.urlsafe_b64encode(zlib.compress(b"{}") + b"more").decode(),
     base64.urlsafe_b64encode(zlib.compress(json.dumps(CONFIG).encode())[:-8]).decode()],
)  # fmt: skip
def test_a_damaged_address_and_a_bomb_are_refused(steady: Client, packed: str) -> None:
    found = answer(steady, **MODEL | {"decoder": "pasted", "config": packed})
    assert found.status_code == 422
    assert re.search("in the address|model_type", found.text)


def test_a_kept_plan_is_the_one_of_the_api(client: Client, planner: ServicePlanner) -> None:
    assert answer(client, **LAYER).status_code == 200
    assert not planner.reading.plans()
    kept = post(client, "/new/keep", LAYER)
    assert kept.status_code == 303
    [plan] = planner.reading.plans()
    assert kept.headers["location"] == f"/plans/{plan.id}"
    assert client.get(kept.headers["location"]).status_code == 200
    document = client.get(f"/v1/plans/{plan.id}").json()
    assert document["pipeline"]["ranges"]
    assert rows(answer(client, **LAYER))[0][2] == format_seconds(
        document["predicted"]["step_seconds"]
    )
    assert post(client, "/new/keep", LAYER).headers["location"] == f"/plans/{plan.id}"
    assert post(client, "/new/keep", {**LAYER, "world_size": "7"}).status_code == 422


def test_a_models_plan_is_kept_once(client: Client, planner: ServicePlanner) -> None:
    pasted = {**MODEL, "decoder": "pasted", "config_text": json.dumps(CONFIG)}
    for fields in (MODEL, pasted, MODEL):
        kept = post(client, "/new/keep", fields)
        assert kept.status_code == 303
        assert client.get(kept.headers["location"]).status_code == 200
    assert len(planner.reading.plans()) == 2
    plan = client.get("/new/plan.json", params=MODEL).json()
    assert client.get(f"/v1/plans/{plan['id']}").json() == plan
    assert post(client, "/new/keep", {**MODEL, "pp": "3"}).status_code == 422


def test_a_session_reads_answers_and_keeps_with_the_write_token_alone(
    guarded: Client, planner: ServicePlanner
) -> None:
    entered = post(guarded, "/login", {"token": WRITE, "next": "/new"})
    pair = {"Cookie": entered.headers["set-cookie"].partition(";")[0]}
    page = guarded.get("/new", params=LAYER, headers=pair)
    assert 'name="token"' in page.text
    asked = {**MODEL, "decoder": "pasted", "config_text": json.dumps(CONFIG)}
    assert post(guarded, "/new/answer", asked, headers=pair).status_code == 200
    for token in ("", READ, "wrong"):
        refused = post(guarded, "/new/keep", {**LAYER, "token": token}, headers=pair)
        assert refused.status_code == 403
    elsewhere = {**pair, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    stolen = post(guarded, "/new/keep", {**LAYER, "token": WRITE}, headers=elsewhere)
    assert stolen.status_code == 403
    assert not planner.reading.plans()
    kept = post(guarded, "/new/keep", {**LAYER, "token": WRITE}, headers=pair)
    assert kept.status_code == 303
    assert len(planner.reading.plans()) == 1
    assert post(guarded, "/new/answer", asked).status_code == 401


def test_who_logs_in_gets_the_address_that_was_shared(guarded: Client) -> None:
    led = guarded.get("/new?kind=model&seq=4096", headers={"Accept": "text/html"})
    assert led.headers["location"] == "/login?next=/new%3Fkind%3Dmodel%26seq%3D4096"
    entered = post(guarded, "/login", {"token": READ, "next": "/new?kind=model&seq=4096"})
    assert entered.headers["location"] == "/new?kind=model&seq=4096"


def test_what_is_pasted_is_shown_as_text(steady: Client) -> None:
    fields = {**MODEL, "decoder": "pasted", "config_text": "</textarea><script>alert(1)</script>"}
    page = post(steady, "/new", fields)
    assert page.status_code == 422
    assert "<script>alert" not in page.text


def test_every_named_model_can_be_chosen(steady: Client) -> None:
    page = steady.get("/new", params=LAYER)
    for name in model_names():
        assert f'<option value="{name}"' in page.text


def test_a_measured_machine_is_planned_for_first(client: Client, planner: ServicePlanner) -> None:
    planner.store.save_profile(lab_profile())
    page = client.get("/new")
    assert page.status_code == 200
    assert '<option value="lab" selected>' in page.text
