"""Facts of the reference machines that no csv file has, with their sources.

Sizes and rates are those of data sheets; rows between nodes are other people's measurements.
"""

from dataclasses import dataclass

from moetune.domain.cluster import CONTEXT_BYTES, DEVICE_MEMORY, HOST_MEMORY, NUM_NICS

GIB = 2**30
PCIE_4, PCIE_5 = 31.5e9, 63.0e9
"""Bytes per second of 16 lanes, one way."""
P4DE_HOST, P5_HOST, P6_HOST = 1152 * GIB, 2048 * GIB, 2048 * GIB
"""Memory of the hosts of eight GPUs that Amazon rents (pytorch/torchx,
torchx/specs/named_resources_aws.py); an H800's is taken to be an H100's."""
P6_B300_HOST = 4096 * GIB
"""Amazon's p6-b300.48xlarge, in its list of instance types."""
GB200_HOST, GB300_HOST = 900 * 10**9, 960 * GIB
"""Memory of a host of four: Azure's ND GB200 v6, and Google's A4X Max (NVIDIA/aicr#1985)."""
HALF_C2C, HALF_C2C_BOTH_WAYS = 210e9, 87e9
"""Between a Grace CPU and one of its two GPUs, one way, and each way while both are used.

225 GB/s are the half of NVLink-C2C, of which a GB300 reached 210. One GPU with a Grace of its own
got 175 and 172 GB/s both ways (stas00/ml-engineering, network: LPDDR5X binds): two have half."""
NVLINK_H100, NVLINK_H800 = 900e9, 400e9
FASTER_GEMMS = {"b300-x8": 1.05, "gb300-nvl72": 1.15}
"""Times that B300 and GB300 multiply matrices of bfloat16 as fast as B200 and GB200: the middle
over sizes of 4,096 and more, 1.04 to 1.06 and 1.12 to 1.19 in four of five collections of
aiconfigurator (gemm_perf.parquet of TensorRT-LLM, SGLang and vLLM)."""
NVFP4, NVFP4_ULTRA = 3.5, 3.7
"""Rates of large matmuls in NVFP4 over those of this table in bfloat16, without rounding: the best
of the same collections' kernels from 2 TFLOP on, 3.2 to 3.6 on B200 and GB200, 3.1 to 3.7 on B300
and GB300, of whose best matmuls in bfloat16 they are 2.7 to 3.1. Data sheets say 4 and 6."""
EIGHT_BITS_HOPPER, EIGHT_BITS = 1.75, 1.9
"""In 8 bits: the best kernels over the best in bfloat16 are 1.71 to 1.84 times as fast on H100 and
H200; on B200 to GB300 1.97 to 2.06 over this table and 1.68 to 1.83 over the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One machine.

    Args:
        device: as torch names it.
        gemm, nccl: the rows of the csv files that it takes; another machine's where it has none.
        nccl_version: of those rows.
        seen_gib: memory of a device as torch reports it, "a total capacity of 79.11 GiB": H100 in
            vllm-project/vllm#27508, B200 in pytorch/ao#4002, GB300 in pytorch/torchtitan#3659, the
            others in public out-of-memory messages of those devices.
        host_memory_bytes: of one host.
        hbm_bytes_per_second, host_bytes_per_second: of a device's memory, and between it and the
            host, one way.
        both_ways_bytes_per_second: of the latter each way while both are used; 0 for as much.
        nic_bytes_per_second: of a device's share of its node's network cards, one way.
        nvfp4_rate: dense, over that of bfloat16; 0 where the device has neither that nor mxfp8.
    """

    name: str
    device: str
    ranks: int
    gemm: str
    nccl: str
    nccl_version: str
    seen_gib: float
    host_memory_bytes: int
    hbm_bytes_per_second: float
    host_bytes_per_second: float
    nic_bytes_per_second: float
    both_ways_bytes_per_second: float = 0.0
    has_fp8: bool = True
    nvfp4_rate: float = 0.0

    @property
    def eight_bits_rate(self) -> float:
        """Rate of GEMMs in 8 bits over that of bfloat16."""
        return EIGHT_BITS if self.nvfp4_rate else EIGHT_BITS_HOPPER

    @property
    def rates(self) -> dict[str, float]:
        """Rates of GEMMs in narrow formats over that of bfloat16."""
        rates: dict[str, float] = {"fp8_rowwise": self.eight_bits_rate} if self.has_fp8 else {}
        return rates | (
            {"mxfp8": self.eight_bits_rate, "nvfp4": self.nvfp4_rate} if self.nvfp4_rate else {}
        )

    @property
    def usable_bytes(self) -> int:
        """What a process has of the memory beside its context."""
        return self.seen_bytes - CONTEXT_BYTES

    @property
    def seen_bytes(self) -> int:
        """What torch reports of a device's memory."""
        return int(self.seen_gib * GIB)

    @property
    def hardware(self) -> dict[str, str]:
        """Hardware facts of the fingerprint; a card for each GPU."""
        return {
            DEVICE_MEMORY: str(self.seen_bytes), NUM_NICS: str(self.ranks),
            HOST_MEMORY: str(self.host_memory_bytes),
        }  # fmt: skip


MACHINES = (
    Fact(
        name="a100-x8", device="NVIDIA A100-SXM4-80GB", ranks=8, gemm="A100-SXM4-80GB",
        nccl="a100_sxm", nccl_version="2.27.3", seen_gib=79.15, host_memory_bytes=P4DE_HOST,
        hbm_bytes_per_second=2.039e12, host_bytes_per_second=PCIE_4, nic_bytes_per_second=25e9,
        has_fp8=False,
    ),
    Fact(
        name="h100-x8", device="NVIDIA H100 80GB HBM3", ranks=8, gemm="H100-80GB-HBM3",
        nccl="h100_sxm", nccl_version="2.29.2", seen_gib=79.11, host_memory_bytes=P5_HOST,
        hbm_bytes_per_second=3.35e12, host_bytes_per_second=PCIE_5, nic_bytes_per_second=50e9,
    ),
    Fact(
        name="h800-x8", device="NVIDIA H800", ranks=8, gemm="H100-80GB-HBM3",
        nccl="h100_sxm", nccl_version="2.29.2", seen_gib=79.11, host_memory_bytes=P5_HOST,
        hbm_bytes_per_second=3.35e12, host_bytes_per_second=PCIE_5, nic_bytes_per_second=50e9,
    ),
    Fact(
        name="h200-x8", device="NVIDIA H200", ranks=8, gemm="H200",
        nccl="h200_sxm", nccl_version="2.29.2", seen_gib=139.8, host_memory_bytes=P5_HOST,
        hbm_bytes_per_second=4.8e12, host_bytes_per_second=PCIE_5, nic_bytes_per_second=50e9,
    ),
    Fact(
        name="b200-x8", device="NVIDIA B200", ranks=8, gemm="B200",
        nccl="b200_sxm", nccl_version="2.29.2", seen_gib=178.35, host_memory_bytes=P6_HOST,
        hbm_bytes_per_second=7.7e12, host_bytes_per_second=PCIE_5, nic_bytes_per_second=50e9,
        nvfp4_rate=NVFP4,
    ),
    Fact(
        name="b300-x8", device="NVIDIA B300 SXM6 AC", ranks=8, gemm="B200",
        nccl="b300_sxm", nccl_version="2.29.2", seen_gib=267.69, host_memory_bytes=P6_B300_HOST,
        hbm_bytes_per_second=8e12, host_bytes_per_second=PCIE_5, nic_bytes_per_second=100e9,
        nvfp4_rate=NVFP4_ULTRA,
    ),
    Fact(
        name="gb200-nvl72", device="NVIDIA GB200", ranks=72, gemm="GB200",
        nccl="gb200", nccl_version="2.29.2", seen_gib=184.31, host_memory_bytes=GB200_HOST,
        hbm_bytes_per_second=8e12, host_bytes_per_second=HALF_C2C,
        both_ways_bytes_per_second=HALF_C2C_BOTH_WAYS, nic_bytes_per_second=50e9,
        nvfp4_rate=NVFP4,
    ),
    Fact(
        name="gb300-nvl72", device="NVIDIA GB300", ranks=72, gemm="GB200",
        nccl="gb300", nccl_version="2.29.2", seen_gib=276.5, host_memory_bytes=GB300_HOST,
        hbm_bytes_per_second=8e12, host_bytes_per_second=HALF_C2C,
        both_ways_bytes_per_second=HALF_C2C_BOTH_WAYS, nic_bytes_per_second=100e9,
        nvfp4_rate=NVFP4_ULTRA,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyNodes:
    """All-to-all bus bandwidths between nodes of eight, in GB/s.

    Args:
        nic: GB/s of a device's share of the cards.
        at_64_mib, peak: at about 64 MiB a rank, and at the best size.
    """

    machine: str
    nodes: int
    nic: float
    at_64_mib: float
    peak: float


BETWEEN_NODES = tuple(
    ManyNodes(machine=machine, nodes=nodes, nic=nic, at_64_mib=at_64_mib, peak=peak)
    for machine, nodes, nic, at_64_mib, peak in (
        ("B300", 2, 100.0, 104.9, 179.6),
        ("B300", 4, 100.0, 94.0, 116.9),
        ("B300", 8, 100.0, 74.0, 103.2),
        ("B300", 16, 100.0, 73.8, 84.0),
        ("B300", 32, 100.0, 54.7, 74.4),
        ("H100", 4, 50.0, 45.1, 53.9),
        ("H100", 8, 50.0, 40.4, 51.1),
    )
)
"""EFA; awslabs/awsome-distributed-ai, ep-backend-comparison, RESULTS*.md; each measured once."""

DEEPEP_RATES = {16: (43e9, 43e9), 32: (58e9, 57e9), 64: (51e9, 50e9)}
"""DeepEP V1 on H800 (docs/legacy.md): bytes per second of one rank between nodes, by ranks, for
dispatch and combine."""
DEEPEP_V1_SMS = 24
