"""Measure all layouts of four models in a lab of two nodes: about 30 minutes, as root."""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.layouts.experiment import Case, run_case, write_results
from benchmarks.layouts.report import report
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer

RESULTS = Path("docs/results")
_LAYERS = (
    (LayerShape(d_model=128, d_hidden=512, num_experts=4), 8),
    (LayerShape(d_model=256, d_hidden=512, num_experts=8), 4),
    (LayerShape(d_model=256, d_hidden=1024, num_experts=4), 8),
    (LayerShape(d_model=384, d_hidden=768, num_experts=8, top_k=2), 4),
)


def cases() -> tuple[Case, ...]:
    """Return the four models: (M, H, E) and the sequences of 128 tokens on each rank."""
    return tuple(
        Case(
            transformer=Transformer(
                moe=layer, num_layers=4, num_heads=4, length=128, vocab_size=256
            ),
            sequences_per_rank=sequences,
        )
        for layer, sequences in _LAYERS
    )


def main() -> None:
    """Measure, and write the table and the raw times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s between the nodes")
    parser.add_argument("--rounds", type=int, default=5, help="steps of a job that are timed")
    parser.add_argument("--budget", default="200s", help="of each profile")
    parser.add_argument(
        "--case", type=int, choices=range(len(_LAYERS)), help="only this one, counted from 0"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "layouts.md")
    given = parser.parse_args()
    chosen = cases() if given.case is None else cases()[given.case : given.case + 1]
    results = []
    for case in chosen:
        with tempfile.TemporaryDirectory(prefix="layouts-") as folder:
            results.append(
                run_case(
                    case, rate_mbit=given.rate, rounds=given.rounds, budget=given.budget,
                    folder=Path(folder), echo=sys.stderr,
                )
            )  # fmt: skip
        write_results(given.output.with_suffix(".json"), results)
        given.output.write_text(report(results), encoding="utf-8")
    print(given.output.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
