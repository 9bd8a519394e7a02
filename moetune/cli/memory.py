"""`moetune memory`: what fits where, without a profile."""

from typing import Annotated

import typer

from moetune.cli.completers import model_names
from moetune.cli.session import All, Json, command_again, example, session_of
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.targets import TARGETS

EPILOG = example("moetune memory qwen3-30b-a3b --device-memory 80GB --world-size 64")


def memory(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="PATH|NAME",
            autocompletion=model_names,
            help="A name, or a Hugging Face config.json.",
        ),
    ],
    *,
    device_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Of one GPU: 80GB as sold, or 79.1GiB as reported.")
    ] = "80GB",
    world_size: Annotated[
        int | None, typer.Option(min=1, help="GPUs. Default: the fewest on which it fits.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of a step. Default: one for each GPU.")
    ] = None,
    seq: Annotated[str, typer.Option(metavar="TOKENS", help="Tokens of a sequence.")] = "4k",
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel ranks.")] = None,
    cp: Annotated[int | None, typer.Option(min=1, help="Context-parallel ranks.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline ranks.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert-parallel ranks.")] = None,
    zero: Annotated[int | None, typer.Option(min=0, max=3, help="ZeRO stage.")] = None,
    recompute: Annotated[
        str | None, typer.Option(help="Modules computed again: none, full, or a list.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Default: the target's, such as adam.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the GEMMs.")] = "bfloat16",
    target: Annotated[str, typer.Option(help=f"Runtime: {', '.join(TARGETS)}.")] = "megatron",
    all_: All = False,
    json: Json = False,
) -> None:
    """Say which layouts of a model's training fit, and where the memory goes."""
    from moetune.domain.target_rules import model_rules
    from moetune.workflows.memory import MOST_LAYOUTS, fit_memory
    from moetune.workflows.memory_flags import MemoryFlags
    from moetune.workflows.views.memory import memory_document, memory_sections

    session = session_of(context, all_rows=all_)
    flags = MemoryFlags(
        model=model, device_memory=device_memory, world_size=world_size,
        global_batch=global_batch, seq=seq, micro_batch=micro_batch, tp=tp, cp=cp, pp=pp, ep=ep,
        zero=zero, recompute=recompute, optimizer=optimizer, dtype=dtype, target=target,
    )  # fmt: skip
    question = flags.question()
    answer = fit_memory(question, most_layouts=None if all_ else MOST_LAYOUTS)
    session.screen.answer(memory_sections(answer), memory_document(answer), as_json=json)
    if not answer.fits:
        if world_size is not None and not json:
            fewest = command_again(session, without=("--world-size",))
            session.screen.note(f"How many GPUs it takes:  {fewest}")
        raise typer.Exit(InfeasiblePlanError.exit_code)
    broken = next(model_rules(question.decoder, question.target), None)
    if broken is not None:
        session.screen.note(f"{broken.what}: its memory is that of such a runtime")
    elif not json:
        session.screen.note(
            f"Plan it:  moetune plan --model {model} --profile h100-x8 "
            f"--world-size {answer.job.world_size} --global-batch {answer.job.global_batch} "
            f"--seq {answer.job.length} --target {target}"
        )
