"""Train one Qwen3-MoE in every way on two ranks of the lab: about 20 minutes, as root.

python -m benchmarks.rivals            writes docs/results/rivals.md; needs 16 GiB of memory
python -m benchmarks.rivals --quick    a small model, one link; writes nothing without --output
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.netlab.__main__ import describe_machine
from benchmarks.netlab.lab import check_supported
from benchmarks.rivals.case import SEED, Case, case_of
from benchmarks.rivals.experiment import Experiment
from benchmarks.rivals.install import NO_TUTEL, rivals_env, versions_of_rivals
from benchmarks.rivals.report import report
from moetune.domain.document import encode
from moetune.domain.errors import MoetuneError
from moetune.workflows.files import write_text

_RESULT = Path(__file__).parents[2] / "docs/results/rivals.md"
_RIVALS = ("transformers", "transformers-ddp", "deepspeed", "tutel", "fsdp2", "ddp")


def main() -> int:
    """Measure, print the report and write it; return the exit code."""
    given, load = _arguments(), os.getloadavg()[0]
    try:
        check_supported()
        env, has_tutel = rivals_env(given.rivals, tutel=given.tutel)
        rivals = tuple(one for one in given.rivals if has_tutel or one != "tutel")
        with tempfile.TemporaryDirectory(prefix="rivals-") as folder:
            result = Experiment(
                case=_case(given), rates_mbit=tuple(given.rates), rivals=rivals,
                rounds=given.rounds, budget=given.budget, env=env, folder=Path(folder),
                echo=sys.stderr,
            ).run()  # fmt: skip
    except MoetuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    machine = describe_machine(peer=False, load=load)
    software = ", ".join(versions_of_rivals(rivals))
    text = report(
        result, machine=f"{machine} · {software} · seed {SEED}", note="" if has_tutel else NO_TUTEL
    )
    print(text)
    output = given.output or (None if given.quick else _RESULT)
    if output is not None:
        write_text(output, text)
        write_text(output.with_suffix(".json"), json.dumps(encode(result), indent=1) + "\n")
    return 0


def _case(given: argparse.Namespace) -> Case:
    small = {"num_layers": 2, "d_hidden": 128, "length": 64, "sequences": 4}
    sizes = {
        "num_layers": given.layers, "d_hidden": given.d_hidden, "length": given.length,
        "sequences": given.sequences,
    }  # fmt: skip
    return case_of(**(small if given.quick else sizes))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, few rounds")
    parser.add_argument("--rates", type=float, nargs="+", help="Mbit/s; default 200 and 500")
    parser.add_argument("--rivals", nargs="+", default=_RIVALS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--d-hidden", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=4, help="of one rank's step")
    parser.add_argument("--rounds", type=int, help="default 3")
    parser.add_argument("--budget", help="of each profile; default 60s")
    parser.add_argument("--tutel", type=Path, help="a checkout of Tutel to build, once")
    parser.add_argument("--output", type=Path, help="the report; default docs/results/rivals.md")
    given = parser.parse_args()
    given.rates = given.rates or ([500.0] if given.quick else [200.0, 500.0])
    given.rounds = given.rounds or (2 if given.quick else 3)
    given.budget = given.budget or ("15s" if given.quick else "60s")
    return given


if __name__ == "__main__":
    sys.exit(main())
