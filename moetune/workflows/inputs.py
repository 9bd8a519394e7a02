"""Documents of inputs, as programs send them: checked key by key, and made a request."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from moetune.domain.constraints import Constraints
from moetune.domain.document import decode, shown
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.request import PlanInputs, PlanRequest
from moetune.domain.spelling import AS_KEYS, Spelling
from moetune.domain.units import dtype_bytes
from moetune.workflows.profiles import is_path

LONGEST_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class InputsDocument:
    """A plan's inputs as a program sends them; None for what is open.

    Args:
        constraints: names and values as plans carry them.

    Raises:
        InputError: an unknown dtype, or a name that is none.
    """

    model: str | None = None
    layer: LayerShape | None = None
    profile: str | None = None
    profile_fingerprint: str | None = None
    world_size: int | None = None
    tokens_per_rank: int | None = None
    dtype: str | None = None
    memory_limit_bytes: int | None = None
    constraints: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "profile", "profile_fingerprint", "dtype"):
            if len(getattr(self, name) or "") > LONGEST_NAME:
                raise InputError(f"{name} is longer than {LONGEST_NAME} characters")
        if self.profile is not None and (not self.profile or is_path(self.profile)):
            raise InputError(
                f"profile must be a name, got {shown(self.profile)}",
                "only profiles that are stored here can be planned with: import the file first",
            )
        if self.dtype is not None:
            dtype_bytes(self.dtype)

    def request(self, *, default_dtype: str | None, spelling: Spelling = AS_KEYS) -> PlanRequest:
        """Return the request; how large its numbers may be is not checked here.

        Args:
            default_dtype: where the document has none; None for the profile's own.

        Raises:
            InputError: the keys contradict each other, or a value is unknown or out of range.
        """
        return PlanRequest(
            model=self.model,
            layer=self.layer if self.model is None else None,
            world_size=self.world_size,
            tokens_per_rank=self.tokens_per_rank,
            dtype=self.dtype or default_dtype,
            memory_limit_bytes=self.memory_limit_bytes,
            constraints=Constraints.decode(self.constraints, spelling),
            spelling=spelling,
        )

    def check(self, inputs: PlanInputs) -> None:
        """Raise InputError where the plan would be made from something else than was sent."""
        sent = self.profile_fingerprint
        if sent is not None and sent != inputs.profile_fingerprint:
            raise InputError(
                f"profile {inputs.profile!r} has the fingerprint "
                f"{inputs.profile_fingerprint[:12]}, not {sent[:12]!r}",
                "it was measured or imported anew: omit profile_fingerprint to take it",
            )
        if self.layer is not None and self.layer != inputs.layer:
            raise InputError(
                f"layer is not that of model {self.model} on {inputs.world_size} ranks",
                "give the model or the layer, not both",
            )


def read_inputs(document: object, where: str = "inputs") -> InputsDocument:
    """Return the inputs in a document's plain values.

    Args:
        where: what the document is called in an error.

    Raises:
        InputError: a key is unknown, or a value wrong; the text names the key.
    """
    return decode(InputsDocument, document, where)
