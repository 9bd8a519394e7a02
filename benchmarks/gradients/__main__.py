"""Time DDP's buckets and moetune's pieces on links of a set rate: about 20 minutes, as root.

python -m benchmarks.gradients            writes docs/results/gradients.md
python -m benchmarks.gradients --quick    one link, few rounds; writes nothing without --output
python -m benchmarks.gradients --sequences 1 --length 1024 --layers 4 --rounds 7
    --ways ddp25 ddp4 default positions --output FILE      one sequence, of whose positions
    halves take turns
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gradients.ranks import Prediction, Work
from benchmarks.gradients.report import Cell, report
from benchmarks.netlab.__main__ import describe_machine
from benchmarks.netlab.lab import Lab, check_supported
from moetune.domain.document import canonical_json, encode
from moetune.domain.errors import MoetuneError
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer
from moetune.workflows.files import write_text

_RESULT = Path(__file__).parents[2] / "docs/results/gradients.md"
_TIMEOUT_SECONDS = 1800.0
_WAYS = ("ddp25", "ddp4", "end", "default", "planned", "two")


def main() -> int:
    """Measure, print the report and write it; return the exit code."""
    given = _arguments()
    load = os.getloadavg()[0]
    try:
        check_supported()
        cells = [_measure(given, rate) for rate in given.rates]
    except MoetuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text = report(cells, machine=describe_machine(peer=False, load=load))
    print(text)
    output = given.output or (None if given.quick else _RESULT)
    if output is not None:
        write_text(output, text)
        raw = json.dumps([encode(cell) for cell in cells], indent=1)
        write_text(output.with_suffix(".json"), raw + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradients", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, writes nothing")
    parser.add_argument("--rates", type=float, nargs="+", default=[200.0, 500.0], help="Mbit/s")
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--ways", nargs="+", default=_WAYS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--moe-every", type=int, default=1)
    parser.add_argument("--d-hidden", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=4, help="on each rank")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def _measure(given: argparse.Namespace, rate_mbit: float) -> Cell:
    layer = LayerShape(d_model=512, d_hidden=given.d_hidden, num_experts=8, top_k=2)
    work = Work(
        transformer=Transformer(
            moe=layer, num_layers=given.layers, num_heads=8, length=given.length, vocab_size=512,
            moe_every=given.moe_every,
        ),
        sequences=given.sequences,
        variants=_variants(given.ways, given.degrees),
    )  # fmt: skip
    command = [
        *(sys.executable, "-m", "benchmarks.gradients.ranks", "--work", canonical_json(work)),
        *("--rounds", str(3 if given.quick else given.rounds)),
    ]
    with Lab(num_ranks=2, rate_mbit=rate_mbit) as lab:
        outputs = lab.run(command, timeout_seconds=_TIMEOUT_SECONDS, echo=sys.stderr)
    found = json.loads(outputs[0].stdout.splitlines()[-1])
    return Cell(
        rate_mbit=rate_mbit,
        work=work,
        seconds={name: tuple(each) for name, each in found["seconds"].items()},
        predicted={name: Prediction(**each) for name, each in found["predicted"].items()},
    )


def _variants(ways: Sequence[str], degrees: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{way}:{degree}" for degree in degrees for way in ways)


if __name__ == "__main__":
    sys.exit(main())
