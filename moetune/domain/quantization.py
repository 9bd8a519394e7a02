"""Number formats of the experts' products and of the rows on the wire.

Parameters, activations and results keep their dtype. A quantized product rounds its two factors to
8 bits, with scales of their own, and sums in float32.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from moetune.domain.errors import InputError
from moetune.domain.units import dtype_bytes

Format = Literal["fp8_rowwise", "mxfp8"]
"""e4m3 with one scale for all values that one sum runs over, or one for each 32 of them (OCP MX).
Scales are powers of two."""
FORMATS: tuple[Format, ...] = get_args(Format)
MX_BLOCK = 32
_WIDTHS: dict[Format, int] = {"fp8_rowwise": 16, "mxfp8": MX_BLOCK}
_ROW_BYTES = 16
_EMULATED = "_emulated"
MEASURED_DTYPES: tuple[str, ...] = (*FORMATS, *(f"{form}{_EMULATED}" for form in FORMATS))
"""Element types of measured points in 8 bits: a format, by a kernel or emulated."""
NVFP4 = "nvfp4"
"""e2m1 with a scale for each 16 values: priced for whole decoders, run by no layer of moetune."""
_EMULATE = "emulate"
_SHARES = ("forward", "grad_input", "grad_weights", "dispatch")
_AS_TEXT = (
    "use a format, alone or with dispatch and emulate, such as "
    f"{FORMATS[0]}, {FORMATS[0]}+dispatch={FORMATS[0]} or {FORMATS[1]}+{_EMULATE}"
)


def measured_dtype(form: Format, *, emulate: bool) -> str:
    """Return the element type of measured points in a format."""
    return f"{form}{_EMULATED}" if emulate else form


def measured_format(dtype: str) -> tuple[Format, bool] | None:
    """Return the format of measured points, and whether it is emulated; None of other dtypes."""
    for form in FORMATS:
        if dtype in {form, f"{form}{_EMULATED}"}:
            return form, dtype != form
    return None


def check_product_dtype(dtype: str) -> None:
    """Raise InputError for what is neither a dtype nor a narrow format that GEMMs have."""
    if dtype not in {*MEASURED_DTYPES, NVFP4}:
        dtype_bytes(dtype)


def packed_width(width: int, form: Format) -> int:
    """Return the bytes of one row of that many values on the wire, with its scales in e8m0."""
    num_scales = width // MX_BLOCK if form == "mxfp8" else 1
    return width + -(-num_scales // _ROW_BYTES) * _ROW_BYTES


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
        """Return a recipe, or that of a text; None where nothing is quantized.

        A text is a format, or parts with "+" between them: a format, formats of single shares
        ("dispatch=mxfp8"), and "emulate". "fp8_rowwise" takes it for all products, "mxfp8" for all
        but the matrices' gradients, which keep the dtype of the step. Neither changes the wire.

        Raises:
            InputError: there is no such format.
        """
        found = _parsed(wanted) if isinstance(wanted, str) else wanted
        return None if found is None or not found.formats else found

    def __str__(self) -> str:
        """Return the shortest text that `of` reads as this recipe: its name in plans."""
        parts: list[str] = [form for form in FORMATS if _products_of(form) == self.products]
        shares = _SHARES[-1:] if parts else _SHARES
        given = ((share, getattr(self, share)) for share in shares)
        parts += [f"{share}={form}" for share, form in given if form is not None]
        return "+".join([*parts, _EMULATE] if self.emulate else parts)

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

    def check_widths(self, *, d_model: int, d_hidden: int) -> None:
        """Raise InputError unless a layer's widths are multiples of what the kernels take."""
        for each in self.formats:
            for name, width in (("d_model", d_model), ("d_hidden", d_hidden)):
                if width % _WIDTHS[each]:
                    raise InputError(
                        f"{name} ({width}) is no multiple of {_WIDTHS[each]}, as {each} needs",
                        "use another width, or no quantization",
                    )


def _products_of(form: Format) -> tuple[Format | None, Format | None, Format | None]:
    return form, form, None if form == "mxfp8" else form


def _parsed(text: str) -> Quantization | None:
    """Return the recipe of a text: see `Quantization.of`."""
    if text in {"none", ""}:
        return None
    shares: dict[str, Format | None] = {}
    emulate = False
    for part in text.split("+"):
        share, _, value = part.partition("=")
        named = [form for form in FORMATS if form == (value or part)]
        if part == _EMULATE:
            emulate = True
        elif value and share in _SHARES and named:
            shares[share] = named[0]
        elif named and not value:
            shares |= dict(zip(_SHARES, _products_of(named[0]), strict=False))
        else:
            raise InputError(f"quantization {text!r} has {part!r}, which is unknown", _AS_TEXT)
    return Quantization(emulate=emulate, **shares)
