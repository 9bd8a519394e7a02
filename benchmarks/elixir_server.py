"""Write `profiles/a100-x4.toml`: the server of Elixir's experiments, from its parts' data sheets.

    python -m benchmarks.elixir_server

n ranks of a group; y bytes of input on one rank, as in every profile.
"""

from pathlib import Path

PROFILE = Path("profiles/a100-x4.toml")

NUM_DEVICES = 4
FLOP_PER_SECOND = 312e12
DEVICE_BYTES_PER_SECOND = 1935e9
HOST_BYTES_PER_SECOND = 2 * 8 * 25.6e9
PCIE_BYTES_PER_SECOND = 16e9 * 16 * 128 / 130 / 8
LAUNCH_SECONDS = 6.19e-5
ADAM_BYTES = 30
"""Read: gradient, master and both moments in float32; written: the last three and the bfloat16."""

_HEAD = f"""\
# The server of Elixir's experiments: A100 80GB PCIe, EPYC 7543, 500 GB of memory.
# The paper gives no speeds; these are peaks from the parts' data sheets, which real jobs stay
# below. Made by `python -m benchmarks.elixir_server`. Nothing here was measured: a plan made from
# it is labelled "modelled".
schema = 1
name = "{PROFILE.stem}"
provenance = "modelled"
citation = "Elixir, Experiments; data sheets of A100 PCIe, EPYC 7543; start-up: PipeMoE, Fig. 6a"

[machine]
kind = "cuda"
device = "NVIDIA A100 80GB PCIe"
num_devices = {NUM_DEVICES}                # the paper does not say how many the server has
devices_per_node = {NUM_DEVICES}
memory_bytes = {80 * 2**30}     # the paper lets Elixir use 40 GB of it: --memory-limit 40GiB

[fingerprint.hardware]
host_memory_bytes = "{500 * 10**9}"

# 312e12 FLOP/s in bfloat16, the peak of dense tensor cores; a multiply-accumulate is two of them.
# The start-up time is a kernel's launch in PipeMoE, Fig. 6a, on another GPU: Elixir has none.
[[gemm]]
dtype = "bfloat16"
alpha_seconds = {LAUNCH_SECONDS!r}
beta_seconds_per_mac = {2 / FLOP_PER_SECOND:.6g}

# A step of Adam moves {ADAM_BYTES} bytes a parameter: on the device at 1,935 GB/s, on the host
# at 2 x 8 channels of DDR4-3200 (25.6 GB/s each).
[[rows]]
op = "adam"
dtype = "bfloat16"
alpha_seconds = {LAUNCH_SECONDS!r}
beta_seconds_per_element = {ADAM_BYTES / DEVICE_BYTES_PER_SECOND:.6g}

[[rows]]
op = "host_adam"
dtype = "bfloat16"
alpha_seconds = {LAUNCH_SECONDS!r}
beta_seconds_per_element = {ADAM_BYTES / HOST_BYTES_PER_SECOND:.6g}

# PCIe 4.0, 16 lanes: 31.5 GB/s each way, at the same time.
"""
_WIRE = "# Collectives cross the same wires: a ring, or every rank's share to every other."


def moved(op: str, size: int) -> float:
    """Return how many of a rank's input bytes cross its wire one way."""
    return {
        "all_to_all": (size - 1) / size,
        "all_reduce": 2 * (size - 1) / size,
        "all_gather": size - 1,
        "reduce_scatter": (size - 1) / size,
        "send": 1,
    }[op]


def text() -> str:
    """Return the profile file."""
    parts = [_HEAD + "\n".join(_copies()), _WIRE]
    for op in ("all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send"):
        for size in (2, 4):
            beta = moved(op, size) / PCIE_BYTES_PER_SECOND
            parts.append(
                f'[[collective]]\nop = "{op}"\ngroup_size = {size}\n'
                f"alpha_seconds = {LAUNCH_SECONDS!r}\nbeta_seconds_per_byte = {beta:.6g}\n"
            )
    return "\n".join(parts)


def _copies() -> list[str]:
    return [
        f'[[copy]]\ndirection = "{direction}"\npinned = true\n'
        f"alpha_seconds = {LAUNCH_SECONDS!r}\n"
        f"beta_seconds_per_byte = {1 / PCIE_BYTES_PER_SECOND:.6g}\n"
        + ("both_ways = true\n" if both_ways else "")
        for direction in ("h2d", "d2h")
        for both_ways in (False, True)
    ]


if __name__ == "__main__":
    PROFILE.write_text(text(), encoding="utf-8")
    print(f"{PROFILE} is written")
