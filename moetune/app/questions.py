"""Questions of programs and pages for a plan, and their answers: of a layer and of whole models.

A question has the arguments of `moetune.plan`. It comes from another machine, so that no file of
this one is read for it, and its sizes are bounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from moetune.app.plan import LONGEST_NAME
from moetune.app.planner import Planner
from moetune.app.profiles import is_path
from moetune.app.requests import ask, is_of_model
from moetune.domain.any_plan import AnyPlan
from moetune.domain.document import shown
from moetune.domain.errors import InputError
from moetune.domain.model import MODELS, WHOLE_MODELS
from moetune.domain.question import Question
from moetune.domain.spelling import flag_of
from moetune.huggingface.registry import resolve_name

_LARGEST = {"world_size": 2**14, "nodes": 2**14, "global_batch": 2**20, "seq": 2**22}
"""Of a whole model: searches of larger jobs take longer than a service waits."""
_ROUTINGS = ("balanced", "natural")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedQuestion:
    """A question for a plan that comes from another machine.

    Args:
        profile: its name; None for the default one.
    """

    question: Question
    profile: str | None = None

    def answer(self, planner: Planner) -> AnyPlan:
        """Return the plan; nothing is stored.

        Raises:
            InputError: a value is wrong, or one is missing.
            InfeasiblePlanError: nothing satisfies the pins or the memory limit.
            ProfileError: there is no such profile, or it lacks an operation.
        """
        return planner.ask(self.question, self.profile).plan


def asks_for_model(arguments: Mapping[str, object]) -> bool:
    """Return whether arguments are for the plan of a whole model."""
    name = arguments.get("model")
    is_named = isinstance(name, str) and name not in MODELS and _is_whole(name)
    return is_named or "config" in arguments or "num_layers" in arguments


def _is_whole(name: str) -> bool:
    return name in WHOLE_MODELS or resolve_name(name) is not None


def read_question(arguments: Mapping[str, object]) -> ServedQuestion:
    """Return the question in the arguments of `moetune.plan`.

    Raises:
        InputError: an argument is unknown, or its value wrong or a path; the message names it.
    """
    rest = dict(arguments)
    profile, model, routing = rest.pop("profile", None), rest.get("model"), rest.get("routing")
    for name, value in rest.items():
        if isinstance(value, str) and len(value) > LONGEST_NAME:
            raise InputError(f"{name} is longer than {LONGEST_NAME} characters", field=name)
    if profile is not None:
        profile = _profile_name(profile)
    if isinstance(model, str) and ("/" in model or not (model in MODELS or _is_whole(model))):
        raise InputError(
            f"model must be a name of the list, got {shown(model)}",
            "GET /models lists them; or send the values of a config.json as config",
            field="model",
        )
    if routing is not None and routing not in _ROUTINGS:
        known = " or ".join(_ROUTINGS)
        raise InputError(f"routing must be {known}, got {shown(routing)}", field="routing")
    question = ask(rest)
    if is_of_model(question):
        for name, largest in _LARGEST.items():
            if (value := getattr(question, name) or 0) > largest:
                what = f"{flag_of(name)} must be from 1 to {largest}, got {value}"
                raise InputError(what, field=name)
    return ServedQuestion(question=question, profile=profile)


def _profile_name(profile: object) -> str:
    if not isinstance(profile, str) or not profile or is_path(profile):
        raise InputError(
            f"profile must be a name, got {shown(profile)}",
            "import the file first: only stored profiles can be planned with here",
            field="profile",
        )
    return profile
