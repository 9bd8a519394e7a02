"""`moetune profiles new`: write the profile file of a machine that is described, not measured."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.completers import gpu_names
from moetune.cli.session import Json, session_of
from moetune.domain.model import find_model

_MOST = 100_000


def new(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="The file to write.")],
    gpu: Annotated[
        str | None,
        typer.Option(
            autocompletion=gpu_names, help="A reference machine's, such as h100; see --tflops."
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, max=_MOST, help="GPUs that NVLink or PCIe joins.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, max=_MOST, help="Nodes.")] = None,
    nics: Annotated[
        int | None, typer.Option(min=1, max=_MOST, help="Network cards of a node.")
    ] = None,
    nic_rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Of one card, one way: 400Gbit/s.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of one GPU, for a process: 80GB.")
    ] = None,
    tflops: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Peak of another GPU, dense, bfloat16: 362TFLOP/s. The reference's GEMMs are "
            "scaled by it.",
        ),
    ] = None,
    memory_bandwidth: Annotated[
        str | None, typer.Option(metavar="RATE", help="Of a GPU's memory: 3.35TB/s.")
    ] = None,
    link_rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="Of one GPU to the others of its node, one way: 450GB/s."
        ),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of one host: 2TiB.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Reference machine for the rest. Default: the nearest."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the profile. Default: the file's.")] = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Replace a file.")] = False,
    json: Json = False,
) -> None:
    """Describe a machine: write a commented profile file from its GPUs, nodes and network cards.

    A reference machine stands in for what is not described, and the file names what.
    """
    from moetune.workflows.describe import check_new, describe, description_of
    from moetune.workflows.files import write_text

    session = session_of(context)
    check_new(file, force=force)
    values = {
        "gpu": gpu, "gpus_per_node": gpus_per_node, "nodes": nodes, "nics": nics,
        "nic_rate": nic_rate, "memory": memory, "tflops": tflops,
        "memory_bandwidth": memory_bandwidth, "link_rate": link_rate, "host_memory": host_memory,
        "base": base, "name": name or file.stem,
    }  # fmt: skip
    described = describe(description_of(values))
    write_text(file, described.text)
    if json:
        session.screen.document(
            {
                "schema": "moetune.profiles.new/1", "name": described.profile.name,
                "file": str(file), "base": described.base, "stand_ins": described.stand_ins,
            }
        )  # fmt: skip
        return
    session.screen.line(f"{file} is written: profile {described.profile.name}, not measured")
    session.screen.line(f"{described.base} stands in for:")
    for one in described.stand_ins:
        session.screen.line(f"  {one}")
    model = _model_for(described.profile.machine.num_devices)
    command = shlex.join(["moetune", "plan", "--model", model, "--profile", str(file)])
    session.screen.note(f"Plan with it:  {command}")


def _model_for(num_devices: int) -> str:
    """Return a named layer whose experts divide by the ranks."""
    experts = find_model("gpt-s").layer(num_devices).num_experts
    return "gpt-s" if experts % num_devices == 0 else "tm-1"
