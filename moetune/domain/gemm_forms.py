"""Forms of the experts' GEMM: forward and its gradients, with even and with uneven loads."""

from typing import Literal, cast

EvenForm = Literal["forward", "grad_input", "grad_weight"]
GemmForm = Literal[
    "forward", "grad_input", "grad_weight",
    "uneven_forward", "uneven_grad_input", "uneven_grad_weight",
]  # fmt: skip
_UNEVEN = "uneven_"


def even_form(form: GemmForm) -> EvenForm:
    """Return the form of experts that have about as many rows."""
    return cast("EvenForm", form.removeprefix(_UNEVEN))


def uneven_form(form: GemmForm) -> GemmForm:
    """Return the form in which one expert has most of the rows."""
    return cast("GemmForm", f"{_UNEVEN}{even_form(form)}")


def hottest_share(num_experts: int) -> float:
    """Return the share of all rows that one expert has in the uneven forms, more than its part."""
    return 0.75 if num_experts == 2 else 0.5  # noqa: PLR2004 - half of the rows is an equal part


def expert_rows(form: GemmForm, rows: int, num_experts: int) -> tuple[int, ...]:
    """Return the rows of each expert, `rows` on average.

    Of every four experts of an even form one has a row more, one a row less, and the less loaded
    ones of an uneven form likewise. A router gives experts odd numbers of rows as often as even
    ones. MKL takes an eighth longer for the gradients of weights where they are odd, tiles of a
    GPU's kernels are full where they are round, and a measured number is round.
    """
    if form == even_form(form):
        return tuple(_nearly(rows, num_experts))
    total, others = num_experts * rows, num_experts - 1
    each = int(total * (1 - hottest_share(num_experts))) // others
    return (total - others * each, *_nearly(each, others))


def _nearly(rows: int, num_experts: int) -> list[int]:
    """Return numbers of rows that are as many on average."""
    found = [rows] * num_experts
    if rows > 1:
        for more in range(0, num_experts - 1, 4):
            found[more] += 1
            found[more + 1] -= 1
    return found
