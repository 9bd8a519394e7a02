"""The page Check and its route: the command's answer, escaped, from the text alone."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from moetune.huggingface.registry import find_decoder_model
from tests.cli.conftest import cli, home  # noqa: F401 - fixtures
from tests.cli.running import Cli
from tests.cli.test_cli_check import SCRIPT
from tests.huggingface.configs import QWEN3
from tests.service.asking import READ, Client

BUDGET = {"train_tokens": "1T", "price": "2.5", "utilization": "0.9"}
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "max_seq_length": 4096,
    "zero_optimization": {"stage": 3},
}  # fmt: skip
HOSTILE = "# </textarea><script>alert(1)</script> {{ 7*7 }}\n"


@pytest.mark.thorough
def test_the_answer_is_that_of_the_command_and_nothing_of_the_text_is_markup(
    steady: Client, cli: Cli  # noqa: F811 - a fixture
) -> None:  # fmt: skip
    Path("launch.sh").write_text(HOSTILE + SCRIPT)
    flags = [
        word for name, text in BUDGET.items() for word in (f"--{name.replace('_', '-')}", text)
    ]
    document = cli("check", "launch.sh", "--profile", "h100-x8", *flags, "--json").document
    sent = {"text": HOSTILE + SCRIPT, "profile": "h100-x8"}
    numbers = {"price": 2.5, "utilization": 0.9}
    assert steady.post("/v1/check", {**sent, **BUDGET, **numbers}).json() == document
    fields = {**sent, **BUDGET, "text": sent["text"].replace("\n", "\r\n")}
    page = steady.ask("POST", "/check", data=fields)
    assert page.status_code == 200
    assert "<script>alert" not in page.text
    words = html.unescape(re.sub(r"<[^>]+>", " ", page.text))
    for section in document["sections"]:
        for paragraph in section["paragraphs"]:
            assert paragraph.replace("`", "") in re.sub(r"\s+", " ", words).replace("`", "")
    assert HOSTILE.strip() in words


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        ({"text": " \n"}, 422, "there is no launch to check"),
        ({"text": "x" * (2**15), "name": "a.toml"}, 422, "a.toml"),
        ({"text": "make pizza"}, 422, "no command in the file starts a training"),
        ({"model": "/etc/passwd"}, 422, "model must be a name of the list"),
        ({"profile": "../profiles/a.toml"}, 422, "profile must be a name"),
        ({"profile": "nowhere"}, 424, "nowhere"),
        ({"world_size": 2**20}, 422, "world_size must be from 1 to 16384"),
        ({"train_tokens": "15"}, 422, "has no unit"),
        ({"price": 2.0}, 422, "price needs train_tokens"),
        ({"more": 1}, 422, "unknown key 'more'"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    steady: Client, sent: dict[str, Any], status: int, said: str
) -> None:
    answer = steady.post("/v1/check", {"text": SCRIPT, "profile": "h100-x8", **sent})
    assert answer.status_code == status
    assert said in answer.json()["detail"]
    if "more" not in sent:
        page = steady.ask("POST", "/check", data={"text": SCRIPT, "profile": "h100-x8", **sent})
        assert page.status_code == status
        assert said.rsplit(maxsplit=1)[-1] in html.unescape(page.text)


@pytest.mark.parametrize("of_file", [True, False], ids=["in-the-file", "asked"])
def test_no_file_of_the_services_machine_is_read(
    steady: Client, tmp_path: Path, *, of_file: bool
) -> None:
    """The path is of a configuration that the command would read."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3))
    assert find_decoder_model(str(path), world_size=8).decoder
    texts = [json.dumps(DEEPSPEED | ({"model_name": str(path)} if of_file else {}))]
    if of_file:
        texts.append(f"torchrun train.py actor_rollout_ref.actor.megatron.seed=1 "
                     f"actor_rollout_ref.model.path={path}\n")  # fmt: skip
    for text in texts:
        sent = {"text": text, "profile": "h100-x8", "world_size": 8}
        answer = steady.post("/v1/check", sent if of_file else {**sent, "model": str(path)})
        assert answer.status_code == 422
        assert str(path) in answer.json()["detail"]


def test_a_readers_token_suffices_and_another_sites_form_is_refused(steady_guarded: Client) -> None:
    reader = {"Authorization": f"Bearer {READ}"}
    sent = {"text": SCRIPT, "profile": "h100-x8"}
    assert steady_guarded.ask("POST", "/check", data=sent).status_code == 401
    assert steady_guarded.post("/v1/check", {}, headers=reader).status_code == 422
    for more, status in (({}, 200), ({"Sec-Fetch-Site": "cross-site"}, 403)):
        asked = steady_guarded.ask("POST", "/check", data=sent, headers={**reader, **more})
        assert asked.status_code == status


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("launch.json", " {\n}"), ("launch.toml", "# a\n[parallelism]\nx = 1"),
        ("launch.py", "# a\nfrom torch import nn\n"), ("launch.yaml", "# a\nMODEL_ARGS:\n  --x: 1"),
        ("launch.sh", "#!/bin/sh\nimport x"), ("launch.sh", "TP=1\ntorchrun a.py [x]\n"),
    ],
)  # fmt: skip
def test_the_kind_of_a_pasted_text_is_seen(name: str, text: str) -> None:
    from moetune.app.check import name_of

    assert name_of(text) == name
