"""How two plans of a Hugging Face model's training differ, in words."""

from collections.abc import Iterator

from moetune.domain.training_document import TrainingDocument
from moetune.domain.units import format_bytes, format_seconds, format_share
from moetune.solve.joint.pins import pin_flag, pinned

_INPUTS = (
    "model", "world_size", "global_batch", "seq", "dtype", "profile", "target",
    "target_version", "optimizer", "routing",
)  # fmt: skip
_WORK = ("model", "world_size", "global_batch", "seq")
"""Inputs with which steps are of the same work on the same ranks."""
_TIMES = 2.0
_SAME = 5e-4


def input_differences(first: TrainingDocument, second: TrainingDocument) -> Iterator[str]:
    """Yield the inputs that differ: "world size 64 instead of 32", "--tp 2"."""
    left, right = first.inputs, second.inputs
    for name in _INPUTS:
        was, now = getattr(left, name), getattr(right, name)
        if was != now:
            yield f"{name.replace('_', ' ')} {now} instead of {was}"
    prints = {left.profile_fingerprint, right.profile_fingerprint} - {""}
    if left.profile == right.profile and len(prints) > 1:
        yield f"profile {right.profile} as it is now"
    if left.memory_limit_bytes != right.memory_limit_bytes:
        was, now = map(format_bytes, (left.memory_limit_bytes, right.memory_limit_bytes))
        yield f"{now} of a device's memory instead of {was}"
    for name in dict.fromkeys((*pinned(left.pins), *pinned(right.pins))):
        was, now = getattr(left.pins, name), getattr(right.pins, name)
        if now is None:
            yield f"without {pin_flag(left.pins, name)}"
        elif was != now:
            before = "" if was is None else f" instead of {pin_flag(left.pins, name)}"
            yield f"{pin_flag(right.pins, name)}{before}"


def step_change(first: TrainingDocument, second: TrainingDocument) -> str:
    """Return how the second step's time compares, and its tokens where ranks or work differ."""
    then, now = first.predicted, second.predicted
    words = f"A step takes {format_seconds(now.step_seconds)}"
    ratio = now.step_seconds / then.step_seconds
    if abs(ratio - 1) < _SAME:
        words += ", as before"
    else:
        words += f" instead of {format_seconds(then.step_seconds)}, {_ratio_words(ratio)}"
    if any(getattr(first.inputs, name) != getattr(second.inputs, name) for name in _WORK):
        tokens = (one.tokens_per_second_per_device for one in (now, then))
        words += "; {:,.0f} tokens a second and device instead of {:,.0f}".format(*tokens)
    return f"{words}."


def layout_changes(first: TrainingDocument, second: TrainingDocument) -> Iterator[str]:
    """Yield sentences on the second plan's layout, its experts and its memory."""
    if first.best.words != second.best.words:
        yield f"It takes {second.best.words} instead of {first.best.words}."
    before, after = map(_where, (first, second))
    if before != after:
        yield f"Its experts are {after} instead of {before}."
    was, now = first.best.memory.peak_bytes, second.best.memory.peak_bytes
    compared = ", as before" if now == was else f" instead of {format_bytes(was)}"
    yield f"A device's memory peaks at {format_bytes(now)}{compared}."


def _ratio_words(ratio: float) -> str:
    if ratio >= _TIMES:
        return f"{ratio:.1f} times as long"
    if ratio <= 1 / _TIMES:
        return f"{1 / ratio:.1f} times as fast"
    return f"{format_share(abs(ratio - 1))} {'longer' if ratio > 1 else 'shorter'}"


def _where(plan: TrainingDocument) -> str:
    """Return where a plan's experts are."""
    if plan.placement is None or not plan.is_placed:
        return "in their order"
    return "placed by their loads"
