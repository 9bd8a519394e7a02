"""Train two models in every way on two ranks at 1 Gbit/s: about 30 minutes, as root."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.chunks.case import Case
from benchmarks.chunks.experiment import VARIANTS, run_case, usable, write_results
from benchmarks.chunks.report import report
from benchmarks.netlab.__main__ import describe_machine
from benchmarks.netlab.lab import check_supported
from benchmarks.netlab.peers import ensure_peer
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer

RESULTS = Path("docs/results")
_MIB = 2**20
CASES = (
    Case(
        name="dense, 30M parameters",
        transformer=Transformer(
            moe=LayerShape(d_model=512, d_hidden=2048, num_experts=1),
            num_layers=8, num_heads=8, length=128, vocab_size=4096, moe_every=0,
        ),
        sequences=4,
        chunk_bytes=13 * _MIB,
        places=4,
        limit_bytes=420 * _MIB,
    ),
    Case(
        name="experts, 38M parameters",
        transformer=Transformer(
            moe=LayerShape(d_model=384, d_hidden=1536, num_experts=8, top_k=1),
            num_layers=6, num_heads=6, length=128, vocab_size=4096,
        ),
        sequences=8,
        chunk_bytes=24 * _MIB,
        places=4,
        limit_bytes=560 * _MIB,
    ),
)  # fmt: skip


def main() -> None:
    """Measure, and write the table and the raw times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=1000.0, help="Mbit/s of each rank's link")
    parser.add_argument("--rounds", type=int, default=5, help="steps of a job that are timed")
    parser.add_argument("--budget", default="150s", help="of each profile")
    parser.add_argument("--case", type=int, help="only this one, counted from 0")
    parser.add_argument("--only", help="variants, separated by commas")
    parser.add_argument("--no-peer", action="store_true", help="without DeepSpeed")
    parser.add_argument("--output", type=Path, default=RESULTS / "chunks.md")
    given = parser.parse_args()
    check_supported()
    load = os.getloadavg()[0]
    peer = None if given.no_peer else ensure_peer()
    wanted = given.only.split(",") if given.only else VARIANTS
    results = []
    for case in CASES if given.case is None else CASES[given.case : given.case + 1]:
        # DeepSpeed cannot shard modules that return what has no `__dict__`, as gates do.
        variants = usable(wanted, peer=peer if case.transformer.is_dense else None)
        with tempfile.TemporaryDirectory(prefix="chunks-") as folder:
            results.append(
                run_case(
                    case, variants, rate_mbit=given.rate, rounds=given.rounds, peer=peer,
                    budget=given.budget, folder=Path(folder), echo=sys.stderr,
                )
            )  # fmt: skip
        write_results(given.output.with_suffix(".json"), results)
        machine = describe_machine(peer=peer is not None, load=load)
        given.output.write_text(report(results, machine), encoding="utf-8")
    print(given.output.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
