"""Number formats of the experts' products and of the rows on the wire.

Parameters, activations and results keep their dtype. A quantized product rounds its two factors to
8 bits, with scales of their own, and sums in float32.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape

Format = Literal["fp8_rowwise", "mxfp8"]
"""e4m3 with one scale for all values that one sum runs over, or one for each 32 of them (OCP MX).
Scales are powers of two."""
FORMATS: tuple[Format, ...] = get_args(Format)
MX_BLOCK = 32
_WIDTHS: dict[Format, int] = {"fp8_rowwise": 16, "mxfp8": MX_BLOCK}


def parse_formats(names: Iterable[str]) -> tuple[Format, ...]:
    """Return the formats of these names.

    Raises:
        InputError: there is no such format.
    """
    known = {str(each): each for each in FORMATS}
    found = tuple(names)
    for name in found:
        if name not in known:
            raise InputError(f"format {name!r} is unknown", f"use {' or '.join(FORMATS)}")
    return tuple(known[name] for name in found)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Quantization:
    """The format of each of an expert's products; None is the dtype of the step.

    Args:
        forward: of x·W₁, x·W₃ and h·W₂.
        grad_input: of the same products' gradients by x and h.
        grad_weights: of their gradients by the matrices; "fp8_rowwise" or None.
        dispatch: of the rows that travel to their experts, in both phases. Results travel back in
            the dtype of the step.
        emulate: compute the products from the rounded factors in float32, on any device: for
            tests of numerics, slower than no quantization.

    Raises:
        InputError: a format is unknown, or not available there.
    """

    forward: Format | None = None
    grad_input: Format | None = None
    grad_weights: Format | None = None
    dispatch: Format | None = None
    emulate: bool = False

    def __post_init__(self) -> None:
        for name in ("forward", "grad_input", "grad_weights", "dispatch"):
            found = getattr(self, name)
            if found is not None and found not in FORMATS:
                raise InputError(
                    f"format {found!r} of {name} is unknown",
                    f"use one of {', '.join(FORMATS)}, or None",
                )
        if self.grad_weights == "mxfp8":
            raise InputError(
                "grad_weights are not available in mxfp8: its blocks would have to run along the "
                "rows of each expert",
                "use None, the dtype of the step, or fp8_rowwise",
            )

    @classmethod
    def of(cls, wanted: "Quantization | str | None") -> "Quantization | None":
        """Return a recipe, or that of a format's name; None where nothing is quantized.

        "fp8_rowwise" takes it for all products, "mxfp8" for all but the matrices' gradients, which
        keep the dtype of the step. Neither changes the wire.

        Raises:
            InputError: there is no such format.
        """
        if isinstance(wanted, str):
            if wanted == "none":
                return None
            for each in FORMATS:
                if each == wanted:
                    last = None if each == "mxfp8" else each
                    return cls(forward=each, grad_input=each, grad_weights=last)
            raise InputError(
                f"quantization {wanted!r} is unknown",
                f"use one of {', '.join(FORMATS)}, none, or a moetune.Quantization",
            )
        return None if wanted is None or not wanted.formats else wanted

    @property
    def formats(self) -> tuple[Format, ...]:
        """Those in use, each once."""
        found = dict.fromkeys((*self.products, self.dispatch))
        return tuple(each for each in found if each is not None)

    @property
    def products(self) -> tuple[Format | None, Format | None, Format | None]:
        """Those of the products, in the order of a step."""
        return self.forward, self.grad_input, self.grad_weights

    @property
    def multiplies(self) -> bool:
        """Whether any product is quantized, and not the wire alone."""
        return any(self.products)

    def check_widths(self, layer: LayerShape) -> None:
        """Raise InputError unless the layer's widths are multiples of what the kernels take."""
        for each in self.formats:
            for name, width in (("d_model", layer.d_model), ("d_hidden", layer.d_hidden)):
                if width % _WIDTHS[each]:
                    raise InputError(
                        f"{name} ({width}) is no multiple of {_WIDTHS[each]}, as {each} needs",
                        "use another width, or no quantization",
                    )
