"""Install the layers we compare with, apart from what moetune needs.

They go to `.peers/`, which only the ranks of the lab have on their path: a benchmark's
dependency is none of moetune's. torch is not installed again, it is that of the environment.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from moetune.domain.errors import MoetuneError

_ROOT = Path(__file__).parents[2]
PEER = "deepspeed 0.19.8"
# DeepSpeed's other requirements (numpy, packaging, pydantic, tqdm, torch) come with moetune's.
_REQUIREMENTS = (
    PEER.replace(" ", "=="),
    "einops==0.8.2",
    "hjson==3.1.0",
    "msgpack==1.2.4",
    "ninja==1.13.2",
    "psutil==7.2.2",
    "py-cpuinfo==9.0.0",
)
# DeepSpeed compiles these extensions on first use, for minutes, while the other ranks wait.
_COMPILE = (
    "from deepspeed.comm.torch import build_shm_op; build_shm_op(); "
    "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
)


def ensure_peer(folder: Path = _ROOT / ".peers") -> Path:
    """Install DeepSpeed where it is missing, and return its folder.

    Raises:
        MoetuneError: it cannot be installed or does not import.
    """
    receipt = folder / "requirements.txt"
    wanted = "\n".join(_REQUIREMENTS)
    if receipt.is_file() and receipt.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / ".gitignore").write_text("*\n")
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # DeepSpeed's set-up imports torch, which an isolated build would download again.
    _run([*pip, "--no-build-isolation", "--target", str(folder), *_REQUIREMENTS], folder)
    _run(["-c", f"import deepspeed.moe.layer; {_COMPILE}"], folder)
    receipt.write_text(wanted)
    return folder


def peer_env(folder: Path) -> dict[str, str]:
    """Return the variables that ranks need to import the peers from the folder."""
    path = [str(folder), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
    }


def _run(arguments: list[str], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | peer_env(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = "\n  ".join(done.stderr.strip().splitlines()[-5:])
        raise MoetuneError(
            f"DeepSpeed could not be installed: {last}",
            "compare without it: python -m benchmarks.netlab --no-peer",
        )
