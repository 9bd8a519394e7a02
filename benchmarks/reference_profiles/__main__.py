"""Write the reference profiles from a folder of csv files, and print what they miss.

    python -m benchmarks.reference_profiles FOLDER

FOLDER has `gemm_bf16.csv`, `collectives.csv` and `deepep_h100_ep8.csv`; the sources are in the
profiles.
"""

import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.reference_profiles import network
from benchmarks.reference_profiles.facts import MACHINES, Fact
from benchmarks.reference_profiles.memory_bound import rows_lines
from benchmarks.reference_profiles.tables import (
    Kept,
    collective_tables,
    dispatcher_tables,
    gemm_tables,
    machine_of,
)
from moetune.app.files import profile_to_toml
from moetune.domain.cluster import Fingerprint
from moetune.domain.profile import CopyLine, Profile, RowsLine

PROFILES = Path("profiles")
ADAM_BYTES = 30
"""Read: gradient, master and both moments in float32; written: the last three and the bfloat16."""
_HEAD = """\
# Made by `python -m benchmarks.reference_profiles FOLDER` from other people's measurements.
# Every table says whether its times are published or modelled, and from where or by which rule;
# copies and Adam are rates of data sheets. Other memory-bound operations are lines that moetune
# measured on one H100, by the rate of the device's memory. A plan made from it is labelled
# "modelled". docs/decisions/machines.md#0072 and 0130 have the rules' errors.
"""


def profile_of(folder: Path, fact: Fact, numbers: network.Numbers) -> tuple[Profile, list[Kept]]:
    """Return a machine's profile, and how well its points predict those left out."""
    gemms, of_gemms = gemm_tables(folder, fact)
    collectives, of_collectives = collective_tables(folder, fact)
    dispatchers, of_dispatchers = dispatcher_tables(folder, fact)
    launch = min(seconds for *_, seconds in gemms[0].points)
    profile = Profile(
        name=fact.name,
        provenance="published",
        citation="aiconfigurator (Apache-2.0) and others, named at each table",
        machine=machine_of(fact),
        copy=tuple(_copies(fact, launch)),
        rows=(
            RowsLine(
                op="adam",
                dtype="bfloat16",
                alpha_seconds=launch,
                beta_seconds_per_element=float(f"{ADAM_BYTES / fact.hbm_bytes_per_second:.4g}"),
            ),
            *rows_lines(fact.hbm_bytes_per_second),
        ),
        fingerprint=Fingerprint(hardware=fact.hardware),
        tables=(*gemms, *collectives, *dispatchers),
        network=replace(
            network.network_of(fact.nic_bytes_per_second, numbers),
            startup_seconds=network.INFINIBAND_STARTUP,
        ),
    )
    return profile, [*of_gemms, *of_collectives, *of_dispatchers]


def _copies(fact: Fact, launch: float) -> list[CopyLine]:
    one_way = fact.host_bytes_per_second
    rates = {False: one_way, True: fact.both_ways_bytes_per_second or one_way}
    return [
        CopyLine(
            direction=direction,
            pinned=True,
            both_ways=both_ways,
            alpha_seconds=launch,
            beta_seconds_per_byte=float(f"{1 / rates[both_ways]:.4g}"),
        )
        for direction in ("h2d", "d2h")
        for both_ways in (False, True)
    ]


def main(folder: Path) -> None:
    """Write all profiles and print their errors."""
    numbers = network.fitted()
    print("machine  operation  points  kept  worst  median")
    for fact in MACHINES:
        profile, report = profile_of(folder, fact, numbers)
        text = _HEAD + profile_to_toml(profile)
        (PROFILES / f"{fact.name}.toml").write_text(text, encoding="utf-8")
        for kept in report:
            print(
                f"{fact.name}  {kept.operation}  {kept.num_points}  {kept.num_kept}  "
                f"{kept.worst:.1%}  {kept.median:.1%}"
            )
        print(f"{fact.name}.toml has {len(text):,} bytes")
    _print_network(numbers)


def _print_network(numbers: network.Numbers) -> None:
    print(f"efficiency, loss per node, start-up, start-up per node: {numbers}")
    print("machine  nodes  64 MiB  rule  left out  peak  rule  left out")
    pairs = zip(network.errors(numbers), network.left_out(), strict=True)
    for (row, small, large), (_, small_left_out, large_left_out) in pairs:
        print(
            f"{row.machine}  {row.nodes}"
            f"  {row.at_64_mib}  {_with_error(small, row.at_64_mib)}"
            f"  {_with_error(small_left_out, row.at_64_mib)}"
            f"  {row.peak}  {_with_error(large, row.peak)}  {_with_error(large_left_out, row.peak)}"
        )


def _with_error(value: float, published: float) -> str:
    return f"{value:.1f} ({value / published - 1:+.1%})"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
