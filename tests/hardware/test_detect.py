"""Detection on this machine, and on the /proc and /sys of machines that are not here."""

import socket
from pathlib import Path

import pytest

from moetune.domain.errors import InputError
from moetune.hardware import detect
from moetune.hardware.detect import UNKNOWN, cpu_flags, cpu_model, memory_bytes, num_numa_nodes

GIB = 2**30


def make_root(root: Path, *, cgroup: str = "", limits: dict[str, str] | None = None) -> Path:
    """Write the files of a node with 64 GiB, one limit for each control group folder."""
    files = {
        "proc/meminfo": f"MemTotal:       {64 * 2**20} kB\nMemFree:  1 kB\n",
        "proc/cpuinfo": "model name\t: Imaginary CPU 9000\nflags : fpu avx2 amx_bf16\n",
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{path}": text for path, text in (limits or {}).items()},
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    for node in range(2):
        (root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    return root


def test_facts_of_the_processor_come_from_the_kernels_files(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    assert cpu_model(root) == "Imaginary CPU 9000"
    assert cpu_flags(root) == "avx2 amx_bf16"
    assert num_numa_nodes(root) == 2


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("", {}, 64),
        ("0::/job/7\n", {"job/7/memory.max": f"{8 * GIB}\n"}, 8),
        ("0::/job/7\n", {"job/7/memory.max": "max\n", "job/memory.max": f"{16 * GIB}\n"}, 16),
        ("0::/job/7\n", {"job/7/memory.max": f"{32 * GIB}", "memory.max": f"{4 * GIB}"}, 4),
        ("4:memory:/pod\n0::/\n", {"memory/pod/memory.limit_in_bytes": f"{2 * GIB}\n"}, 2),
        ("4:cpu,memory:/pod\n", {"memory/memory.limit_in_bytes": f"{3 * GIB}\n"}, 3),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 64),
    ],
)
def test_memory_is_the_smallest_limit_on_the_way_up(
    tmp_path: Path, cgroup: str, limits: dict[str, str], expected: int
) -> None:
    assert memory_bytes(make_root(tmp_path, cgroup=cgroup, limits=limits)) == expected * GIB


def test_memory_is_shared_by_the_ranks_of_a_node(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    machine = detect(num_ranks=8, ranks_per_node=4, root=root).machine
    assert (machine.num_devices, machine.devices_per_node) == (8, 4)
    assert machine.memory_bytes == 16 * GIB


def test_what_cannot_be_read_is_unknown_with_a_note(tmp_path: Path) -> None:
    cluster = detect(root=tmp_path)
    hardware = cluster.fingerprint.hardware
    for name in ("cpu", "cpu_flags", "numa_nodes", "memory_bytes"):
        assert hardware[name] == UNKNOWN
        assert any(note.startswith(f"{name} could not be read") for note in cluster.notes)


def test_this_machine_is_read_without_a_hole() -> None:
    cluster = detect(num_ranks=2)
    assert cluster.machine.kind in {"cpu", "cuda"}
    assert cluster.machine.num_devices == 2
    for name in ("torch", "python", "moetune", "backend", "threads_per_rank"):
        assert cluster.fingerprint.software[name] != UNKNOWN
    assert int(cluster.fingerprint.hardware["cores"]) >= 1


def test_threads_are_each_ranks_share_of_the_cores_unless_given() -> None:
    many = detect(num_ranks=10_000).fingerprint.software
    software = detect(num_ranks=2, threads_per_rank=7).fingerprint.software
    assert (many["threads_per_rank"], software["threads_per_rank"]) == ("1", "7")


def test_hardware_facts_name_no_node() -> None:
    facts = " ".join(detect().fingerprint.hardware.values())
    identities = [socket.gethostname()]
    for file in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        path = Path(file)
        identities += [path.read_text().strip()] if path.exists() else []
    for identity in filter(None, identities):
        assert identity not in facts


def test_only_allowed_variables_become_facts_and_only_of_the_software() -> None:
    plain = detect()
    changed = detect(
        environment={
            "NCCL_ALGO": "Ring",
            "OMP_NUM_THREADS": "1",
            "TORCH_HOME": "/home/someone",
            "NCCL_DEBUG_FILE": "/tmp/node7",  # noqa: S108 - a value, not a path that is used
            "CUDA_VISIBLE_DEVICES": "3",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
    )
    added = changed.fingerprint.software.keys() - plain.fingerprint.software.keys()
    assert added == {"env.NCCL_ALGO", "env.OMP_NUM_THREADS"}
    assert changed.fingerprint.hardware_id == plain.fingerprint.hardware_id
    assert changed.fingerprint.software_id != plain.fingerprint.software_id


@pytest.mark.parametrize(("num_ranks", "per_node"), [(3, 2), (0, None), (4, -1)])
def test_ranks_that_make_no_whole_nodes_are_refused(num_ranks: int, per_node: int | None) -> None:
    with pytest.raises(InputError, match="do not divide into nodes"):
        detect(num_ranks=num_ranks, ranks_per_node=per_node)
