"""Tasks of phases in many numbers of chunks at once, against those of each number by itself."""

import itertools

import pytest

from moetune.domain.layer import PHASES, Phase
from moetune.domain.samples import ResourceClass
from moetune.solve.layer.programs import CODES, WEIGHTS, programs_with
from moetune.solve.layer.reuse import ChunkKind
from moetune.solve.layer.steady import EDGE, FEW, STREAMS, program

_BITS = 2
_CLASSES: tuple[ResourceClass, ...] = ("comm", "comp", "mem")


def code_of(bits: int, stream: int) -> int:
    """Return the weighted code of a step's class, 0 of the task that never runs."""
    number = bits >> _BITS * stream
    return WEIGHTS[stream] * (CODES[stream].index(_CLASSES[number - 1]) + 1) if number else 0


@pytest.mark.parametrize("degree", [*range(1, FEW + 1), FEW + 1, 24, 40])
@pytest.mark.parametrize("phase", PHASES)
def test_the_tasks_of_fewer_chunks_are_those_of_their_own_program(
    phase: Phase, degree: int
) -> None:
    for flags in itertools.product((False, True), repeat=5):
        kind = ChunkKind(phase, *flags)
        alone, found = program(kind, degree), programs_with(kind, degree)
        firsts = found.first[degree - found.fewest].tolist()
        assert tuple(found.each.tolist()) == alone.each
        for stream, (first, steps) in enumerate(zip(firsts, alone.streams, strict=True)):
            rows = found.steps[:, first : first + len(steps)].tolist()
            compared = {
                at for at, chunk in alone.ended_chunk.items() if EDGE <= chunk < degree - EDGE
            }
            wanted = [
                (duration, code_of(bits, stream), needs,
                 STREAMS[stream] == "compute" and at in compared)
                for at, (duration, bits, needs) in enumerate(steps)
            ]  # fmt: skip
            assert list(zip(*rows, strict=True)) == wanted
