"""The other libraries, which only the lab's ranks have on their path."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.netlab.peers import PEER, ensure_peer, peer_env
from moetune.domain.errors import MoetuneError

_TUTEL = "from_source"
_RECEIPT = "built"
NO_TUTEL = (
    "Tutel is in no package index and is not in this table: "
    "`git clone https://github.com/microsoft/Tutel` and `--tutel Tutel` put it in."
)


def rivals_env(wanted: Sequence[str], *, tutel: Path | None) -> tuple[Mapping[str, str], bool]:
    """Install the wanted ones of DeepSpeed, and Tutel from a checkout, and return ranks' variables.

    Args:
        wanted: names in `ranks`.
        tutel: checkout to build; None takes what an earlier run has built.

    Returns:
        The variables, and whether Tutel is there.

    Raises:
        MoetuneError: one cannot be installed.
    """
    if not {"deepspeed", "tutel"} & set(wanted):
        return {}, False
    folder = ensure_peer()
    site = folder / _TUTEL
    if tutel is not None and not (site / _RECEIPT).is_file():
        _build(tutel, site)
    env = peer_env(folder)
    is_there = (site / _RECEIPT).is_file()
    if is_there:
        env["PYTHONPATH"] = f"{env['PYTHONPATH']}{os.pathsep}{site}"
    return env, is_there


def _build(source: Path, site: Path) -> None:
    shutil.rmtree(site, ignore_errors=True)
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [sys.executable, *pip, "--no-build-isolation", "--target", str(site), str(source)],
        env=os.environ | {"NO_CUDA": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = "\n  ".join(done.stderr.strip().splitlines()[-5:])
        raise MoetuneError(f"Tutel could not be built: {last}", "leave --tutel out")
    (site / _RECEIPT).touch()


def versions_of_rivals(wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the names and versions of what is compared with."""
    from importlib.metadata import version

    deepspeed = (PEER,) if "deepspeed" in wanted else ()
    tutel = ("Tutel 0.4 from source",) if "tutel" in wanted else ()
    return (f"transformers {version('transformers')}", *deepspeed, *tutel)
