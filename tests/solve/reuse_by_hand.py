"""A layer's step with every strategy, told step by step without the product's code."""

from dataclasses import dataclass, field

from moetune.domain.constraints import Strategy
from moetune.domain.layer import PHASES, Phase


@dataclass
class Machine:
    """Resources that each serve their own list in order; no interference."""

    done: dict[str, float] = field(default_factory=dict)
    free: dict[str, float] = field(default_factory=dict)

    def run(self, name: str, resource: str, seconds: float, after: list[str]) -> None:
        start = max([self.free.get(resource, 0.0), *(self.done[task] for task in after)])
        self.done[name] = self.free[resource] = start + seconds


def naive(  # noqa: C901 - told step by step
    phase: Phase,
    degree: int,
    *,
    transfer: float,
    before: float,
    after: float,
    inputs: float | None,
    middle: float | None,
    again: bool,
) -> float:
    """Chunk by chunk, as the issue's words have it, with an engine that copies."""
    machine = Machine()

    def dispatch(i: int) -> None:
        waits = [f"E{i - 2}"] if phase == "forward" and i >= 2 else []
        waits += [f"in {i - 2}"] if waits and inputs is not None else []
        if again and phase == "backward":
            machine.run(f"A{i}", "link", transfer, [])
        machine.run(f"D{i}", "link", transfer, waits)

    def load(name: str, i: int, seconds: float | None, after: list[str]) -> None:
        if seconds is not None and i < degree:
            machine.run(f"{name} {i}", "engine", seconds, after)

    dispatch(0)
    if phase == "forward" and degree > 1:
        dispatch(1)
    if phase == "backward":
        load("in", 0, inputs, [])
        load("mid", 0, middle, [])
        load("in", 1, inputs, [])
    for i in range(degree):
        if phase == "backward" and i + 1 < degree:
            dispatch(i + 1)
        if phase == "forward":
            load("in", i, inputs, [f"D{i}"] + ([f"E{i - 1}"] if i else []))
            kept = [f"mid {i - 1}"] if middle is not None and i else []
            kept += [f"in {i - 1}"] if inputs is not None and 0 < i < degree - 1 else []
            machine.run(f"B{i}", "device", before, [f"D{i}", *kept])
            load("mid", i, middle, [f"B{i}"])
            machine.run(f"E{i}", "device", after, [f"C{i - 2}"] if i >= 2 else [])
            if i + 2 < degree:
                dispatch(i + 2)
        else:
            needs = [f"D{i}"] + [
                f"{name} {i}" for name, sec in (("in", inputs), ("mid", middle)) if sec is not None
            ]
            machine.run(f"B{i}", "device", before, needs)
            load("mid", i + 1, middle, [f"B{i}"])
            machine.run(f"E{i}", "device", after, [])
            load("in", i + 2, inputs, [f"E{i}"])
        machine.run(f"C{i}", "link", transfer, [f"E{i}"])
    return max(machine.done.values())


@dataclass(frozen=True, kw_only=True)
class LayerByHand:
    """A two-GEMM layer with one expert a rank: lines for its costs, elements of two bytes.

    Args:
        exchange, gemm, copy: seconds of bytes or multiply-accumulates: (alpha, beta).
    """

    d_model: int
    d_hidden: int
    num_experts: int
    rows: int
    tokens: int
    exchange: tuple[float, float]
    gemm: tuple[float, float]
    copy: tuple[float, float]

    def step_seconds(self, strategy: Strategy, degree: int) -> float:
        if degree == 1:
            strategy = "none"  # nothing is there to use again
        return sum(self.phase_seconds(phase, strategy, degree) for phase in PHASES)

    def phase_seconds(self, phase: Phase, strategy: Strategy, degree: int) -> float:
        is_backward, rows = phase == "backward", self.rows / degree
        transfer = self.exchange[0] + self.exchange[1] * rows * self.d_model * 2
        product = self.gemm[0] + self.gemm[1] * rows * self.d_model * self.d_hidden
        if strategy == "none":
            experts = product * (4 if is_backward else 2)
            return max(2 * degree * transfer, 2 * transfer + degree * experts)
        again = product * (is_backward and strategy in {"S3", "S4"})

        def copied(width: int) -> float:
            return self.copy[0] + self.copy[1] * rows * width * 2

        return naive(
            phase,
            degree,
            transfer=transfer,
            before=again + product * (2 if is_backward else 1),
            after=product * (2 if is_backward else 1),
            inputs=copied(self.d_model) if strategy in {"S1", "S3"} else None,
            middle=copied(self.d_hidden) if strategy in {"S1", "S2"} else None,
            again=strategy in {"S2", "S4"},
        )
