"""Traces: what kernels of each kind take, and what of exchanges is hidden, as a grid counts."""

import gzip
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetune.domain.errors import InputError
from moetune.logs.kineto import read_trace

KERNELS = {
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128>": "matrix products",
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NNT": "matrix products",
    "void flash::flash_fwd_kernel<cutlass::bfloat16_t>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": "attention",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "exchanges of tokens, exposed",
    "void deep_ep::intranode::dispatch<8, 768>": "exchanges of tokens, exposed",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "other collectives, exposed",
    "void at::native::vectorized_elementwise_kernel<4>": "other kernels",
    "Memcpy DtoD (Device -> Device)": "copies",
}
ORDER = ("matrix products", "attention", "other kernels", "copies", "exchanges of tokens, exposed",
         "other collectives, exposed")  # fmt: skip


def event(name: str, begin: float, end: float, kind: str = "kernel") -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "ts": begin,
        "dur": end - begin,
        "args": {"a": [1]},
    }


def trace(path: Path, events: list[dict[str, Any]], *, indent: int | None = 2) -> Path:
    text = json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "a"}, indent=indent)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize(("seed", "name"), [(1, "trace.json"), (2, "trace.json.gz")])
def test_parts_are_those_of_a_grid_of_microseconds(tmp_path: Path, seed: int, name: str) -> None:
    chance, length, steps = random.Random(seed), 40_000, 4
    marks = np.linspace(1e6, 1e6 + length, steps + 1)
    events = [
        event(f"ProfilerStep#{step}", marks[step], marks[step + 1], "user_annotation")
        for step in range(steps)
    ]
    on = defaultdict[str, Any](lambda: np.zeros(length, bool))
    for _ in range(3000):
        kernel = chance.choice([*KERNELS])
        begin = chance.randrange(-50, length)
        end = begin + chance.randrange(1, 60)
        kind = "gpu_memcpy" if kernel.startswith("Memcpy") else "kernel"
        events.append(event(kernel, 1e6 + begin, 1e6 + end, kind))
        on[KERNELS[kernel]][max(0, begin) : max(0, end)] = True
    events += [{"ph": "M", "name": "process_name"}, event("aten::mm", 1e6, 1e6 + 9, "cpu_op")]
    chance.shuffle(events)
    measured = read_trace(trace(tmp_path / name, events))
    assert (measured.num_steps, measured.is_marked) == (steps, True)
    assert measured.seconds == pytest.approx(1e-6 * length / steps)
    covered, scale = np.zeros(length, bool), 1e-6 / steps
    for kind in ORDER:
        assert measured.busy[kind] == pytest.approx(scale * on[kind].sum())  # type: ignore[index] # a kind
        assert measured.exposed[kind] == pytest.approx(scale * (on[kind] & ~covered).sum())  # type: ignore[index] # a kind
        covered |= on[kind]
    assert measured.idle == pytest.approx(scale * (~covered).sum())
    assert sum(measured.exposed.values()) + measured.idle == pytest.approx(measured.seconds)


def test_a_trace_without_marks_is_taken_for_a_step_and_what_is_none_is_refused(
    tmp_path: Path,
) -> None:
    kernel = next(iter(KERNELS))
    lone = trace(
        tmp_path / "lone.json", [event(kernel, 5.0, 25.0), event(kernel, 35.0, 45.0)], indent=None
    )
    measured = read_trace(lone)
    assert (measured.num_steps, measured.is_marked) == (1, False)
    assert measured.seconds == pytest.approx(4e-5)
    assert measured.idle == pytest.approx(1e-5)
    (tmp_path / "cut.json").write_bytes(lone.read_bytes()[:-60])
    (tmp_path / "bad.json.gz").write_bytes(b"no gzip")
    (tmp_path / "none.json").write_text("{}")
    trace(tmp_path / "cpu.json", [event("aten::mm", 0.0, 9.0, "cpu_op")])
    for name, what in (("cut.json", "no whole trace"), ("bad.json.gz", "cannot be read"),
                       ("none.json", "no traceEvents"), ("cpu.json", "no kernel")):  # fmt: skip
        with pytest.raises(InputError, match=what):
            read_trace(tmp_path / name)
