"""Pages of models: the list, and of each one what fits where, before its sizes."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from moetune.domain.cluster import process_bytes
from moetune.domain.errors import MoetuneError, NotFoundError
from moetune.domain.model import MODELS, WHOLE_MODELS
from moetune.domain.targets import find_target
from moetune.domain.training import LayoutRequest
from moetune.domain.units import parse_count
from moetune.huggingface.registry import registered_models
from moetune.report.section import Cell, Section, Table
from moetune.service.pages.library import Library
from moetune.service.pages.page import Page, address
from moetune.service.problems import problem_of
from moetune.workflows.memory import MemoryAnswer, MemoryQuestion, fit_memory
from moetune.workflows.models import FoundModel, find_decoder_model, known_name
from moetune.workflows.views.memory import memory_page
from moetune.workflows.views.models import decoder_sections, model_section

_OF_PAPERS, _OF_MODELS = "rtx2080ti-x64", "h100-x8"
"""Reference machines of the papers' layers, and of whole models."""
_DEVICE, _LENGTH, _RANKS = "80GB", "4k", 8
_TARGET = "megatron"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForm:
    """Fields of a model's page: texts of the fields, "" for the usual value."""

    device_memory: str = ""
    world_size: str = ""
    seq: str = ""

    @property
    def length(self) -> int:
        """Tokens of a sequence.

        Raises:
            InputError: it is no number.
        """
        return parse_count(self.seq or _LENGTH)

    def question(self, found: FoundModel) -> MemoryQuestion:
        """Return the question of `moetune memory` with its usual values.

        Raises:
            InputError: a field is wrong.
        """
        assert found.decoder is not None  # noqa: S101 - the caller has looked
        target = find_target(_TARGET)
        return MemoryQuestion(
            decoder=found.decoder,
            world_size=parse_count(self.world_size) if self.world_size else None,
            global_batch=None, length=self.length, dtype="bfloat16",
            optimizer=target.optimizers[0], pins=LayoutRequest(micro_batch=1), target=target,
            device_bytes=process_bytes(self.device_memory or _DEVICE),
        )  # fmt: skip


def models_page() -> Page:
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


def model_page(library: Library, name: str, form: MemoryForm) -> Page:
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
    try:
        answer = library.planner.solver.run(fit_memory, form.question(found))
        memory: tuple[Section, ...] = memory_page(answer)
        problem: MoetuneError | None = None
        length = form.length
    except MoetuneError as error:
        answer, memory, problem, length = None, (), error, parse_count(_LENGTH)
    return Page(
        template="model.html",
        title=found.title,
        here="models",
        sections=(*memory, *decoder_sections(found, length=length)),
        context={
            "form": form, "name": known, "device": _DEVICE, "length": _LENGTH, "problem": problem,
            "commands": _commands(known, answer, form),
            "new_plan": _new_plan(known, answer),
        },
        csv=lambda figure: address(
            "models", known, f"{figure.name}.csv", device_memory=form.device_memory,
            world_size=form.world_size, seq=form.seq,
        ),
        status=int(problem_of(problem).status) if problem else 200,
    )  # fmt: skip


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
            "new_plan": address("new", kind="layer", model=name, profile=_OF_PAPERS),
        },
    )  # fmt: skip


def _commands(name: str, answer: MemoryAnswer | None, form: MemoryForm) -> Mapping[str, str]:
    """Return the commands that ask the same, and that plan what fits."""
    flags = {
        "--device-memory": form.device_memory, "--world-size": form.world_size, "--seq": form.seq,
    }  # fmt: skip
    given = "".join(f" {flag} {shlex.quote(text)}" for flag, text in flags.items() if text)
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
        return address("new", kind="model", decoder=name)
    job = answer.job
    return address(
        "new", kind="model", decoder=name, profile=_OF_MODELS, world_size=str(job.world_size),
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
