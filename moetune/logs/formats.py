"""Readers of each runtime's log lines.

Sources: megatron/training/training.py and megatron/core/timers.py (Megatron-Core 0.16 to 0.19),
megatron/bridge/training/utils/train_utils.py (Megatron-Bridge), nemo/utils/callbacks (NeMo 2),
torchtitan/components/metrics.py, deepspeed/utils/timer.py and runtime/pipe/engine.py,
transformers/trainer.py, tqdm/std.py, and ms-swift's progress_callback.py and megatron/trainers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Literal

from moetune.logs.lines import Line

LogFormat = Literal["megatron", "torchtitan", "deepspeed", "transformers"]
LABELS: Mapping[LogFormat, str] = MappingProxyType({
    "megatron": "Megatron's", "torchtitan": "torchtitan's", "deepspeed": "DeepSpeed's",
    "transformers": "transformers' Trainer's",
})  # fmt: skip
MemoryScope = Literal["allocated", "reserved", "device"]
_NUMBER = r"[\"']?([-+]?(?:[\d,]*\.?\d+(?:[eE][-+]?\d+)?|nan|inf))"
_GIB, _MIB, _GB = 2.0**30, 2.0**20, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The values that a log line reports.

    Args:
        step: number of the step; None if the line belongs to no step.
        seconds: time of the step.
        tokens, samples: tokens per second and device, and samples per second of all devices.
        tflops: TFLOP/s per device, as the runtime counts them.
        batch: global batch of the step, in sequences.
        memory: peak bytes by `MemoryScope`.
        timers: seconds by the runtime's name of the timer.
        sizes: sizes of the job by name, such as `world_size` and `d_model`.
        begins: whether a run starts at this line.
        bar: number of steps of a progress bar; 0 for any other line.
        is_mean: whether the time or the rate is the mean since the run started.
    """

    line: int
    format: LogFormat
    step: int | None = None
    seconds: float | None = None
    tokens: float | None = None
    samples: float | None = None
    tflops: float | None = None
    batch: int | None = None
    memory: Mapping[MemoryScope, float] = field(default_factory=dict)
    timers: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    begins: bool = False
    bar: int = 0
    is_mean: bool = False

    @property
    def is_timed(self) -> bool:
        """Whether the line has a step's time or rate."""
        return any(value is not None for value in (self.seconds, self.tokens, self.samples))


@cache
def _number_behind(key: str) -> re.Pattern[str]:
    """Return the pattern that matches a key and the number after it."""
    return re.compile(key + r"\s*" + _NUMBER)


def _of(text: str, key: str) -> float | None:
    """Return the number after `key`, a regular expression; None if it does not match."""
    match = _number_behind(key).search(text)
    return None if match is None else _number(match[1])


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _count(text: str, key: str) -> int | None:
    value = _of(text, key)
    return int(value) if value is not None and value.is_integer() else None


_Values = dict[str, Any]
"""Fields of an `Entry` except its line; `format` only where it differs from that of `READERS`."""
_ITERATION = re.compile(
    r"iteration[ =]+(\d+).*?elapsed[ _]time[ _]per[ _]iteration[ _]?\(?(?:ms)?\)?\s*[:=]\s*"
    rf"{_NUMBER}(?:.*?(?:throughput per GPU \(TFLOP/s/GPU\)|flops per GPU|TFLOPs):\s*{_NUMBER})?"
)


def _iteration(text: str) -> _Values | None:
    """Read "iteration 10/ 100 | … | elapsed time per iteration (ms): 1234.5 | …"."""
    match = _ITERATION.search(text)
    if match is None:
        return None
    reserved = _of(text, r"memory\(GiB\):")  # of ms-swift
    return {
        "step": int(match[1]), "seconds": _number(match[2]) / 1e3,
        "tflops": _number(match[3]) if match[3] else None,
        "batch": _count(text, "global batch size:"),
        "memory": {} if reserved is None else {"reserved": reserved * _GIB},
    }  # fmt: skip


def _nemo_step(text: str) -> _Values | None:
    """Read "iteration 3/99 | … | global_step: 3 | … | train_step_timing in s: 12.4 | …"."""
    seconds = _of(text, r"train_step_timing in s['\"]?[:=]")
    if seconds is None:
        return None
    return {
        "step": _count(text, r"\bglobal_step['\"]?[:=]"), "seconds": seconds,
        "tflops": _of(text, "TFLOPS_per_GPU[:=]"), "batch": _count(text, "global_batch_size[:=]"),
    }  # fmt: skip


def _bridge_step(text: str) -> _Values | None:
    """Read "Step Time : 12.3s GPU utilization: 400.1MODEL_TFLOP/s/GPU", without a step number."""
    return {"tflops": _of(text, "GPU utilization:") or None}


def _megatron_memory(text: str) -> _Values | None:
    """Read "memory (MB) | allocated: … | max reserved: …", and Bridge's with decimal gigabytes."""
    memory: dict[MemoryScope, float] = {}
    for scope in ("allocated", "reserved"):
        for key, unit in ((f"max {scope}:", _MIB), (f"mem-max-{scope}-gigabytes:", _GB)):
            value = _of(text, key)
            if value is not None:
                memory[scope] = value * unit
    return {"memory": memory} if memory else None


def _timer(text: str) -> _Values | None:
    """Read "    forward-compute ........: (12.3, 45.6)", min and max over ranks, in ms."""
    match = re.search(rf"(?<![\w/-])([\w/-]+) \.+: \(?(?:{_NUMBER}, )?{_NUMBER}\)?\s*$", text)
    if match is None:
        return None
    return {"timers": {match[1]: float(match[3]) / 1e3}}


def _timers(text: str) -> _Values | None:
    """Read "time (ms) | forward: 1.2 | backward: 3.4", of DeepSpeed and of older Megatron."""
    pairs = re.findall(rf"\| ([\w -]+): {_NUMBER}", text)
    timers = {name.replace(" ", "-"): float(value) / 1e3 for name, value in pairs}
    is_deepspeed = "rank=" in text or "log_dist" in text
    return {"timers": timers, "format": "deepspeed" if is_deepspeed else "megatron"}


_SIZES = MappingProxyType({
    "world_size": "world_size", "global_batch_size": "global_batch", "seq_length": "length",
    "num_layers": "num_layers", "hidden_size": "d_model", "num_experts": "num_experts",
    "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp", "expert_model_parallel_size": "ep",
    "train_batch_size": "global_batch",
})  # fmt: skip


def _argument(text: str) -> _Values | None:
    """Read "  hidden_size ............... 2048", of Megatron's and of DeepSpeed's settings."""
    match = re.search(r"\b(\w+) \.{3,} (\d+)\s*$", text)
    if match is None or match[1] not in _SIZES:
        return None
    kind = "deepspeed" if "config.py" in text else "megatron"
    return {"sizes": {_SIZES[match[1]]: int(match[2])}, "format": kind}


_TITAN = re.compile(
    rf"\bstep:\s*(\d+).*?(?:memory:\s*{_NUMBER}GiB.*?)?\b[tw]ps:\s*{_NUMBER}"
    rf"(?:\s*tflops:\s*{_NUMBER})?"
)


def _titan_step(text: str) -> _Values | None:
    """Read "step: 10 loss: … memory: 20.85GiB(21.94%) tps: 3,012 tflops: 123.4 mfu: 12.5%"."""
    match = _TITAN.search(text)
    if match is None:
        return None
    return {
        "step": int(match[1]), "tokens": _number(match[3]),
        "tflops": _number(match[4]) if match[4] else None,
        "memory": {"reserved": _number(match[2]) * _GIB} if match[2] else {},
    }  # fmt: skip


def _titan_begins(text: str) -> _Values:
    """Read "Training starts at step 1, with local batch size 8, global batch size 64, …"."""
    given = {"global_batch": "global batch size", "length": "sequence length"}
    sizes = {name: _count(text, key) for name, key in given.items()}
    given_sizes = {name: size for name, size in sizes.items() if size is not None}
    return {"begins": True, "sizes": given_sizes}


def _deepspeed_step(text: str) -> _Values | None:
    """Read "…/global_step=34, RunningAvgSamplesPerSec=7.8, CurrSamplesPerSec=8.0, Mem…=63.3GB"."""
    match = re.search(r"(?:global_step=|\d+/)(\d+),", text)
    current, mean = _of(text, r"\bCurrSamplesPerSec="), _of(text, r"\bSamplesPerSec=")
    samples = current or mean
    if match is None or samples is None:
        return None
    most = _of(text, "MaxMemAllocated=")
    memory = {} if most is None else {"allocated": most * _GIB}
    return {"step": int(match[1]), "samples": samples, "memory": memory, "is_mean": not current}


def _pipe_step(text: str) -> _Values | None:
    """Read "steps: 10 loss: 0.7 iter time (s): 1.234 samples/sec: 8.1"."""
    step, seconds = _count(text, r"\bsteps:"), _of(text, r"iter time \(s\):")
    return None if step is None or seconds is None else {"step": step, "seconds": seconds}


_NAMED_BAR = re.compile(r"(?<!\bTrain)(?<=[A-Za-z]) *: *\d+%\|")
"""A named bar counts loading, rows or an evaluation, except ms-swift's step bar, named Train."""


def _bar(text: str) -> _Values | None:
    """Read " 4%|▍   | 13/345 [00:07<05:03,  1.23s/it]", a progress bar without a name."""
    match = re.search(rf"(?:^|\W)\d+%\|[^|]*\| *(\d+)/(\d+) \[[^,\]]*, *{_NUMBER}(s/it|it/s)", text)
    if match is None or _NAMED_BAR.search(text):
        return None
    number = float(match[3])
    seconds = number if match[4] == "s/it" else (1 / number if number else None)
    return {"step": int(match[1]), "seconds": seconds, "bar": int(match[2])}


def _summary(text: str) -> _Values | None:
    """Read "{…, 'train_steps_per_second': 0.08, …}", also with "=" or in wandb's run summary."""
    rate = _of(text, r"train_steps_per_second['\"]?\s*[:=]?")
    return {"seconds": 1 / rate, "is_mean": True} if rate else None


def _swift_step(text: str) -> _Values | None:
    """Read ms-swift's "{'loss': …, 'memory(GiB)': 70.2, 'train_speed(s/it)': 12.3}"."""
    seconds, rate = (_of(text, rf"train_speed\({unit}\)['\"]:") for unit in ("s/it", "iter/s"))
    if rate:
        seconds = 1 / rate
    step = _count(text, r"(?:iteration|global_step/max_steps)['\"]:")
    if seconds is None:
        return None
    reserved = _of(text, r"memory\(GiB\)['\"]:")
    memory = {} if reserved is None else {"reserved": reserved * _GIB}
    return {"step": step, "seconds": seconds, "is_mean": True, "memory": memory}


def _begins(_: str) -> _Values:
    return {"begins": True}


def _size(text: str, *, key: str, name: str) -> _Values:
    size = _count(text, key)
    return {"sizes": {} if size is None else {name: size}}


_RANKS = partial(_size, key="using world size:", name="world_size")
_BATCH = partial(_size, key="Total train batch size[^=]*=", name="global_batch")
READERS: Mapping[bytes, tuple[LogFormat, Callable[[str], _Values | None]]] = MappingProxyType({
    b"elapsed time per iteration": ("megatron", _iteration),
    b"elapsed_time_per_iteration": ("megatron", _iteration),
    b"train_step_timing in s": ("megatron", _nemo_step),
    b"Step Time": ("megatron", _bridge_step), b"max reserved:": ("megatron", _megatron_memory),
    b"mem-max-": ("megatron", _megatron_memory), b"..: ": ("megatron", _timer),
    b"time (ms) |": ("megatron", _timers), b" ....": ("megatron", _argument),
    b"- arguments -": ("megatron", _begins), b"using world size:": ("megatron", _RANKS),
    b"tps: ": ("torchtitan", _titan_step), b"wps: ": ("torchtitan", _titan_step),
    b"Training starts at step": ("torchtitan", _titan_begins),
    b"SamplesPerSec=": ("deepspeed", _deepspeed_step),
    b"iter time (s):": ("deepspeed", _pipe_step),
    b"/it": ("transformers", _bar), b"it/s": ("transformers", _bar),
    b"train_steps_per_second": ("transformers", _summary),
    b"train_speed(": ("transformers", _swift_step),
    b"Total train batch size": ("transformers", _BATCH),
    b"***** Running training *****": ("transformers", _begins),
})  # fmt: skip
"""Log format and reader by the mark in a line; the first reader that returns values counts."""
_BY_MARK = tuple((mark.decode(), *reader) for mark, reader in READERS.items())


def entry_of(line: Line) -> Entry | None:
    """Return the values in a line; None if no reader of its marks recognises it."""
    for mark, kind, read in _BY_MARK:
        if mark in line.text and (values := read(line.text)) is not None:
            return Entry(**{"line": line.number, "format": kind, **values})
    return None
