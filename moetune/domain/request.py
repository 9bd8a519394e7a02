"""The inputs of a request that a layer's plan records, and the texts of its constraints."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from moetune.domain.constraints import Bounds, Constraints
from moetune.domain.document import digest, encode, shown
from moetune.domain.errors import InputError
from moetune.domain.kernels import KernelName
from moetune.domain.layer import ExpertParallel, LayerShape, Workload
from moetune.domain.layout import Layout
from moetune.domain.profile import Profile
from moetune.domain.question import ASKS, Question
from moetune.domain.routing import LayerRouting
from moetune.domain.spelling import nearest_or
from moetune.domain.training import HALF_PRECISION, TrainingDtype
from moetune.domain.units import DTYPE_BYTES
from moetune.domain.withdrawn import withdrawal_of

_MOST_DIGITS = 18


_BOUNDS = tuple(item.name for item in fields(Bounds))
CONSTRAINTS: Mapping[str, str] = MappingProxyType(
    {
        ask.flag.removeprefix("--"): name
        for name in (*_BOUNDS, *(item.name for item in fields(Constraints)))
        if (ask := ASKS.get(name.removesuffix("_bytes"))) is not None
    }
)
"""Fields of constraints and their bounds, by the flags that a plan's inputs record as texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """All inputs of a decision; their hash is the plan's id. Raises InputError for withdrawn pins.

    Args:
        tokens_per_rank: tokens of each rank; for a tensor-parallel group those of the whole group.
        constraints: pins and bounds of the caller, by flag name; empty without any.
    """

    model: str | None
    layer: LayerShape
    world_size: int
    tokens_per_rank: int
    dtype: str
    memory_limit_bytes: int | None
    profile: str
    profile_fingerprint: str
    constraints: Mapping[str, str]

    def __post_init__(self) -> None:
        for flag in self.constraints:
            if (row := withdrawal_of("PlanInputs", flag)) is not None:
                raise row.refusal("inputs.constraints")

    @property
    def plan_id(self) -> str:
        """sha256 of the canonical inputs."""
        return digest(self)

    def question_for(self, num_ranks: int) -> dict[str, object]:
        """Return the question for the same total tokens on other ranks; the profile may differ."""
        tokens = -(-self.tokens_per_rank * self.world_size // num_ranks)
        asked = replace(self, model=None, world_size=num_ranks, tokens_per_rank=tokens)
        plain: dict[str, object] = encode(asked)
        del plain["profile_fingerprint"]
        return {name: value for name, value in plain.items() if value is not None}

    @property
    def pinned(self) -> Constraints:
        """The constraints, typed, without those of a newer moetune."""
        read = {flag: text for flag, text in self.constraints.items() if flag in CONSTRAINTS}
        return decode_constraints(read)

    @property
    def expert_parallel(self) -> ExpertParallel:
        """Parallelism of a single layer's experts: as pinned, else all_to_all."""
        return self.pinned.expert_parallel

    def workload(
        self, layout: Layout, placement: tuple[int, ...] = (), kernel: KernelName = ""
    ) -> Workload:
        """Return one layer, on the ranks that share its experts."""
        return Workload(
            layer=self.layer,
            world_size=layout.expert_ranks,
            tokens_per_rank=self.tokens_per_rank,
            dtype=self.dtype,
            expert_parallel=layout.expert_parallel,
            routing=self.pinned.routing,
            placement=placement,
            kernel=kernel,
        )


def encode_constraints(constraints: Constraints) -> dict[str, str]:
    """Return the constraints that differ from the defaults, as texts by flag name."""
    return {flag: _text(value) for flag, value in _given_values(constraints)}


def answers_of(constraints: Constraints) -> dict[str, object]:
    """Return the constraints that differ from the defaults, by field of the question."""
    return {flag.replace("-", "_"): value for flag, value in _given_values(constraints)}


def constraints_of(question: Question) -> Constraints:
    """Return the constraints of a layer's question, with routing as the text of a `LayerRouting`.

    Raises:
        InputError: no plan can have the pins.
    """
    answers = {
        name: getattr(question, flag.replace("-", "_")) for flag, name in CONSTRAINTS.items()
    }
    answers["routing"] = str(LayerRouting.of(question.routing or ""))
    constraints = _constraints(
        {name: value for name, value in answers.items() if value is not None}
    )
    check_pins(constraints)
    return constraints


def decode_constraints(texts: Mapping[str, str]) -> Constraints:
    """Return the constraints in texts by flag; raises InputError for a wrong flag or text."""
    for flag in texts:
        if flag not in CONSTRAINTS:
            hint = nearest_or(f"known: {', '.join(sorted(CONSTRAINTS))}", flag, CONSTRAINTS)
            raise InputError(f"the constraint {shown(flag)} is unknown", hint)
    return _constraints({CONSTRAINTS[flag]: _value(flag, text) for flag, text in texts.items()})


def _constraints(values: dict[str, Any]) -> Constraints:
    bounds = {name: values.pop(name) for name in _BOUNDS if name in values}
    return Constraints(bounds=Bounds(**bounds), **values)


def _given_values(constraints: Constraints) -> Iterator[tuple[str, object]]:
    """Yield the constraints and bounds that differ from the defaults, by flag name."""
    default = Constraints()
    for flag, name in CONSTRAINTS.items():
        is_bound = name in _BOUNDS
        value = getattr(constraints.bounds if is_bound else constraints, name)
        if value != getattr(default.bounds if is_bound else default, name):
            yield flag, value


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(flag: str, text: str) -> Any:  # noqa: ANN401 - of any kind
    """Return the value of a flag's text; numbers are bytes or tokens, without a unit."""
    ask = ASKS[flag.replace("-", "_")]
    if flag == "routing":
        return str(LayerRouting.of(text))
    if ask.kind is not int:
        return ask.read(text)
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise InputError(f"--{flag} must be a whole number, as a text, got {shown(text)}")
    if int(text) < ask.smallest:  # an older plan may have more than is allowed now
        ask.check(int(text))
    return int(text)


def constraint_words(flag: str, text: str) -> str:
    """Return a constraint's value for readers; recorded loads show only their number."""
    if flag != "routing":
        return text
    loads = LayerRouting.of(text).loads
    return loads.name if loads.loads is None else f"loads of {len(loads.loads)} experts"


def gemm_dtypes(profile: Profile) -> tuple[str, ...]:
    """Return the dtypes that a profile has GEMMs in, without narrow formats."""
    dtypes = list(dict.fromkeys(line.dtype for line in profile.gemm))
    dtypes += [s.point.dtype for s in profile.samples if s.point.kind == "gemm"]
    dtypes += [table.dtype for table in profile.tables if table.kind == "gemm"]
    return tuple(dtype for dtype in dtypes if dtype in DTYPE_BYTES)


def default_dtype(profile: Profile) -> str:
    """Return bfloat16 where a CUDA profile has it, else float32, else the profile's first."""
    dtypes = gemm_dtypes(profile)
    wanted = ("bfloat16", "float32") if profile.machine.kind == "cuda" else ("float32",)
    return next((dtype for dtype in (*wanted, *dtypes) if dtype in dtypes), "float32")


def usual_dtype(profile: Profile) -> TrainingDtype:
    """Return bfloat16, or float16 where a profile has that and not bfloat16."""
    measured = gemm_dtypes(profile)
    return next((dtype for dtype in HALF_PRECISION if dtype in measured), "bfloat16")


def check_pins(constraints: Constraints) -> None:
    """Raise InputError if no plan can have the pins."""
    is_tensor = constraints.expert_parallel == "tensor"
    rule = constraints.expert_placement
    if rule != "planned" and not constraints.routing:
        raise InputError(
            f"--expert-placement {rule} needs --routing: without loads of experts none is placed",
            "omit --expert-placement, or give the record of a layer's routing with --routing",
        )
    bounds = constraints.bounds
    excluded = {
        "--routing": (constraints.routing, "whose ranks all have every token"),
        f"--strategy {bounds.strategy}": (
            bounds.strategy not in {None, "none"},
            "where nothing is dispatched and no memory reused",
        ),
        f"--order {bounds.order}": (bounds.order, "where a chunk has one transfer"),
    }
    for flag, (is_pinned, reason) in excluded.items():
        if is_tensor and is_pinned:
            raise InputError(
                f"{flag} excludes --expert-parallel tensor, {reason}",
                f"omit {flag.partition(' ')[0]}, or take --expert-parallel all_to_all",
            )
