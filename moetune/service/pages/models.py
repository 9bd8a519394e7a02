"""Pages of models: the list, and of each one what fits where, before its sizes."""

import shlex
from collections.abc import Mapping

from fastapi import Request

from moetune.app.memory import MemoryAnswer, fit_memory
from moetune.app.planner import ServicePlanner
from moetune.app.requests import memory_question
from moetune.app.views.memory import memory_sections
from moetune.app.views.models import decoder_sections, model_section
from moetune.domain.errors import MoetuneError, NotFoundError
from moetune.domain.model import MODELS, WHOLE_MODELS
from moetune.domain.question import read_texts
from moetune.domain.units import parse_count
from moetune.huggingface.registry import (
    FoundModel,
    find_decoder_model,
    known_name,
    registered_models,
)
from moetune.report.section import Cell, Section, Table
from moetune.service.pages.library import REFERENCE
from moetune.service.pages.page import Field, Form, Link, Page, address, filled_fields
from moetune.service.problems import problem_of

_OF_PAPERS = "rtx2080ti-x64"
"""Reference machine of the papers' layers."""
_USUAL = {"device_memory": "80GB", "seq": "4k"}
_RANKS = 8
_TARGET = "megatron"
_FIELDS = (
    Field(name="device_memory", label="Memory of a GPU", placeholder=_USUAL["device_memory"]),
    Field(name="world_size", label="GPUs", placeholder="the fewest"),
    Field(name="seq", label="Tokens of a sequence", placeholder=_USUAL["seq"]),
)


def models_page(_: ServicePlanner) -> Page:
    """Return the list of named models: whole ones, then layers of papers."""
    whole = [(model.name, model.title, model.published) for model in registered_models()]
    papers = [(model.name, model.title, model.source) for model in WHOLE_MODELS.values()]
    papers += [(layer.name, layer.title, layer.source) for layer in MODELS.values()]
    return Page(
        title="Models",
        here="models",
        intro="Each page says first on how few GPUs a model's training fits.",
        sections=(
            _list("models", "Hugging Face", "published", whole),
            _list("papers", "Of the papers", "source", papers),
        ),
    )


def model_page(planner: ServicePlanner, request: Request, name: str) -> Page:
    """Return a model's page: what fits where, then its sizes; of a layer its sizes.

    Raises:
        NotFoundError: there is no such model; files of the service's machine are not read.
    """
    key = name if name in MODELS else known_name(name)
    if key is None:
        raise NotFoundError(f"there is no model {name[:200]!r}", "the list is at /models")
    model = find_decoder_model(key, world_size=_RANKS)
    if model.decoder is None:
        return _layer_page(key, model)
    values = filled_fields(request, (field.name for field in _FIELDS))
    answer, problem, texts = None, None, {**_USUAL, **values}
    try:
        memory = texts.pop("device_memory")
        question = memory_question({"model": key, **read_texts(texts)}, device_memory=memory)
        answer = planner.compute(fit_memory, question)
    except MoetuneError as error:
        problem = problem_of(error)
    length = answer.job.length if answer else parse_count(_USUAL["seq"])
    return Page(
        title=model.title,
        here="models",
        links=(*_links(_new_plan(key, answer)), Link(name="Sizes", href="#model")),
        problem=problem,
        forms=(
            Form(
                action=address("models", key), button="Show what fits", fields=_FIELDS,
                values=values,
            ),
        ),
        sections=(
            *(memory_sections(answer) if answer else ()), *decoder_sections(model, length=length),
        ),
        commands=_commands(key, answer, values),
    )  # fmt: skip


def _links(new_plan: str) -> tuple[Link, Link]:
    return (
        Link(name="New plan with this model", href=new_plan),
        Link(name="All models", href="/models"),
    )


def _layer_page(name: str, layer: FoundModel) -> Page:
    assert layer.paper is not None  # noqa: S101 - only papers have layers alone
    section = model_section(layer.paper, world_size=_RANKS)
    plan = f"moetune plan --model {name} --profile {_OF_PAPERS}"
    return Page(
        title=layer.title,
        here="models",
        scope=section.scope,
        links=_links(address("new", model=name, profile=_OF_PAPERS)),
        sections=(section,),
        commands={"The same in a terminal": plan},
    )


def _commands(name: str, answer: MemoryAnswer | None, form: Mapping[str, str]) -> Mapping[str, str]:
    """Return the commands that ask the same, and that plan what fits."""
    given = "".join(
        f" --{name.replace('_', '-')} {shlex.quote(text)}" for name, text in form.items()
    )
    same = {"The same in a terminal": f"moetune memory {name}{given}"}
    if answer is None or not answer.fits:
        return same
    job = answer.job
    plan = (
        f"moetune plan --model {name} --profile {REFERENCE} --world-size {job.world_size} "
        f"--global-batch {job.global_batch} --seq {job.length}"
    )
    return {"Plan it in a terminal": plan, **same}


def _new_plan(name: str, answer: MemoryAnswer | None) -> str:
    """Return the address of New plan with the model, on as few GPUs as it fits on."""
    if answer is None or not answer.fits:
        return address("new", model=name, target=_TARGET)
    job = answer.job
    return address(
        "new", model=name, profile=REFERENCE, target=_TARGET, world_size=str(job.world_size),
        global_batch=str(job.global_batch), seq=str(job.length),
    )  # fmt: skip


def _list(name: str, title: str, what: str, rows: list[tuple[str, str, str]]) -> Section:
    table = Table.of(
        name,
        rows,
        {
            "model": lambda row: Cell.words(row[0], href=address("models", row[0])),
            "title": lambda row: row[1],
            what: lambda row: row[2],
        },
        title=title,
    )
    return Section(name=name, tables=(table,))
