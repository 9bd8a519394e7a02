"""Products of 8-bit rows with the matrices of their groups: torch's scaled kernels, or emulated.

Kernels take groups whose rows are multiples of 16, and of 128 in mxfp8, so that the scales of a
group are whole tiles. Their places come from offsets on the device; the host, which knows the
groups' sizes, gives the sum.

R rows of G groups, P rows with padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moetune.domain.quantization import Format, Quantization
from moetune.formats.scaled import E4M3, Scaled, quantize, scales_of, tiled

_PADDED_ROWS: dict[Format, int] = {"fp8_rowwise": 16, "mxfp8": 128}
_STRIP = 16
_CAPABILITIES: dict[Format, tuple[int, int]] = {"fp8_rowwise": (9, 0), "mxfp8": (10, 0)}
"""GPUs that torch's own tests run each kernel on."""
_MX_BUILDS = ("USE_MSLK", "USE_FBGEMM_GENAI")


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Places of the rows of groups when each group is padded.

    Args:
        ends_G: int32, one past each group's last padded row.
        places_R: of each row among the padded ones.
        num_rows: P.
    """

    ends_G: torch.Tensor
    places_R: torch.Tensor
    num_rows: int

    @classmethod
    def of(cls, ends_G: torch.Tensor, rows_G: Sequence[int], form: Format) -> "Padding":
        """Return that of groups one after another.

        Args:
            ends_G: int32, one past each group's last row, on the device.
            rows_G: the same numbers of rows, on the host; empty groups may be left out.
        """
        multiple = _PADDED_ROWS[form]
        counts_G = torch.diff(ends_G, prepend=ends_G.new_zeros(1))
        padded_G = (counts_G + (multiple - 1)).floor_divide_(multiple).mul_(multiple)
        padded_ends_G = padded_G.cumsum(0, dtype=torch.int32)
        shift_G = (padded_ends_G - padded_G) - (ends_G - counts_G)
        num_rows = sum(rows_G)
        # Without the size the host would wait for the counts.
        shift_R = shift_G.repeat_interleave(counts_G, output_size=num_rows)
        return cls(
            ends_G=padded_ends_G,
            places_R=shift_R + torch.arange(num_rows, device=ends_G.device),
            num_rows=sum(-(-rows // multiple) * multiple for rows in rows_G),
        )

    def pad(self, values_R: torch.Tensor) -> torch.Tensor:
        """Return the values (R, …) among zeros (P, …)."""
        padded = values_R.new_zeros((self.num_rows, *values_R.shape[1:]))
        return padded.index_copy_(0, self.places_R, values_R)

    def pad_scaled(self, rows: Scaled) -> Scaled:
        """Return the rows among rows of zeros."""
        values = self.pad(rows.values.view(torch.uint8)).view(E4M3)  # all bits 0 are 0
        return Scaled(values=values, scales=self.pad(rows.scales))


def multiply_groups(
    rows: Scaled, matrices: Scaled, padding: Padding, dtype: torch.dtype, *, emulate: bool = False
) -> torch.Tensor:
    """Return every row (R, K) times its group's matrix: (R, N).

    Args:
        rows: of `round_rows`.
        matrices: transposed, (G, N, K).
        dtype: of the result: bfloat16 if it is not emulated.
    """
    padded = multiply_rows(rows, matrices, padding.ends_G, dtype, emulate=emulate)
    return padded.index_select(0, padding.places_R)


def round_rows(x: torch.Tensor, padding: Padding, form: Format) -> Scaled:
    """Return rows (R, K) in 8 bits among their padding (P, K)."""
    return padding.pad_scaled(quantize(x, form))


def multiply_transposed(
    x: torch.Tensor, y: torch.Tensor, padding: Padding, *, emulate: bool = False
) -> torch.Tensor:
    """Return xᵀ y of each group's rows (G, width of x, width of y), in the dtype of the rows.

    A column of a group has one scale. Gradients of empty groups are 0.
    """
    ends = padding.ends_G
    left, right = Columns.of(padding.pad(x), ends), Columns.of(padding.pad(y), ends)
    made = multiply_columns(left, right, ends, x.dtype, emulate=emulate)
    is_empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
    # Nobody says that a kernel writes what it adds nothing to.
    return made.masked_fill_(is_empty.view(-1, 1, 1), 0)


def multiply_rows(
    rows: Scaled, matrices: Scaled, ends_G: torch.Tensor, dtype: torch.dtype, *, emulate: bool
) -> torch.Tensor:
    """Return every padded row times its group's matrix (P, N).

    Args:
        rows: (P, K).
        matrices: transposed, (G, N, K).
        dtype: of the result: bfloat16 if it is not emulated.
    """
    if emulate:
        return _emulated_rows(rows, matrices, ends_G, dtype)
    is_mx = rows.scales.shape[1] > 1 or matrices.scales.shape[2] > 1
    if is_mx:
        num_rows, num_scales = rows.scales.shape
        scales = tiled(rows.scales).view(num_rows, -(-num_scales // 4) * 4)
        of_matrices = tiled(matrices.scales)
    else:
        scales, of_matrices = rows.scales.squeeze(1), matrices.scales.squeeze(2)
    return torch._scaled_grouped_mm(  # noqa: SLF001 - the public name checks less
        rows.values, matrices.values.transpose(1, 2), scales, of_matrices, offs=ends_G,
        out_dtype=dtype,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The transposed columns of padded rows in 8 bits, a scale for each column of each group.

    Args:
        values: e4m3, (width, P).
        scales: float32, (G, width).
    """

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, padded: torch.Tensor, ends_G: torch.Tensor) -> "Columns":
        """Return those of rows (P, width) of groups that are multiples of 16."""
        strips = padded.to(torch.float32).unflatten(0, (-1, _STRIP))
        first = torch.arange(0, len(padded), _STRIP, device=padded.device)
        group = torch.searchsorted(ends_G.to(torch.int64), first, right=True)
        largest = strips.abs().amax(1)
        into = largest.new_zeros((len(ends_G), padded.shape[1]))
        index = group.unsqueeze(1).expand_as(largest)
        scales = scales_of(into.scatter_reduce_(0, index, largest, "amax"))
        values = (strips / scales.index_select(0, group).unsqueeze(1)).flatten(0, 1).to(E4M3)
        return cls(values=values.T.contiguous(), scales=scales)


def multiply_columns(
    x: Columns, y: Columns, ends_G: torch.Tensor, dtype: torch.dtype, *, emulate: bool
) -> torch.Tensor:
    """Return xᵀ y of each group's rows (G, width of x, width of y); of empty groups anything."""
    if emulate:
        return _emulated_columns(x, y, ends_G, dtype)
    return torch._scaled_grouped_mm(  # noqa: SLF001 - the public name checks less
        x.values, y.values.T, x.scales.flatten(), y.scales.flatten(), offs=ends_G, out_dtype=dtype
    )


def _emulated_rows(
    rows: Scaled, matrices: Scaled, ends_G: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    x, w = rows.dequantize(torch.float32), matrices.dequantize(torch.float32)
    low, made = 0, []
    for matrix, high in zip(w, ends_G.tolist(), strict=True):
        made.append(x[low:high] @ matrix.T)
        low = high
    return torch.cat(made).to(dtype)


def _emulated_columns(
    x: Columns, y: Columns, ends_G: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    low, made = 0, []
    for group, high in enumerate(ends_G.tolist()):
        left = x.values[:, low:high].to(torch.float32) * x.scales[group].unsqueeze(1)
        right = y.values[:, low:high].to(torch.float32) * y.scales[group].unsqueeze(1)
        made.append(left @ right.T)
        low = high
    return torch.stack(made).to(dtype)


def refusal(quantization: Quantization, device: torch.device, dtype: torch.dtype) -> str:
    """Return why a device cannot run these products in steps of that dtype; "" if it can."""
    wanted = [each for each in quantization.products if each is not None]
    if quantization.emulate:
        is_known = dtype in {torch.bfloat16, torch.float32}
        return "" if is_known else f"8-bit products are emulated in float32, the step is {dtype}"
    problems = [found for each in wanted if (found := _missing_kernel(each, device))]
    if not problems and wanted and dtype != torch.bfloat16:
        problems.append(f"8-bit products give bfloat16, the step is {dtype}")
    return problems[0] if problems else ""


def _missing_kernel(form: Format, device: torch.device) -> str:
    """Return what a device lacks for products in a format, "" where torch has a kernel."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{form} experts need an NVIDIA GPU, x is on {device}"
    properties = torch.cuda.get_device_properties(device)
    major, minor = _CAPABILITIES[form]
    if (properties.major, properties.minor) != (major, minor):
        return (
            f"{form} experts need a GPU of compute capability {major}.{minor}, "
            f"{device} has {properties.major}.{properties.minor}"
        )
    if form == "mxfp8" and not any(one in torch.__config__.show() for one in _MX_BUILDS):
        return "this build of torch has no mxfp8 kernel"
    return ""
