"""A script on several ranks as `torchrun` starts it, forked from a process that has torch already.

Three processes that import torch take longer than most scripts of the pages. What `torchrun` gives
a script is its environment, its arguments and the name `__main__`.
"""

import os
import runpy
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path

from tests.ports import free_port
from tests.ranks import warm_context

_GRACE_SECONDS = 5.0
"""For ranks that meet the failure of another, to say so."""


def launch(
    words: Sequence[str], *, environ: Mapping[str, str], timeout_seconds: float
) -> tuple[int, str]:
    """Run `torchrun --nproc-per-node N SCRIPT …`; return the worst exit code and the output.

    A rank that fails ends the others, as under torchrun.

    Raises:
        TimeoutError: a rank is not done in time; all ranks are ended.
    """
    program, flag, number, script, *arguments = words
    assert (program, flag) == ("torchrun", "--nproc-per-node"), words
    port = str(free_port())
    output = Path(f"{script}.output").resolve()
    output.touch()
    ranks = [
        warm_context().Process(
            target=_rank,
            args=(Path(script).resolve(), arguments, output, {
                **environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": number,
                "LOCAL_WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }),
        )
        for rank in range(int(number))
    ]  # fmt: skip
    deadline = time.monotonic() + timeout_seconds
    for rank in ranks:
        rank.start()
    try:
        while running := [rank.sentinel for rank in ranks if rank.is_alive()]:
            has_failed = any(rank.exitcode for rank in ranks)
            patience = _GRACE_SECONDS if has_failed else deadline - time.monotonic()
            if not connection.wait(running, patience):
                break
        codes = [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    if None in codes and not any(codes):
        raise TimeoutError(f"{script}: a rank does not end:\n{output.read_text()}")
    return max(abs(code or 0) for code in codes), output.read_text(encoding="utf-8")


def _rank(script: Path, arguments: Sequence[str], output: Path, environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(script.parent)
    sys.argv[:] = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - what a script raises is its output, as under torchrun
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
