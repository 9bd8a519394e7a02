"""The use of a new profile in one sentence: how sure a plan of the layer it was measured for is."""

from dataclasses import dataclass

from moetune.domain.errors import MoetuneError
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.report.section import percents
from moetune.workflows.plan import make_plan
from moetune.workflows.profile_request import ProfileRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitness:
    """The range of a step that the profile predicts, relative to the prediction.

    Args:
        shorter, longer: of p05 and p95; None where no plan could be made.
        problem: why not.
    """

    tokens: int
    shorter: float | None = None
    longer: float | None = None
    problem: str = ""

    @property
    def words(self) -> str:
        """The sentence, with what improves the profile."""
        if self.shorter is None or self.longer is None:
            return f"No plan of this layer can be made yet: {self.problem}."
        shorter, longer = percents(self.shorter, self.longer, sign=True)
        return (
            f"Plans of this layer with {self.tokens:,} tokens per rank: nine steps of ten within "
            f"{shorter} and {longer} of the prediction. A longer --budget "
            "measures more sizes, and each of them more often."
        )


def fitness_of(profile: Profile, request: ProfileRequest) -> Fitness | None:
    """Return the range of the first layer's step on all ranks; None if no layer was asked for."""
    if not request.layers:
        return None
    layer, ranks = request.layers[0], profile.machine.num_devices
    dtype = request.dtypes[0] if request.dtypes else "float32"
    try:
        asked = PlanRequest(
            layer=layer, world_size=ranks, tokens_per_rank=request.max_tokens, dtype=dtype
        )
        predicted = make_plan(asked, profile=profile).predicted
    except MoetuneError as error:
        return Fitness(tokens=request.max_tokens, problem=error.what)
    return Fitness(
        tokens=request.max_tokens,
        shorter=predicted.p05_step_seconds / predicted.step_seconds - 1,
        longer=predicted.p95_step_seconds / predicted.step_seconds - 1,
    )
