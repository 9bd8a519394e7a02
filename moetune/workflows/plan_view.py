"""Plans and explanations that print, and that notebooks draw: what `moetune.plan` returns.

IPython calls `_repr_html_` in a notebook, where None stands for "draw the text instead", and
`_repr_pretty_` in a terminal.
"""

import json
import os
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

from moetune.domain.document import encode
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.spelling import AS_ARGUMENTS, AS_FIELDS, spelled
from moetune.domain.training_document import (
    TrainingDocument,
    TrainingLayout,
    TrainingMemory,
    TrainingStep,
)
from moetune.report.section import Section
from moetune.report.text import text_of
from moetune.workflows import wiring
from moetune.workflows.compared import WhyNot
from moetune.workflows.export import ExportDocument, export_plan
from moetune.workflows.files import plan_to_json, write_text
from moetune.workflows.memory import MemoryAnswer
from moetune.workflows.open_planner import local_planner
from moetune.workflows.planner import Planner
from moetune.workflows.subjects import LayerSubject, ModelSubject
from moetune.workflows.training_files import nothing_to_export
from moetune.workflows.training_whatif import whatif_training
from moetune.workflows.views.comparison import training_whatif_sections
from moetune.workflows.views.explanation import explanation_sections, reasons
from moetune.workflows.views.memory import memory_document, memory_sections
from moetune.workflows.views.plan import page_sections, plan_sections
from moetune.workflows.views.training import training_sections
from moetune.workflows.views.training_page import training_page
from moetune.workflows.views.why_not import why_not_sections
from moetune.workflows.views.words import plan_name
from moetune.workflows.whatif import WhatIf


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


class PlanView(Drawn, Plan):
    """A `moetune.Plan` that prints as `moetune plan` does, and that a notebook draws.

    Everything that takes a plan takes it; another process gets the plan alone.
    """

    __slots__ = ("_explanation",)
    _explanation: LayerSubject

    @classmethod
    def of(cls, explanation: LayerSubject) -> "PlanView":
        """Return the view of an explanation's plan."""
        view = cls(**_values(explanation.plan))
        object.__setattr__(view, "_explanation", explanation)
        return view

    def __repr__(self) -> str:
        return f"<moetune plan {self.id[:6]}: {plan_name(self)}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and _values(self) == _values(other)

    __hash__ = Plan.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Plan, **_values(self)), ()

    @property
    def explanation(self) -> LayerSubject:
        """The terms behind the plan's times; of a changed plan without its profile."""
        found: LayerSubject | None = getattr(self, "_explanation", None)
        return found or LayerSubject(plan=self, missing="the profile is not known")

    def to_dict(self) -> dict[str, Any]:
        """Return the values that `moetune plan --json` prints."""
        return cast("dict[str, Any]", json.loads(plan_to_json(self)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan file, as `moetune plan --output` does.

        Raises:
            InputError: the file cannot be written there.
        """
        write_text(Path(path).expanduser(), plan_to_json(self))

    def explain(self) -> ExplanationView:
        """Return the reasons, as `moetune explain` prints them."""
        found = self.explanation
        return ExplanationView(
            plan_id=self.id, sections=explanation_sections(found), document=found.document
        )

    def export(self, to: str, *, model: str | None = None) -> NoReturn:  # noqa: ARG002 - the other plan's
        """Raise InputError: only plans of a training have something to export."""
        raise nothing_to_export(f"plan {self.id[:6]}")

    def _printed(self) -> tuple[Section, ...]:
        return plan_sections(self.explanation)

    def _page(self) -> tuple[str, tuple[Section, ...], tuple[Section, ...]]:
        found = self.explanation
        return f"plan-{self.id[:12]}", page_sections(found), tuple(reasons(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlanView(Drawn):
    """The plan of a Hugging Face model's training, as `moetune plan` prints it.

    Args:
        db: the store in which `export` looks for the plan's profile.
    """

    plan: TrainingDocument
    db: str | None = None

    def __repr__(self) -> str:
        return f"<moetune training plan {self.id[:6]}: {self._printed()[1].title}>"

    @property
    def id(self) -> str:
        """Digest of the inputs."""
        return self.plan.id

    def to_dict(self) -> dict[str, Any]:
        """Return the values that `moetune plan --json` prints."""
        return self.plan.document

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan file, as `moetune plan --output` does.

        Raises:
            InputError: the file cannot be written there.
        """
        write_text(Path(path).expanduser(), self.plan.text)

    @property
    def predicted(self) -> TrainingStep:
        """The predicted step: its seconds, their parts, tokens and FLOPs a second."""
        return self.plan.predicted

    @property
    def layout(self) -> TrainingLayout:
        """The chosen layout."""
        return self.plan.layout

    @property
    def memory(self) -> TrainingMemory:
        """Bytes of the fullest pipeline rank, by part."""
        return self.plan.memory

    def explain(self, *, layout: str | None = None, model: str | None = None) -> ExplanationView:
        """Return the reasons, as `moetune explain` prints them.

        Args:
            layout: why it is not this one, as of `moetune explain --layout`: "tp=2,pp=4".
            model: the `config.json` of a model without a name.

        Raises:
            InputError: the layout cannot be read.
            ProfileError: the plan's profile is missing or has changed.
        """
        if layout is None:
            why = ModelSubject(plan=self.plan)
            return ExplanationView(
                plan_id=self.id, sections=explanation_sections(why), document=why.document
            )
        with spelled(AS_ARGUMENTS), self._planner() as planner:
            answer = planner.why_not(self.plan, WhyNot(layout=layout), model=model)
        return ExplanationView(
            plan_id=self.id, sections=why_not_sections(answer), document=answer.document
        )

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
            changes: arguments of `moetune.plan`, such as `world_size=64` or `tp=2`; None removes a
                pin.

        Raises:
            InputError: nothing is changed, or a change is unknown or wrong.
            InfeasiblePlanError: nothing satisfies the changes.
            ProfileError: a profile is missing, has changed, or lacks an operation.
        """
        question = WhatIf(
            changes={"constraints": changes} if changes else {}, speeds=speeds or {},
            spelling=AS_FIELDS,
        )  # fmt: skip
        with spelled(AS_ARGUMENTS), self._planner(profile) as planner:
            answer = whatif_training(planner, self.plan, question, model=model)
        return ExplanationView(
            plan_id=self.id, sections=training_whatif_sections(answer), document=answer.document
        )

    def _planner(self, profile: str | Profile | None = None) -> AbstractContextManager[Planner]:
        return local_planner(wiring.configure(db=self.db).settings, profile=profile)

    def export(self, to: str, *, model: str | None = None) -> ExportDocument:
        """Return what a runtime reads, as `moetune export` prints it.

        Args:
            to: "megatron" or another target of `moetune export --to`.
            model: the `config.json` of a model without a name.

        Raises:
            InputError: the target is unknown.
            InfeasiblePlanError: the target cannot run the layout.
        """
        with spelled(AS_ARGUMENTS):
            stores = partial(wiring.find_store, wiring.configure(db=self.db).settings)
            return export_plan(self.plan, to=to, model=model, stores=stores).document

    def _printed(self) -> tuple[Section, ...]:
        return tuple(training_sections(self.plan))

    def _page(self) -> tuple[str, tuple[Section, ...], tuple[Section, ...]]:
        answer, *rest = training_page(self.plan)
        return f"plan-{self.id[:12]}", (replace(answer, figures=()),), tuple(rest)


def _values(plan: Plan) -> dict[str, Any]:
    return {item.name: getattr(plan, item.name) for item in fields(Plan)}
