"""Measure the joint plan on links of a set rate: about 25 minutes on a quiet machine, as root.

python -m benchmarks.joint      writes docs/results/joint.md
python -m benchmarks.joint --sequences 1 --length 1024 --random 12
    --output docs/results/one-sequence.md      a sequence, of whose positions halves take turns
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.joint.experiment import Case, run_case
from benchmarks.joint.report import report
from benchmarks.netlab.__main__ import describe_machine
from benchmarks.netlab.lab import check_supported
from moetune.domain.document import encode
from moetune.domain.errors import MoetuneError
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer
from moetune.workflows.files import write_text

_RESULT = Path(__file__).parents[2] / "docs/results/joint.md"


def main() -> int:
    """Measure, print the report and write it; return the exit code."""
    given, load = _arguments(), os.getloadavg()[0]
    layer = LayerShape(d_model=512, d_hidden=1024, num_experts=8, top_k=2)
    case = Case(
        transformer=Transformer(
            moe=layer, num_layers=given.layers, num_heads=8, length=given.length, vocab_size=512,
            moe_every=1,
        ),
        sequences=given.sequences, num_random=given.random,
    )  # fmt: skip
    cells = []
    try:
        check_supported()
        for rate in given.rates:
            with tempfile.TemporaryDirectory(prefix="joint-") as folder:
                cells.append(
                    run_case(
                        case, rate_mbit=rate, rounds=given.rounds, budget=given.budget,
                        folder=Path(folder), echo=sys.stderr,
                    )
                )  # fmt: skip
    except MoetuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text = report(cells, machine=describe_machine(peer=False, load=load))
    print(text)
    write_text(given.output, text)
    raw = json.dumps([encode(cell) for cell in cells], indent=1)
    write_text(given.output.with_suffix(".json"), raw + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joint", description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[200.0, 500.0], help="Mbit/s")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=4, help="on each rank")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--random", type=int, default=30, help="random plans beside the joint one")
    parser.add_argument("--budget", default="120s", help="of each profile")
    parser.add_argument("--output", type=Path, default=_RESULT)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
