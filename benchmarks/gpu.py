"""`make gpu`: every check that needs a GPU, in one command, without a network or a database.

1. The correctness tests marked `gpu`.
2. A full profile of the device: GEMM, row operations, copies, interference, and a host-staged
   loopback (device to host to device on its own stream), which stands for the wire.
3. The pipelined layer over that loopback at degrees 1 to 16, for the models of MPipeMoE's
   Table III as one of 64 ranks sees them (one expert), predicted against measured.
4. Strategies S1 to S4 for GPT-XL: peak, time, what is hidden, and what each rule would choose.

It writes `profiles/NAME.toml` and `docs/results/gpu.md`, or both into --output. On a machine
without a GPU it runs the same on the CPU with rows that stay where they are.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu_reuse import reuse_rows, reuse_table
from benchmarks.staged_link import HostStagedLink
from moetune import config
from moetune.comm.group import Communicator, OneRank
from moetune.domain.errors import MoetuneError
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.model import MODELS, Model
from moetune.domain.plan import Decision
from moetune.domain.profile import Profile
from moetune.domain.samples import CollectivePoint, GemmPoint
from moetune.fit.costs import costs_of
from moetune.fit.profile import fit_profile
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.parallelism import AllToAllCosts
from moetune.solve.layer.times import step_time
from moetune.workflows.files import profile_to_toml, write_text
from moetune.workflows.profile import MeasurementSetting, ProfileRequest, measure_profile
from moetune.workflows.steps import MeasuredSteps, measure_steps, random_steps

DEGREES = (1, 2, 4, 8, 16)
MODEL_NAMES = ("gpt-s", "bert-l", "gpt-xl")
_NUM_ROUNDS = 7
# A loopback has one rank; the same expert as one of two ranks is what a plan can be asked for.
_PRETENDED_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model, number of tokens and degree."""

    model: str
    tokens: int
    degree: int
    predicted_seconds: float | None
    measured: MeasuredSteps
    macs: int

    @property
    def seconds(self) -> float:
        """Median step."""
        return statistics.median(self.measured.step_seconds)


def main() -> None:
    """Run all checks and write the tables."""
    options = _options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = options.name or (_slug() if device.type == "cuda" else "cpu-check")
    failed = _tests(device)
    profile = _profile(name, device, options.budget_seconds)
    tokens = (512,) if device.type == "cpu" else (4096, 8192, 16384)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    models = [MODELS[model] for model in MODEL_NAMES]
    rows = [
        row
        for model in models
        for number in tokens
        for row in _rows(model, number, dtype, device, profile)
    ]
    report = _report(profile, dtype, device, rows, failed)
    report += _reuse(MODELS["gpt-xl"], tokens[-1], dtype, device, profile)
    profiles = options.output or Path("profiles")
    results = options.output or Path("docs/results")
    if device.type == "cuda" or options.output:
        for folder in (profiles, results):
            folder.mkdir(parents=True, exist_ok=True)
        write_text(profiles / f"{name}.toml", profile_to_toml(profile))
        write_text(results / "gpu.md", report)
    print(report)
    sys.exit(failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", help="of the profile; default, the device's")
    parser.add_argument("--output", type=Path, help="folder for the profile and the report")
    parser.add_argument("--budget-seconds", type=float, default=150.0, help="to measure")
    return parser.parse_args()


def _slug() -> str:
    return torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")


def _tests(device: torch.device) -> int:
    marks = "gpu" if device.type == "cuda" else "not gpu"
    paths = ["tests/runtime/test_layer_cuda.py", "tests/runtime/test_layer_alone.py"]
    chosen = paths[:1] if device.type == "cuda" else paths[1:]
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider"]
    # A machine that is only lent may lack the plug-ins that the project's options name.
    command += ["-c", "/dev/null", "--rootdir", ".", "-o", "pythonpath=.", *chosen]
    return subprocess.run(command, check=False).returncode


def _profile(name: str, device: torch.device, budget_seconds: float) -> Profile:
    layers = tuple(_expert(MODELS[model]) for model in MODEL_NAMES)
    return measure_profile(
        ProfileRequest(
            name=name,
            preset="full" if device.type == "cuda" else "quick",
            dtypes=("float32", "bfloat16") if device.type == "cuda" else ("float32",),
            layers=layers,
            max_tokens=16384 if device.type == "cuda" else 512,
            budget_seconds=budget_seconds,
        ),
        MeasurementSetting(environment=config.environment()),
    )


def _expert(model: Model) -> LayerShape:
    """Return one rank's share of the model: its only expert sees as many rows as it sends."""
    return LayerShape(
        d_model=model.d_model,
        d_hidden=model.d_hidden,
        num_experts=1,
        top_k=1,
        activation=model.activation,
    )


def _rows(
    model: Model, tokens: int, dtype: str, device: torch.device, profile: Profile
) -> Iterator[Row]:
    workload = Workload(layer=_expert(model), world_size=1, tokens_per_rank=tokens, dtype=dtype)
    steps = random_steps(workload, device=device, communicator=_link(device))
    decisions = [Decision(forward_degree=one, backward_degree=one) for one in DEGREES]
    for one in measure_steps(steps, decisions, num_rounds=_NUM_ROUNDS):
        degree = one.decision.forward_degree
        yield Row(
            model=model.name,
            tokens=tokens,
            degree=degree,
            predicted_seconds=_predicted(profile, workload, degree),
            measured=one,
            macs=6 * workload.macs,
        )


def _link(device: torch.device) -> Communicator:
    return HostStagedLink(device) if device.type == "cuda" else OneRank()


def _reuse(model: Model, tokens: int, dtype: str, device: torch.device, profile: Profile) -> str:
    workload = Workload(layer=_expert(model), world_size=1, tokens_per_rank=tokens, dtype=dtype)
    costs = _wired(profile, workload)
    try:
        rows = list(reuse_rows(workload, device=device, communicator=_link(device), costs=costs))
    except MoetuneError as error:
        return f"\nMemory reuse was not measured: {error}\n"
    return "\n".join(reuse_table(rows, title=f"{model.title}, {tokens:,} tokens")) + "\n"


def _wired(profile: Profile, workload: Workload) -> LayerCosts:
    """Return the costs with the loopback taken for a link between two ranks."""
    samples = tuple(
        replace(sample, point=replace(sample.point, group_size=_PRETENDED_RANKS))
        if isinstance(sample.point, CollectivePoint)
        else sample
        for sample in profile.samples
    )
    wired = fit_profile(
        name=profile.name,
        machine=profile.machine,
        fingerprint=profile.fingerprint,
        samples=samples,
    )
    layer = replace(workload.layer, num_experts=_PRETENDED_RANKS)
    return AllToAllCosts(
        layer=layer, world_size=_PRETENDED_RANKS, dtype=workload.dtype, costs=costs_of(wired)
    )


def _predicted(profile: Profile, workload: Workload, degree: int) -> float | None:
    try:
        return step_time(
            costs=_wired(profile, workload),
            tokens=workload.tokens_per_rank,
            forward_degree=degree,
            backward_degree=degree,
        ).seconds
    except MoetuneError:
        return None


def _peak_macs_per_second(profile: Profile, dtype: str) -> float:
    return max(
        sample.point.macs / sample.median_seconds
        for sample in profile.samples
        if isinstance(sample.point, GemmPoint) and sample.point.dtype == dtype and sample.seconds
    )


def _report(
    profile: Profile, dtype: str, device: torch.device, rows: Sequence[Row], failed: int
) -> str:
    peak = _peak_macs_per_second(profile, dtype)
    link = "host-staged loopback" if device.type == "cuda" else "no link: rows stay where they are"
    errors = [abs(row.predicted_seconds / row.seconds - 1) for row in rows if row.predicted_seconds]
    lines = [
        f"# Pipelined layer on {profile.machine.device}",
        "",
        f"Measured with torch {torch.__version__}, {dtype}, {link}; one expert of each model of",
        "MPipeMoE's Table III, as one of 64 ranks sees it. The share is that of the six products",
        f"of a step in the best product measured on this device, {2 * peak / 1e12:.1f} TFLOP/s.",
        "",
        f"Correctness tests: {'passed' if not failed else 'FAILED'}. "
        + (f"Median |error| {statistics.median(errors):.1%}." if errors else ""),
        "",
        "| model | tokens | degree | predicted ms | measured ms | error | × one chunk | share |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    one_chunk = {(row.model, row.tokens): row.seconds for row in rows if row.degree == 1}
    for row in rows:
        known = row.predicted_seconds
        predicted = "–" if known is None else f"{known * 1e3:.2f}"
        error = "–" if known is None else f"{known / row.seconds - 1:+.1%}"
        share = row.macs / row.seconds / peak
        lines.append(
            f"| {row.model} | {row.tokens:,} | {row.degree} | {predicted} "
            f"| {row.seconds * 1e3:.2f} | {error} "
            f"| {one_chunk[row.model, row.tokens] / row.seconds:.2f} | {share:.0%} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
