"""Write `profiles/v100-x256.toml`: PPMoE's cluster, from the figures in the paper's text.

    python -m benchmarks.ppmoe.v100

n ranks of a group, of which p on each node; y bytes of input on one rank, as in every profile.
"""

from collections.abc import Iterator
from pathlib import Path

PROFILE = Path("profiles/v100-x256.toml")

NUM_DEVICES = 256
DEVICES_PER_NODE = 8
FLOP_PER_SECOND = 125e12
INSIDE_BYTES_PER_SECOND = 300e9
BETWEEN_BYTES_PER_SECOND = 12.5e9
LAUNCH_SECONDS = 6.19e-5

_HEAD = f"""\
# PPMoE's cluster: nodes of eight V100 SXM2, joined by InfiniBand (PPMoE §3.2, Table 2). Made by
# `python -m benchmarks.ppmoe.v100` of the figures that the paper calculates with. They are peaks:
# absolute times are several times too short (its 0.3B model reaches a tenth of the arithmetic
# peak), and what layouts take relative to each other is what this profile is for. Nothing here
# was measured: a plan made from it is labelled "modelled".
schema = 1
name = "{PROFILE.stem}"
provenance = "modelled"
citation = "PPMoE, §3.2 and Eq. 2 to 5; start-up times: PipeMoE, Fig. 6a"

[machine]
kind = "cuda"
device = "NVIDIA Tesla V100 SXM2 32GB"
num_devices = {NUM_DEVICES}              # the largest cluster of Table 2
devices_per_node = {DEVICES_PER_NODE}           # §3.2: "SXM2 server with 8 V100"
memory_bytes = {32 * 2**30}     # the larger of the two V100: the paper does not say which

# §3.2: F = 125e12 FLOP/s, the peak of half precision; a multiply-accumulate is two of them. The
# start-up time is a kernel's launch in PipeMoE, Fig. 6a, on another GPU: PPMoE has none.
[[gemm]]
dtype = "float16"
alpha_seconds = {LAUNCH_SECONDS!r}
beta_seconds_per_mac = {2 / FLOP_PER_SECOND!r}
"""
_OPS = {
    "all_to_all": """\
# all_to_all: of the y bytes a rank keeps its own n-th; to its own node go p-1 n-ths at
# B = 300e9 B/s, to the others n-p at its eighth of the node's 12.5e9 B/s (§3.2). The slower of
# the two counts. Eq. 2 takes 12.5e9 B/s for each GPU but every peer after the other, which for
# 32 ranks is 2.5 times as long as this.""",
    "all_reduce": """\
# all_reduce: a ring moves 2·(n-1)/n·y over its slowest wire (Eq. 5 without the factor n by which
# it exceeds a ring). Inside a node the wire has B = 300e9 B/s (§3.2). Between nodes every ring
# crosses each node's 12.5e9 B/s once, and the 8/p groups of a node share them.""",
    "all_gather": """\
# all_gather: half of a ring's all_reduce; y is one rank's share, so that (n-1)·y arrive.""",
    "reduce_scatter": """\
# reduce_scatter: the other half, (n-1)/n·y.""",
    "send": """\
# send: y over the wire between neighbours; of two ranks on two nodes all eight of a node share
# its 12.5e9 B/s, of a longer chain of consecutive ranks the last one of a node has them alone.""",
}


def groups() -> Iterator[tuple[int, int]]:
    """Yield (ranks, ranks of them on each node) of every group that a layout can have."""
    size = 2
    while size <= NUM_DEVICES:
        per_node = min(size, DEVICES_PER_NODE)
        while per_node >= 1:
            if size * DEVICES_PER_NODE // per_node <= NUM_DEVICES:
                yield size, per_node
            per_node //= 2
        size *= 2


def seconds_per_byte(op: str, size: int, per_node: int) -> float:
    """Return β: the time of one input byte on one rank, as the file's comments explain it."""
    own_share = BETWEEN_BYTES_PER_SECOND / DEVICES_PER_NODE
    if op == "all_to_all":
        inside = (per_node - 1) / size / INSIDE_BYTES_PER_SECOND
        return max(inside, (size - per_node) / size / own_share)
    if per_node == size:
        wire = INSIDE_BYTES_PER_SECOND
    elif op == "send":
        wire = own_share if per_node == 1 else BETWEEN_BYTES_PER_SECOND
    else:
        wire = BETWEEN_BYTES_PER_SECOND * per_node / DEVICES_PER_NODE
    moved = {
        "all_reduce": 2 * (size - 1) / size,
        "all_gather": size - 1,
        "reduce_scatter": (size - 1) / size,
        "send": 1,
    }
    return moved[op] / wire


def text() -> str:
    """Return the profile file."""
    parts = [_HEAD]
    for op, why in _OPS.items():
        parts.append(why)
        for size, per_node in groups():
            if op == "send" and size > 2 and per_node < min(size, DEVICES_PER_NODE):  # noqa: PLR2004 - two neighbours
                continue
            parts.append(_line(op, size, per_node))
    return "\n".join(parts)


def _line(op: str, size: int, per_node: int) -> str:
    lines = [
        "[[collective]]",
        f'op = "{op}"',
        f"group_size = {size}",
    ]
    if per_node < min(size, DEVICES_PER_NODE):
        lines.append(f"num_nodes = {size // per_node}")
    lines += [
        f"alpha_seconds = {LAUNCH_SECONDS!r}",
        f"beta_seconds_per_byte = {seconds_per_byte(op, size, per_node):.6g}",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PROFILE.write_text(text(), encoding="utf-8")
    print(f"{PROFILE} is written")
