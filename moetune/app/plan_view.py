"""Plans and explanations that print, and that notebooks draw: what `moetune.plan` returns.

IPython calls `_repr_html_` in a notebook, where None stands for "draw the text instead", and
`_repr_pretty_` in a terminal.
"""

import os
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from moetune.app import wiring
from moetune.app.export import ExportDocument, export_plan
from moetune.app.files import write_text
from moetune.app.memory import MemoryAnswer
from moetune.app.planner import Planner, local_planner
from moetune.app.subjects import Subject, WhyNot, subject_of
from moetune.app.views.comparison import whatif_sections
from moetune.app.views.memory import memory_document, memory_sections
from moetune.app.views.plan import explanation_sections, plan_sections, why_not_sections
from moetune.app.whatif import CHANGES, WhatIf, whatif
from moetune.domain.any_plan import AnyPlan
from moetune.domain.document import encode
from moetune.domain.profile import Profile
from moetune.domain.spelling import AS_ARGUMENTS, AS_FIELDS, spelled
from moetune.report.section import Section
from moetune.report.text import text_of

_ANSWER = 2
"""Sections that a notebook shows; it unfolds the others."""


class _Printer(Protocol):
    """IPython's printer of text."""

    def text(self, text: str) -> None:
        """Print."""


class Drawn:
    """Sections as text for `print`, and as HTML in a notebook."""

    __slots__ = ()

    @abstractmethod
    def _printed(self) -> tuple[Section, ...]:
        """Return what the command line prints."""

    @abstractmethod
    def _page(self) -> tuple[str, tuple[Section, ...], tuple[Section, ...]]:
        """Return a name, the sections that a notebook shows, and those that it unfolds."""

    def __str__(self) -> str:
        return text_of(self._printed())

    def _repr_pretty_(self, printer: _Printer, cycle: bool) -> None:  # noqa: FBT001 - IPython's
        printer.text("…" if cycle else str(self))

    def _repr_html_(self) -> str | None:
        if find_spec("jinja2") is None:
            return None
        from moetune.report.html import notebook_cell

        name, shown, more = self._page()
        return notebook_cell(name=name, sections=shown, more=more, summary="Why, and what else")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationView(Drawn):
    """The reasons of a plan, as `moetune explain` prints them.

    Args:
        document: what `moetune explain --json` prints.
    """

    plan_id: str
    sections: tuple[Section, ...]
    document: Mapping[str, object]

    def to_dict(self) -> dict[str, Any]:
        """Return the values that `moetune explain --json` prints."""
        return cast("dict[str, Any]", encode(self.document))

    def _printed(self) -> tuple[Section, ...]:
        return self.sections

    def _page(self) -> tuple[str, tuple[Section, ...], tuple[Section, ...]]:
        return f"explanation-{self.plan_id[:12]}", self.sections, ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView(Drawn):
    """Layouts of a model's training that fit, as `moetune memory` prints them."""

    answer: MemoryAnswer

    @property
    def fits(self) -> bool:
        """Whether any layout fits."""
        return self.answer.fits

    def to_dict(self) -> dict[str, Any]:
        """Return the values that `moetune memory --json` prints, without its sections."""
        return cast("dict[str, Any]", encode(memory_document(self.answer)))

    def _printed(self) -> tuple[Section, ...]:
        return memory_sections(self.answer)

    def _page(self) -> tuple[str, tuple[Section, ...], tuple[Section, ...]]:
        return "memory", self._printed(), ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView(Drawn):
    """A plan that prints as `moetune plan` does, and that a notebook draws.

    It has the plan's own attributes: `view.predicted`, `view.layout`, `view.memory`. Everything
    that takes a plan takes it.

    Args:
        plan: of a layer, or of a whole model's training.
        db: the store in which the plan's profile is looked up.
        profile: the one that the plan was just made with.
    """

    plan: AnyPlan
    db: str | None = field(default=None, compare=False)
    profile: Profile | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"<moetune plan {self.plan.id[:6]}: {self.plan.name}>"

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the plan's own attributes
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

    def explain(self, *, model: str | None = None, **choice: Any) -> ExplanationView:  # noqa: ANN401
        """Return the reasons, as `moetune explain` prints them.

        Args:
            model: the `config.json` of a model without a name.
            choice: why it is not another one, as of `moetune explain`: `degree`, `forward_degree`,
                `backward_degree`, `strategy`, or `layout="tp=2,pp=4"`.

        Raises:
            InputError: the choice cannot be read.
            ProfileError: the plan's profile is missing or has changed.
        """
        with spelled(AS_ARGUMENTS), self._planner() as planner:
            if not choice:
                subject = self._subject(model)
                return self._answer(explanation_sections(subject), subject.document)
            question = WhyNot(**choice)
            answer = planner.why_not(self.plan, question, model=model)
            return self._answer(why_not_sections(answer), answer.document)

    def whatif(
        self,
        *,
        profile: str | Profile | None = None,
        speeds: Mapping[str, float] | None = None,
        model: str | None = None,
        **changes: object,
    ) -> ExplanationView:
        """Return this plan beside the one for changed inputs, as `moetune whatif` prints them.

        Args:
            profile: another machine.
            speeds: factors on the speed of "computation", "communication" and "copies".
            model: the `config.json` of a model without a name.
            changes: flags of `moetune plan`, such as `world_size=64` or `tp=2`, and of a layer
                `tokens_per_rank`; None removes a pin.

        Raises:
            InputError: nothing is changed, or a change is unknown or wrong.
            InfeasiblePlanError: nothing satisfies the changes.
            ProfileError: a profile is missing, has changed, or lacks an operation.
        """
        inputs = {name: changes.pop(name) for name in CHANGES if name in changes}
        flags = {name.replace("_", "-"): value for name, value in changes.items()}
        question = WhatIf(
            changes={**inputs, **({"constraints": flags} if flags else {})}, speeds=speeds or {},
            spelling=AS_FIELDS,
        )  # fmt: skip
        with spelled(AS_ARGUMENTS), self._planner(profile) as planner:
            answer = whatif(planner, question, self.plan, model=model)
        return self._answer(whatif_sections(answer), answer.document)

    def export(self, to: str, *, model: str | None = None) -> ExportDocument:
        """Return what a runtime reads, as `moetune export` prints it.

        Args:
            to: "megatron" or another target of `moetune export --target`.
            model: the `config.json` of a model without a name.

        Raises:
            InputError: the target is unknown, or the plan is of a layer.
            InfeasiblePlanError: the target cannot run the layout.
        """
        with spelled(AS_ARGUMENTS):
            stores = partial(wiring.find_store, wiring.configure(db=self.db).settings)
            return export_plan(self.plan.as_model(), to=to, model=model, stores=stores).document

    def _subject(self, model: str | None = None) -> Subject:
        if self.profile is not None:
            return subject_of(self.plan, profile=self.profile, model=model)
        with self._planner() as planner:
            return planner.explain(self.plan, model=model)

    def _answer(
        self, sections: tuple[Section, ...], document: Mapping[str, object]
    ) -> ExplanationView:
        return ExplanationView(plan_id=self.plan.id, sections=sections, document=document)

    def _planner(self, profile: str | Profile | None = None) -> AbstractContextManager[Planner]:
        return local_planner(wiring.configure(db=self.db).settings, profile=profile)

    def _printed(self) -> tuple[Section, ...]:
        return plan_sections(self._subject())

    def _page(self) -> tuple[str, tuple[Section, ...], tuple[Section, ...]]:
        found = plan_sections(self._subject(), is_page=True)
        answer = tuple(replace(section, figures=()) for section in found[:_ANSWER])
        return f"plan-{self.plan.id[:12]}", answer, found[_ANSWER:]
