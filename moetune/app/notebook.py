"""`moetune.plan`, `moetune.load_plan`, `moetune.memory`: plans for programs and notebooks.

Arguments are the flags of `moetune plan` and are read by the same code: see `domain.question`.
`print` shows answers as text, and notebooks draw them. IPython calls `_repr_html_` in a notebook,
where None means "show the text instead", and `_repr_pretty_` in a terminal.
"""

import inspect
import logging
import os
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from moetune.app import wiring
from moetune.app.export import ExportDocument, export_plan
from moetune.app.files import find_plan, is_plan_path, write_text
from moetune.app.observe import keep
from moetune.app.observe import observe as observed_of
from moetune.app.planner import Planner, local_planner, plan_question
from moetune.app.predicted_runs import of_plan
from moetune.app.requests import ask, memory_question
from moetune.app.staleness import stale_note
from moetune.app.subjects import Subject, WhyNot, subject_of
from moetune.app.views.comparison import whatif_sections
from moetune.app.views.memory import memory_document, memory_sections
from moetune.app.views.observe import observe_document, observe_sections
from moetune.app.views.plan import explanation_sections, plan_sections, why_not_sections
from moetune.app.whatif import WhatIf, whatif
from moetune.domain.any_plan import AnyPlan
from moetune.domain.document import encode
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile
from moetune.domain.question import MEMORY_FIELDS, Question
from moetune.domain.spelling import AS_ARGUMENTS, AS_FIELDS, about, nearest_or, spelled
from moetune.domain.units import parse_bytes, parse_startup
from moetune.report.section import Section
from moetune.report.text import text_of
from moetune.solve.model.fits import fit_memory

_LOGGER = logging.getLogger("moetune")


class Drawn:
    """Sections as text for `print`, and as HTML in a notebook."""

    __slots__ = ()

    @abstractmethod
    def _printed(self) -> tuple[Section, ...]:
        """Return what the command line prints."""

    @abstractmethod
    def _page(self) -> tuple[str, tuple[Section, ...], tuple[Section, ...]]:
        """Return a name, the sections that a notebook shows, and the sections that it folds."""

    def __str__(self) -> str:
        return text_of(self._printed())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ANN401, FBT001 - IPython's
        printer.text("…" if cycle else str(self))

    def _repr_html_(self) -> str | None:
        if find_spec("jinja2") is None:
            return None
        from moetune.report.html import notebook_cell

        name, shown, more = self._page()
        return notebook_cell(name=name, sections=shown, more=more)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerView(Drawn):
    """An answer, as a command prints it.

    Args:
        name: name of the notebook's cell.
        document: the values that the command prints with `--json`.
    """

    name: str
    sections: tuple[Section, ...]
    document: Mapping[str, object]

    def to_dict(self) -> dict[str, Any]:
        """Return the values that the command prints with `--json`."""
        return cast("dict[str, Any]", encode(self.document))

    def _printed(self) -> tuple[Section, ...]:
        return self.sections

    def _page(self) -> tuple[str, tuple[Section, ...], tuple[Section, ...]]:
        return self.name, self.sections, ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView(AnswerView):
    """Layouts of a model's training, as `moetune memory` prints them."""

    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView(Drawn):
    """A plan that prints as `moetune plan` does, and that a notebook draws.

    It has the plan's attributes: `view.predicted`, `view.layout`, `view.memory`. Every function
    that takes a plan takes a view.

    Args:
        plan: the plan of a layer, or of a whole model's training.
        db: the store that has the plan's profile.
        profile: the profile that the plan was just made with; None to look it up.
    """

    plan: AnyPlan
    db: str | None = field(default=None, compare=False)
    profile: Profile | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"<moetune plan {self.plan.id[:6]}: {self.plan.name}>"

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the plan's attributes
        if name.startswith("_") or name in self.__slots__:
            raise AttributeError(name)
        return getattr(self.plan, name)

    def to_dict(self) -> dict[str, Any]:
        """Return the values that `moetune plan --json` prints."""
        return cast("dict[str, Any]", encode(self.plan))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan file, as `moetune plan --output` does.

        Raises:
            InputError: the file cannot be written there.
        """
        write_text(Path(path).expanduser(), self.plan.text)

    def explain(self, *, model: str | None = None, **choice: Any) -> AnswerView:  # noqa: ANN401
        """Return the reasons, as `moetune explain` prints them.

        Args:
            model: the `config.json` of a model without a name.
            choice: another choice, to explain why the plan does not make it: `degree`,
                `strategy`, or `layout="tp=2,pp=4"`, as in `moetune explain`.

        Raises:
            InputError: the choice cannot be read.
            ProfileError: the plan's profile is missing or has changed.
        """
        with spelled(AS_ARGUMENTS):
            if not choice:
                subject = self._subject(model)
                return self._answer(explanation_sections(subject), subject.document)
            with self._planner() as planner:
                answer = planner.why_not(self.plan, WhyNot(**choice), model=model)
            return self._answer(why_not_sections(answer), answer.document)

    def whatif(
        self,
        *,
        profile: str | Profile | None = None,
        speeds: Mapping[str, float] | None = None,
        model: str | None = None,
        **changes: object,
    ) -> AnswerView:
        """Return this plan and the plan for changed inputs, as `moetune whatif` prints them.

        Args:
            profile: another machine.
            speeds: factors on the speed of "computation", "communication" and "copies".
            model: the `config.json` of a model without a name.
            changes: flags of `moetune plan`, such as `world_size=64` or `tp=2`, and
                `tokens_per_rank` for a layer; None removes a pin.

        Raises:
            InputError: nothing is changed, or a change is unknown or wrong.
            InfeasiblePlanError: nothing satisfies the changes.
            ProfileError: a profile is missing, has changed, or lacks an operation.
        """
        question = WhatIf(changes=changes, speeds=speeds or {}, spelling=AS_FIELDS)
        with spelled(AS_ARGUMENTS), self._planner(profile) as planner:
            answer = whatif(planner, self.plan, question, model=model)
        return self._answer(whatif_sections(answer), answer.document)

    def observe(
        self, *, step: float | str | None = None, log: str | os.PathLike[str] | None = None,
        trace: str | os.PathLike[str] | None = None, memory: int | str | None = None,
        model: str | None = None, save: bool = True,
    ) -> AnswerView:  # fmt: skip
        """Return an observed run of the plan against its prediction, as `moetune observe` does.

        Args:
            step: time of a step: seconds, or a text such as "850ms".
            log: log file of Megatron, Megatron-Bridge, torchtitan, DeepSpeed or transformers.
            trace: torch.profiler's trace of a rank; it is compared and not kept.
            memory: peak of a device: bytes, or a text such as "71GB"; default, the log's peak.
            model: the `config.json` of a model without a name.
            save: keep the run, so that it calibrates plans of the same machine and runtime.

        Raises:
            InputError: not exactly a step, a log or a trace is given, or the log is of another job.
            MoetuneError: the store cannot be opened or written.
        """
        with spelled(AS_ARGUMENTS):
            with self._planner(self.profile) as planner:
                prediction = of_plan(planner, self.plan.as_model(), model=model)
            with about("step"):
                seconds = parse_startup(step) if isinstance(step, str) else step
            with about("memory"):
                size = parse_bytes(memory) if isinstance(memory, str) else memory
            observed = observed_of(
                prediction, step_seconds=seconds, memory_bytes=size,
                log=None if log is None else Path(log).expanduser(),
                trace=None if trace is None else Path(trace).expanduser(),
            )  # fmt: skip
            if save and observed.is_kept:
                with wiring.open_store(wiring.configure(db=self.db).settings) as store:
                    observed = keep(store, observed)
        return self._answer(tuple(observe_sections(observed)), observe_document(observed))

    def export(self, to: str, *, model: str | None = None) -> ExportDocument:
        """Return the runtime's configuration for the plan, as `moetune export` prints it.

        Args:
            to: "megatron" or another target of `moetune export --target`.
            model: the `config.json` of a model without a name.

        Raises:
            InputError: the target is unknown, or the plan is of a layer.
            InfeasiblePlanError: the target cannot run the layout.
        """
        with spelled(AS_ARGUMENTS):
            stores = partial(wiring.find_store, wiring.configure(db=self.db).settings)
            return export_plan(self.plan.as_model(), to=to, model=model, stores=stores)

    def _subject(self, model: str | None = None) -> Subject:
        if self.profile is not None:
            return subject_of(self.plan, profile=self.profile, model=model)
        with self._planner() as planner:
            return planner.explain(self.plan, model=model)

    def _answer(self, sections: tuple[Section, ...], document: Mapping[str, object]) -> AnswerView:
        return AnswerView(
            name=f"explanation-{self.plan.id[:12]}", sections=sections, document=document
        )

    def _planner(self, profile: str | Profile | None = None) -> AbstractContextManager[Planner]:
        return local_planner(wiring.configure(db=self.db).settings, profile=profile)

    def _printed(self) -> tuple[Section, ...]:
        return plan_sections(self._subject())

    def _page(self) -> tuple[str, tuple[Section, ...], tuple[Section, ...]]:
        answer, *more = plan_sections(self._subject(), is_page=True)
        return f"plan-{self.plan.id[:12]}", (answer,), tuple(more)


def plan(
    model: str | os.PathLike[str] | None = None,
    *,
    profile: str | os.PathLike[str] | Profile | None = None,
    db: str | os.PathLike[str] | None = None,
    save: bool = True,
    **options: object,
) -> PlanView:
    """Return the best plan for a layer or a model, as `moetune plan` does.

    A notebook draws the plan, `print` shows what the command line prints.

    Args:
        model: a named model or the path of a `config.json`; without it give the sizes of a layer:
            `d_model`, `d_hidden`, `num_experts` and `tokens`.
        profile: a name, a file or a `moetune.Profile`; default, the setting, else the newest
            measured profile.
        db: the store; default, the store of the command line.
        save: store the plan, so that its id names it; False leaves the store as it is.
        options: flags of `moetune plan` with underscores, such as `world_size=64`. Sizes are
            numbers of tokens and bytes, or texts with a unit: `seq="8k"`, `memory_limit="80GB"`.

    Raises:
        InputError: an argument is unknown, or its value is wrong.
        InfeasiblePlanError: nothing satisfies the arguments or the memory limit.
        ProfileError: there is no such profile, or it lacks an operation.
        MoetuneError: the store cannot be opened or written.
    """
    with spelled(AS_ARGUMENTS):
        if not isinstance(profile, (str, os.PathLike, Profile, type(None))):
            raise InputError(f"profile must be a name, a file or a Profile, got {profile!r}")
        used = profile if isinstance(profile, Profile) else _text(profile)
        question = ask({"model": model, **options})
        settings = wiring.configure(db=_text(db)).settings
        planned = plan_question(question, settings, profile=used, save=save)
        machine = planned.machine.profile
        if note := stale_note(machine):
            _LOGGER.warning(note)
        return PlanView(plan=planned.plan, db=_text(db), profile=machine)


def memory(
    model: str | os.PathLike[str], *, device_memory: str = "80GB", **options: object
) -> MemoryView:
    """Return the layouts of a model's training that fit into memory, as `moetune memory` does.

    Args:
        model: a named model or the path of a `config.json`.
        device_memory: memory of a GPU, with its unit.
        options: other flags of `moetune memory` with underscores, such as `world_size=64` or
            `seq="8k"`.

    Raises:
        InputError: an argument is unknown, its value is wrong, or the pins break a rule.
    """
    with spelled(AS_ARGUMENTS):
        for name in options.keys() - {*MEMORY_FIELDS}:
            hint = nearest_or(f"known: {', '.join(MEMORY_FIELDS)}", name, MEMORY_FIELDS)
            raise InputError(f"memory has no argument {name!r}", hint, field=name)
        question = memory_question({"model": model, **options}, device_memory=device_memory)
        answer = fit_memory(question)
    return MemoryView(
        name="memory", sections=memory_sections(answer), document=memory_document(answer),
        fits=answer.fits,
    )  # fmt: skip


def load_plan(
    path_or_id: str | os.PathLike[str], *, db: str | os.PathLike[str] | None = None
) -> PlanView:
    """Return the plan of a file, or of an id in the store.

    Args:
        path_or_id: a path that ends in .json or has a slash, a `pathlib.Path`, or an id or its
            first letters.
        db: the store; default, the store of the command line.

    Raises:
        InputError: the file is missing or is not a plan; or no plan, or several, match the id.
        MoetuneError: the store cannot be opened.
    """
    with spelled(AS_ARGUMENTS):
        if not isinstance(path_or_id, (str, os.PathLike)):
            raise InputError(f"load_plan takes a path or an id, got {path_or_id!r}")
        stores = partial(wiring.find_store, wiring.configure(db=_text(db)).settings)
        try:
            return PlanView(plan=find_plan(path_or_id, stores=stores), db=_text(db))
        except InputError as error:
            if isinstance(path_or_id, str) and not is_plan_path(path_or_id):
                where = "name another store with db=…, or a file by a path with a slash"
                error.hint = f"{error.hint}; {where}" if error.hint else where
            raise


def _text(value: str | os.PathLike[str] | None) -> str | None:
    """Return a path as text with a slash, so that it is not taken for a name."""
    if value is None or isinstance(value, str):
        return value
    text = os.fspath(value)
    return text if os.sep in text else f"{os.curdir}{os.sep}{text}"


def _signature() -> inspect.Signature:
    signature, flags = inspect.signature(plan), dict(inspect.signature(Question).parameters)
    named = [*signature.parameters.values()][:-1]  # all but `options`
    del flags["model"]
    return signature.replace(parameters=[*named, *flags.values()])


# Editors and notebooks complete names of arguments from this signature.
cast("Any", plan).__signature__ = _signature()
