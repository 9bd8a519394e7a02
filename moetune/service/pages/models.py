"""Pages of models: the list, and of each one what fits where, before its sizes."""

import shlex
from collections.abc import Mapping

from fastapi import Request

from moetune.app.memory import MemoryAnswer, MemoryQuestion, fit_memory
from moetune.app.models import FoundModel, find_decoder_model, known_name
from moetune.app.requests import memory_question
from moetune.app.views.memory import memory_sections
from moetune.app.views.models import decoder_sections, model_section
from moetune.domain.errors import MoetuneError, NotFoundError
from moetune.domain.model import MODELS, WHOLE_MODELS
from moetune.domain.question import read_texts
from moetune.domain.units import parse_count
from moetune.huggingface.registry import registered_models
from moetune.report.section import Cell, Section, Table
from moetune.service.pages.library import Library
from moetune.service.pages.page import Field, Page, address, filled
from moetune.service.problems import problem_of

_OF_PAPERS, _OF_MODELS = "rtx2080ti-x64", "h100-x8"
"""Reference machines of the papers' layers, and of whole models."""
_USUAL = {"device_memory": "80GB", "seq": "4k"}
_RANKS = 8
_TARGET = "megatron"
_FIELDS = (
    Field(name="device_memory", label="Memory of a GPU", placeholder=_USUAL["device_memory"]),
    Field(name="world_size", label="GPUs", placeholder="the fewest"),
    Field(name="seq", label="Tokens of a sequence", placeholder=_USUAL["seq"]),
)


def models_page(_: Library) -> Page:
    """Return the list of named models: whole ones, then layers of papers."""
    whole = [(one.name, one.title, one.published) for one in registered_models()]
    papers = [(one.name, one.title, one.source) for one in WHOLE_MODELS.values()]
    papers += [(one.name, one.title, one.source) for one in MODELS.values()]
    sections = (
        _list("models", "Hugging Face", "published", whole),
        _list("papers", "Of the papers", "source", papers),
    )
    return Page(
        title="Models",
        here="models",
        sections=sections,
        context={"intro": "Each page says first on how few GPUs a model's training fits."},
    )


def model_page(library: Library, request: Request, name: str) -> Page:
    """Return a model's page: what fits where, then its sizes; of a layer its sizes.

    Raises:
        NotFoundError: there is no such model; files of the service's machine are not read.
    """
    known = name if name in MODELS else known_name(name)
    if known is None:
        raise NotFoundError(f"there is no model {name[:200]!r}", "the list is at /models")
    found = find_decoder_model(known, world_size=_RANKS)
    if found.decoder is None:
        return _layer_page(known, found)
    form = filled(request, (one.name for one in _FIELDS))
    length = parse_count(_USUAL["seq"])
    try:
        answer = library.planner.solver.run(fit_memory, _question(known, form))
        memory: tuple[Section, ...] = memory_sections(answer)
        problem: MoetuneError | None = None
        length = answer.job.length
    except MoetuneError as error:
        answer, memory, problem = None, (), error
    return Page(
        template="model.html",
        title=found.title,
        here="models",
        sections=(*memory, *decoder_sections(found, length=length)),
        context={
            "form": form, "name": known, "fields_of": _FIELDS, "problem": problem,
            "commands": _commands(known, answer, form),
            "new_plan": _new_plan(known, answer),
        },
        csv=lambda figure: address(
            "models", known, f"{figure.name}.csv", **form,
        ),
        status=int(problem_of(problem).status) if problem else 200,
    )  # fmt: skip


def _question(name: str, form: Mapping[str, str]) -> MemoryQuestion:
    """Return the question of `moetune memory`."""
    texts = {**_USUAL, **form}
    device_memory = texts.pop("device_memory")
    return memory_question({"model": name, **read_texts(texts)}, device_memory=device_memory)


def _layer_page(name: str, found: FoundModel) -> Page:
    assert found.paper is not None  # noqa: S101 - only papers have layers alone
    section = model_section(found.paper, world_size=_RANKS)
    return Page(
        template="model.html",
        title=found.title,
        here="models",
        sections=(section,),
        context={
            "form": None, "name": name, "problem": None,
            "commands": {
                "The same in a terminal": f"moetune plan --model {name} --profile {_OF_PAPERS}"
            },
            "new_plan": address("new", model=name, profile=_OF_PAPERS),
        },
    )  # fmt: skip


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
        f"moetune plan --model {name} --profile {_OF_MODELS} --world-size {job.world_size} "
        f"--global-batch {job.global_batch} --seq {job.length}"
    )
    return {"Plan it in a terminal": plan, **same}


def _new_plan(name: str, answer: MemoryAnswer | None) -> str:
    """Return the address of New plan with the model; "" of a paper's, which it does not have."""
    if name in MODELS:
        return ""
    if answer is None or not answer.fits:
        return address("new", model=name, target=_TARGET)
    job = answer.job
    return address(
        "new", model=name, profile=_OF_MODELS, target=_TARGET, world_size=str(job.world_size),
        global_batch=str(job.global_batch), seq=str(job.length),
    )  # fmt: skip


def _list(name: str, title: str, what: str, rows: list[tuple[str, str, str]]) -> Section:
    table = Table(
        name=name,
        title=title,
        header=("model", "title", what),
        rows=tuple(
            (
                Cell.words(key, href=address("models", key)),
                Cell.words(title),
                Cell.words(words),
            )
            for key, title, words in rows
        ),
    )
    return Section(name=name, tables=(table,))
