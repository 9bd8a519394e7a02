"""`moetune.plan` and `moetune.load_plan`: the numbers and words of the command line, in a cell."""

import copy
import inspect
import json
import logging
import pickle
import re
from collections.abc import Callable
from dataclasses import fields, replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moetune
from moetune.app.files import bundled_profiles, load_profile_file
from moetune.app.notebook import PlanView
from moetune.domain.question import Question
from tests.cli.running import XL, Cli
from tests.golden.screens import SCRIPT

LAYER: dict[str, Any] = {"model": "gpt-xl", "profile": "rtx2080ti-x64", "dtype": "float16"}
SIZES: dict[str, Any] = {
    "d_model": 1024, "d_hidden": 4096, "num_experts": np.int64(64), "top_k": 2, "tokens": "8k",
    "activation": "swiglu", "profile": "rtx2080ti-x64", "dtype": "fp16", "memory_limit": "10GB",
    "memory_taken": 2.5e8, "max_degree": 8, "order": "interleaved",
}  # fmt: skip
SIZES_FLAGS = ("--d-model", "1024", "--d-hidden", "4096", "--num-experts", "64", "--top-k", "2",
               "--tokens", "8192", "--activation", "swiglu", "--profile", "rtx2080ti-x64",
               "--dtype", "float16", "--memory-limit", "10GB", "--memory-taken", "250MB",
               "--max-degree", "8", "--order", "interleaved")  # fmt: skip
TRAINING: dict[str, Any] = {
    "model": "qwen3-30b-a3b", "profile": "h100-x8", "world_size": 64, "global_batch": 1024,
    "seq": "4k", "target": "megatron", "recompute": ["norm", "moe_act"],
}  # fmt: skip
TRAINING_FLAGS = (
    "--model", "qwen3-30b-a3b", "--profile", "h100-x8", "--world-size", "64", "--global-batch",
    "1024", "--seq", "4096", "--target", "megatron", "--recompute", "norm,moe_act",
)  # fmt: skip


class Cell(HTMLParser):
    """A cell as a browser reads it: open elements, and what a notebook must not load."""

    EMPTY = ("input",)

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(html)
        self.close()
        self.words = " ".join(unescape(re.sub(r"<[^>]+>", " ", html.split("</style>")[1])).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        given = dict(attrs)
        self.ids += [name for name in (given.get("id"),) if name]
        self.links += [link for key in ("href", "src") if (link := given.get(key))]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(("arguments", "flags"), [(LAYER, XL), (SIZES, SIZES_FLAGS)])
def test_a_plan_has_the_numbers_and_the_words_of_the_command_line(
    cli: Cli, arguments: dict[str, Any], flags: tuple[str, ...]
) -> None:
    plan = moetune.plan(**arguments)
    assert plan.to_dict() == cli("plan", *flags, "--json").document
    assert cli("plan", *flags).out.startswith(f"{plan}\n")
    why = plan.explain()
    assert f"{why}\n" == cli("explain", plan.id).out
    assert why.to_dict() == cli("explain", plan.id, "--json").document


def test_training_plans_have_the_words_of_the_command_line(cli: Cli, tmp_path: Path) -> None:
    plan = moetune.plan(**TRAINING)
    document = cli("plan", *TRAINING_FLAGS, "--json").document
    assert plan.to_dict() == document
    assert plan.id == document["id"]
    assert cli("plan", *TRAINING_FLAGS).out.startswith(f"{plan}\n")
    file = tmp_path / "layout.json"
    plan.save(file)
    assert json.loads(file.read_text()) == document
    assert f"{plan.explain()}\n" == cli("explain", str(file)).out
    assert plan.explain().to_dict() == cli("explain", str(file), "--json").document
    export = cli("export", str(file), "--to", "megatron", "--json").document
    assert moetune.plan(**TRAINING).export("megatron").text == export["text"]
    again = moetune.load_plan(file)
    assert again.to_dict() == document
    assert again == plan == moetune.load_plan(plan.id[:8])
    assert again.export("megatron").launch == export["launch"]


def test_a_training_plan_answers_questions_as_the_command_line_does(cli: Cli) -> None:
    plan = moetune.plan(**TRAINING)
    document = cli("plan", *TRAINING_FLAGS, "--json").document
    assert plan.predicted.step_seconds == document["predicted"]["step_seconds"]
    assert plan.memory.peak_bytes == document["memory"]["peak_bytes"]
    assert plan.layout.tp == document["layout"]["tp"]
    why = plan.explain(layout="tp=2")
    assert f"{why}\n" == cli("explain", plan.id, "--layout", "tp=2").out
    assert why.to_dict() == cli("explain", plan.id, "--layout", "tp=2", "--json").document
    changed = plan.whatif(tp=2, memory_limit="60GiB")
    flags = ("--constraint", "tp=2", "--memory-limit", "60GiB")
    assert f"{changed}\n" == cli("whatif", plan.id, *flags).out
    answer = cli("whatif", plan.id, *flags, "--json").document
    assert changed.to_dict() == {key: answer[key] for key in answer if key != "sections"}
    faster = plan.whatif(profile="b200-x8", speeds={"communication": 2.0}).to_dict()
    assert faster["after"]["inputs"]["profile"] == "b200-x8 with communication × 2"
    with pytest.raises(moetune.InputError, match="nothing is changed"):
        plan.whatif()
    with pytest.raises(moetune.InputError, match="tpp is no flag of a plan"):
        plan.whatif(tpp=2)


def test_memory_is_that_of_the_command_line(cli: Cli) -> None:
    memory = moetune.memory("olmoe", world_size=16, device_memory="40GB", ep=4, seq=2048)
    flags = ("olmoe", "--world-size", "16", "--device-memory", "40GB", "--ep", "4", "--seq", "2k")
    answer = cli("memory", *flags, "--json").document
    assert memory.to_dict() == {key: answer[key] for key in answer if key != "sections"}
    assert memory.fits
    assert f"{memory}\n" == cli("memory", *flags).out
    with pytest.raises(moetune.InputError, match="tensor"):
        moetune.memory("olmoe", tensor=2)
    with pytest.raises(moetune.InputError, match="single layer"):
        moetune.memory("gpt-xl")


@pytest.mark.thorough
def test_a_launch_is_checked_as_on_the_command_line(cli: Cli) -> None:
    script = str(SCRIPT)
    check = moetune.check(script, "--seq-length", "8192", profile="h100-x8", values={"TP": "1"})
    flags = (script, "--profile", "h100-x8", "--set", "TP=1", "--", "--seq-length", "8192")
    answer = cli("check", *flags[:-3], "--json", *flags[-3:])
    assert check.to_dict() == {
        key: value for key, value in answer.document.items() if key != "sections"
    }
    assert check.to_dict()["inputs"]["seq"] == 8192
    assert not check.starts
    assert f"{check}\n" == cli("check", *flags).out
    with pytest.raises(moetune.ProfileError, match="nosuch"):
        moetune.check(script, profile="nosuch")
    with pytest.raises(AttributeError, match=r"withdrawn\.md"):
        _ = moetune.Checkpoints


def test_an_id_finds_what_was_saved(cli: Cli, database: Path) -> None:
    kept = moetune.plan(**LAYER, save=False)
    assert not database.exists()
    with pytest.raises(moetune.InputError, match=kept.id):
        moetune.load_plan(kept.id)
    saved = moetune.plan(**LAYER)
    assert saved == kept
    assert moetune.load_plan(saved.id[:6]) == saved
    assert cli("plans", "list", "--json").document["plans"][0]["id"] == saved.id
    other = database.with_name("other.db")
    moetune.plan(**{**LAYER, "model": "gpt-s"}, db=other)
    with pytest.raises(moetune.InputError, match=r"newest is \w{6}; name another store with db=…"):
        moetune.load_plan(saved.id, db=other)


def test_a_file_is_loaded_as_it_was_saved(home: Path) -> None:
    plan = moetune.plan(**LAYER, save=False)
    plan.save(home / "plan.json")
    for name in (home / "plan.json", str(home / "plan.json"), "~/plan.json"):
        assert moetune.load_plan(name) == plan
    # A path is a path, however it is named.
    plan.save("work.plan")
    assert moetune.load_plan(Path("work.plan")) == plan


def test_a_profile_is_a_name_a_file_or_itself(home: Path) -> None:
    file = bundled_profiles()["rtx2080ti-x64"]
    (home / "work" / "lab.toml").write_bytes(file.read_bytes())
    wanted = moetune.plan(**LAYER, save=False)
    for profile in (load_profile_file(file), "lab.toml", Path("lab.toml"), file):
        view = moetune.plan(**{**LAYER, "profile": profile}, save=False)
        assert view == wanted
        assert str(view) == str(wanted)
    renamed = replace(load_profile_file(file), name="of-a-program")
    assert "'of-a-program'" in str(moetune.plan(**{**LAYER, "profile": renamed}, save=False))
    h100 = load_profile_file(bundled_profiles()["h100-x8"])
    assert moetune.plan(**{**TRAINING, "profile": h100}).id == moetune.plan(**TRAINING).id


@pytest.mark.parametrize("arguments", [LAYER, TRAINING])
@pytest.mark.usefixtures("home")
def test_a_notebook_draws_the_page_without_scripts(arguments: dict[str, Any]) -> None:
    plan = moetune.plan(**arguments)
    for drawn in (plan, plan.explain()):
        html = drawn._repr_html_()
        assert html is not None
        cell = Cell(html)
        assert cell.open == []
        assert not cell.names & {"script", "img", "link", "iframe"}
        assert cell.links == []
        assert "url(" not in html
        assert len(set(cell.ids)) == len(cell.ids)
        assert len(html) < 60_000
    html = plan._repr_html_() or ""
    shown = Cell(html).words
    _, sections, more = plan._page()
    for section in sections:
        assert all(f"{fact.name} {fact.cell.text}" in shown for fact in section.highlights)
        for table in section.tables:
            assert all(cell.text in shown for row in table.rows for cell in row)
    assert all(section.title in shown for section in more)


@pytest.mark.usefixtures("home")
def test_everything_that_takes_a_plan_takes_it() -> None:
    plan = moetune.plan(d_model=8, d_hidden=16, num_experts=4, tokens=32, world_size=1,
                        dtype="float16", profile="rtx2080ti-x64", save=False)  # fmt: skip
    layer = moetune.MoELayer(8, 16, 4, plan=plan)
    assert layer.shape == plan.workload.layer
    assert moetune.open_planbook(plan).plans == (plan.plan,)
    training = moetune.plan(**TRAINING)
    with pytest.raises(moetune.InputError, match="is the plan of a model's training"):
        moetune.MoELayer(8, 16, 4, plan=training)
    training.save("layout.json")
    with pytest.raises(moetune.InputError, match=r"training.*\n.*moetune export layout.json"):
        moetune.MoELayer(8, 16, 4, plan="layout.json")


@pytest.mark.usefixtures("home")
def test_another_process_gets_the_view() -> None:
    plan = moetune.plan(**LAYER)
    sent = pickle.loads(pickle.dumps(plan))  # noqa: S301 - our own
    for view in (sent, copy.deepcopy(plan)):
        assert type(view) is PlanView
        assert (view, view.plan) == (plan, plan.plan)
        assert str(view) == str(plan)
    assert plan.pipeline == plan.plan.as_layer().pipeline
    with pytest.raises(AttributeError, match="nothing_such"):
        plan.nothing_such  # noqa: B018 - the error
    assert plan.id[:6] in repr(plan)


@pytest.mark.usefixtures("home")
def test_a_stale_profile_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("moetune.app.notebook.stale_note", lambda _: "It is old")
    with caplog.at_level(logging.WARNING, logger="moetune"):
        moetune.plan(**LAYER)
    assert [record.message for record in caplog.records] == ["It is old"]


def test_editors_complete_every_flag() -> None:
    names = set(inspect.signature(moetune.plan).parameters)
    assert names == {"model", "profile", "db", "save", *(field.name for field in fields(Question))}


WRONG: list[tuple[dict[str, Any], type[moetune.MoetuneError], str]] = [
    ({**LAYER, "world_sise": 4}, moetune.InputError, r"'world_sise'\n.*did you mean 'world_size'"),
    ({**LAYER, "tokens": "8q"}, moetune.InputError, "^tokens: count '8q'"),
    ({**LAYER, "d_model": 2}, moetune.InputError, "^model gpt-xl and d_model exclude each other"),
    ({**LAYER, "profile": 7}, moetune.InputError, "^profile must be a name, a file or a Profile"),
    ({**LAYER, "memory_limit": "10MB"}, moetune.InfeasiblePlanError, "limit of 9.54 MiB"),
    ({**TRAINING, "strategy": "S1"}, moetune.InputError, "^strategy is for layers"),
    ({**TRAINING, "global_batch": None}, moetune.InputError, "lacks global_batch\n.*seq=4096"),
    ({**TRAINING, "memory_limit": 10**9}, moetune.LayoutTooLargeError, "memory binds"),
]


@pytest.mark.parametrize(("arguments", "kind", "words"), WRONG)
@pytest.mark.usefixtures("home")
def test_a_wrong_argument_is_named(
    arguments: dict[str, Any], kind: type[moetune.MoetuneError], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        moetune.plan(**arguments)
    assert "--" not in re.sub(r"moetune .*", "", str(caught.value))
    if isinstance(caught.value, moetune.LayoutTooLargeError):
        assert caught.value.plan is not None


def _pointer(path: Path) -> Path:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    return path


@pytest.mark.parametrize(("made", "words"), [
    (lambda home: _pointer(home / "plan.json"), r"Git LFS pointer.*\n.*git lfs pull"),
    (lambda home: home, "is a folder, not a plan"),
    (lambda _: "abcdef", "no plan has an id that begins with 'abcdef'"),
    (lambda _: 7, "takes a path or an id, got 7"),
])  # fmt: skip
def test_what_is_no_plan_is_named(home: Path, made: Callable[[Path], Any], words: str) -> None:
    with pytest.raises(moetune.InputError, match=words):
        moetune.load_plan(made(home))
