"""`moetune profiles new`: write the profile file of a machine that is described, not measured."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from moetune.cli.completers import gpu_names
from moetune.cli.session import Json, session_of
from moetune.domain.errors import InputError
from moetune.domain.model import find_model
from moetune.domain.units import format_bytes, parse_bytes, parse_flops, parse_rate
from moetune.workflows.flags import parsed

if TYPE_CHECKING:
    from moetune.domain.profile import Profile

T = TypeVar("T")
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

    A reference machine stands in for what is not described, and the file names what. On a
    terminal, what has no flag is asked.
    """
    from moetune.workflows.describe import Description, check_new, describe
    from moetune.workflows.files import write_text

    session = session_of(context)
    check_new(file, force=force)
    for text, parse, flag in (
        (nic_rate, parse_rate, "--nic-rate"), (memory, parse_bytes, "--memory"),
        (tflops, parse_flops, "--tflops"), (memory_bandwidth, parse_rate, "--memory-bandwidth"),
        (link_rate, parse_rate, "--link-rate"), (host_memory, parse_bytes, "--host-memory"),
    ):  # fmt: skip
        parsed(text, parse, flag)
    answers = Answers(
        gpu=gpu, gpus_per_node=gpus_per_node, nodes=nodes, nics=nics, nic_rate=nic_rate,
        memory=memory,
    )  # fmt: skip
    if sys.stdin.isatty() and not json:
        answers = _asked(answers, is_reference=tflops is None)
    missing = answers.missing
    if answers.gpu is None or answers.gpus_per_node is None or answers.nodes is None or missing:
        raise InputError(
            f"the description lacks {', '.join(missing)}",
            f"moetune profiles new {file} --gpu h100 --gpus-per-node 8 --nodes 8 --nics 8 "
            "--nic-rate 400Gbit/s",
        )
    described = describe(
        Description(
            name=name or file.stem, gpu=answers.gpu, gpus_per_node=answers.gpus_per_node,
            nodes=answers.nodes, nics=answers.nics, nic_rate=answers.nic_rate or "",
            memory=answers.memory or "", base=base or "", tflops=tflops or "",
            memory_bandwidth=memory_bandwidth or "", link_rate=link_rate or "",
            host_memory=host_memory or "",
        )
    )  # fmt: skip
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A machine as flags, and then answers, describe it; None for nothing yet."""

    gpu: str | None
    gpus_per_node: int | None
    nodes: int | None
    nics: int | None
    nic_rate: str | None
    memory: str | None

    @property
    def missing(self) -> list[str]:
        """The flags without which no machine is described."""
        wanted: dict[str, object] = {
            "--gpu": self.gpu, "--gpus-per-node": self.gpus_per_node, "--nodes": self.nodes,
        }  # fmt: skip
        if (self.nodes or 1) > 1 or self.nics or self.nic_rate:
            wanted |= {"--nics": self.nics, "--nic-rate": self.nic_rate}
        return [flag for flag, value in wanted.items() if value is None]


def _asked(answers: Answers, *, is_reference: bool) -> Answers:
    """Return the answers with those to questions: about what no flag says."""
    from moetune.workflows.describe import gpus, reference_of

    gpu = answers.gpu or _ask(
        f"GPU ({', '.join(gpus())})", "h100", _checked(reference_of) if is_reference else str
    )
    base = reference_of(gpu) if is_reference else None
    usual = base.machine.devices_per_node if base else 8
    per_node = answers.gpus_per_node or _ask("GPUs of a node", usual, _count)
    nodes = answers.nodes or _ask("Nodes", 1, _count)
    nics, nic_rate, memory = answers.nics, answers.nic_rate, answers.memory
    if nodes > 1:
        nics = nics or _ask("Network cards of a node", per_node, _count)
        nic_rate = nic_rate or _ask("Rate of one card", _card_rate(base), _checked(parse_rate))
    if memory is None and base is not None:
        known = format_bytes(base.machine.memory_bytes).replace(" ", "")
        text = _ask("Memory of a GPU for a process", known, _checked(parse_bytes))
        memory = None if text == known else text
    return Answers(
        gpu=gpu, gpus_per_node=per_node, nodes=nodes, nics=nics, nic_rate=nic_rate, memory=memory
    )


def _card_rate(base: "Profile | None") -> str:
    """Return the rate of a reference's card, which is one GPU's share of the network."""
    share = base.network.nic_bytes_per_second if base and base.network else 50e9
    return f"{share * 8 / 1e9:g}Gbit/s"


def _ask(question: str, default: object, read: Callable[[str], T]) -> T:
    """Ask on stderr until the answer can be read."""
    answer: T = typer.prompt(question, default=f"{default}", value_proc=read, err=True)
    return answer


def _checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """Return a reader that keeps the text that was checked."""

    def read(text: str) -> str:
        try:
            check(text)
        except InputError as error:
            raise typer.BadParameter(f"{error.what}; {error.hint}") from None
        return text

    return read


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _MOST):
        raise typer.BadParameter(f"{text!r} is not a whole number from 1 to {_MOST}")
    return int(text)
