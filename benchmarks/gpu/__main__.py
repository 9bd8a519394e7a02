"""`make gpu`: every figure that needs a GPU, in under eight minutes, without network or database.

    python -m benchmarks.gpu               # all parts; docs/results/gpu.md and profiles/NAME.toml
    python -m benchmarks.gpu --estimate    # the time of each part, and nothing else
    python -m benchmarks.gpu --seconds 240 # less of it, on a machine that is lent for minutes
    python -m benchmarks.gpu --dry-run     # every path of it on a CPU, in seconds

Each part is a process that writes its rows as they come. One that fails, or takes twice its
estimate, is named on the page, and the others go on; the exit status is then 1, at the end.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.page import page
from benchmarks.gpu.parts import PARTS, Outcome, run_part, run_process
from benchmarks.gpu.profiled import FILE
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.scale import LIMIT_SECONDS, Scale, dry_scale, gpu_scale


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and write the page; return the exit status."""
    options = _options(arguments)
    if options.estimate:
        return _estimate(gpu_scale(options.seconds), options.seconds)
    is_dry = options.dry_run
    if not (is_dry or torch.cuda.is_available()):
        print("no GPU here; every path of it on a CPU:  python -m benchmarks.gpu --dry-run")
        return 2
    scale = dry_scale() if is_dry else gpu_scale(options.seconds)
    if is_dry:  # threads that wait for each other take longer than such sizes
        torch.set_num_threads(1)
    if options.part:
        PARTS[options.part](scale, options.folder)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch) / ("dry-run" if is_dry else _slug())
        outcomes: list[Outcome] = []
        text = ""
        for part in PARTS:
            Rows(folder, part).begin()
            outcomes.append(_run(part, scale, folder, options))
            text = page(folder, outcomes, machine=_machine())
            _write(text, folder, options.output, is_dry=is_dry)
    print(text)
    return int(any(outcome.failure for outcome in outcomes))


def _run(part: str, scale: Scale, folder: Path, options: argparse.Namespace) -> Outcome:
    if options.dry_run:  # in this process: starting six of them takes longer than all parts
        return run_part(part, scale, folder)
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--folder", str(folder)]
    command += ["--seconds", str(options.seconds)]
    print(part, file=sys.stderr, flush=True)
    return run_process(part, command, scale.estimates()[part])


def _write(text: str, folder: Path, output: Path | None, *, is_dry: bool) -> None:
    """Write the page and the profile behind each part: what comes later may not end."""
    if is_dry and output is None:
        return
    results = output or Path("docs/results")
    profiles = output or Path("profiles")
    for each in (results, profiles):
        each.mkdir(parents=True, exist_ok=True)
    (results / "gpu.md").write_text(text, encoding="utf-8")
    if (folder / FILE).exists():
        shutil.copyfile(folder / FILE, profiles / f"{folder.name}.toml")


def _estimate(scale: Scale, limit_seconds: float) -> int:
    estimates = scale.estimates()
    for part, seconds in estimates.items():
        print(f"{part:8} {seconds:4.0f} s")
    total = sum(estimates.values())
    print(f"{'all':8} {total:4.0f} s of {limit_seconds:.0f} s")
    return int(total > limit_seconds)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, help="folder for the page and the profile")
    parser.add_argument("--folder", type=Path, help="folder for the rows; default, a scratch one")
    parser.add_argument(
        "--seconds", type=float, default=LIMIT_SECONDS, help="of all parts; default: %(default)s"
    )
    parser.add_argument("--part", choices=list(PARTS), help="one part, in this process")
    parser.add_argument("--estimate", action="store_true", help="print the time of each part")
    parser.add_argument("--dry-run", action="store_true", help="small sizes on a CPU")
    return parser.parse_args(arguments)


def _slug() -> str:
    return torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")


def _machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "A CPU: no figures"
    return f"{device}, torch {torch.__version__}. By `make gpu`."


if __name__ == "__main__":
    sys.exit(main())
