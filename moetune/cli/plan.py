"""`moetune plan`: the best plan for a layer on a machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.session import Json, ProfileOption, Session, example, session_of
from moetune.domain.errors import InputError
from moetune.domain.layer import Activation, ExpertParallel, LayerShape
from moetune.domain.plan import Order, Strategy
from moetune.domain.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from moetune.config import Settings
    from moetune.solve.choice import Bounds
    from moetune.workflows.plan import Planned

EPILOG = example("moetune plan --model gpt-xl --profile rtx2080ti-x64 --dtype float16")


def _size(flag: str, words: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(flag, min=1, help=words)
    return found


def plan(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="A named model: see `moetune models list`.")
    ] = None,
    d_model: Annotated[int | None, _size("--d-model", "Width of the tokens.")] = None,
    d_hidden: Annotated[int | None, _size("--d-hidden", "Width of the experts.")] = None,
    num_experts: Annotated[int | None, _size("--num-experts", "Experts of all ranks.")] = None,
    top_k: Annotated[int | None, _size("--top-k", "Experts of a token. Default: 1.")] = None,
    activation: Annotated[
        Activation | None, typer.Option(help="Of the experts. Default: gelu.")
    ] = None,
    profile: ProfileOption = None,
    world_size: Annotated[
        int | None, _size("--world-size", "Ranks. Default: the profile's devices.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Tokens per rank and step, such as 8192 or 8k. Default: the model's."),
    ] = None,
    batch: Annotated[int | None, _size("--batch", "With --seq: sequences per rank.")] = None,
    seq: Annotated[str | None, typer.Option(help="With --batch: tokens of a sequence.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Element type. Default: bfloat16 on CUDA where measured, else float32."),
    ] = None,
    expert_parallel: Annotated[
        ExpertParallel | None,
        typer.Option(
            help="How ranks share a layer's experts: tokens travel to them, or every rank sees "
            "all tokens and their outputs are summed. Default: all_to_all."
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of one device, such as 40GiB. Default: all of it."),
    ] = None,
    memory_taken: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What the rest of the model takes of it. Default: 0."),
    ] = None,
    strategy: Annotated[
        Strategy | None,
        typer.Option(help="Pin how activations are kept. Default: the fastest that fits."),
    ] = None,
    forward_degree: Annotated[
        int | None, _size("--forward-degree", "Pin the chunks of the forward pass.")
    ] = None,
    backward_degree: Annotated[
        int | None, _size("--backward-degree", "Pin the chunks of the backward pass.")
    ] = None,
    max_degree: Annotated[
        int | None, _size("--max-degree", "Largest number of chunks. Default: 64.")
    ] = None,
    min_chunk_tokens: Annotated[
        int | None, _size("--min-chunk-tokens", "Fewest tokens of a chunk. Default: 1.")
    ] = None,
    order: Annotated[
        Order | None, typer.Option(help="Pin the order of the transfers on the link.")
    ] = None,
    allow_modelled: Annotated[
        bool | None,
        typer.Option(
            "--allow-modelled/--no-allow-modelled",
            help="Take the nearest group size where the one asked for was not measured.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan to this file, too.")
    ] = None,
    no_save: Annotated[
        bool, typer.Option("--no-save", help="Do not keep the plan in the store.")
    ] = False,
    json: Json = False,
) -> None:
    """Solve for the number of chunks of a layer's forward and backward pass, and say why."""
    from moetune.workflows.plan import PlanRequest, plan_layer

    session = session_of(context)
    settings = session.settings
    request = PlanRequest(
        model=model,
        layer=_layer(model, d_model, d_hidden, num_experts, top_k, activation),
        world_size=world_size,
        tokens_per_rank=_tokens(tokens, batch, seq),
        dtype=dtype or settings.dtype,
        expert_parallel=expert_parallel,
        memory_limit_bytes=None if memory_limit is None else parse_bytes(memory_limit),
        memory_taken_bytes=0 if memory_taken is None else parse_bytes(memory_taken),
        bounds=_bounds(
            settings,
            forward_degree,
            backward_degree,
            max_degree,
            min_chunk_tokens,
            order,
            strategy,
        ),
        allow_modelled=settings.allow_modelled if allow_modelled is None else allow_modelled,
    )
    planned = plan_layer(
        request,
        profile=profile or settings.profile,
        settings=settings,
        output=output,
        save=not no_save,
    )
    _show(session, planned, output=output, save=not no_save, as_json=json)


def _layer(
    model: str | None,
    d_model: int | None,
    d_hidden: int | None,
    num_experts: int | None,
    top_k: int | None,
    activation: Activation | None,
) -> LayerShape | None:
    sizes = {"--d-model": d_model, "--d-hidden": d_hidden, "--num-experts": num_experts}
    given = [flag for flag, value in sizes.items() if value is not None]
    others = {"--top-k": top_k, "--activation": activation}
    extra = [flag for flag, value in others.items() if value is not None]
    if model is not None and (given or extra):
        raise InputError(
            f"--model {model} and {(given + extra)[0]} exclude each other",
            "name a model, or give --d-model, --d-hidden and --num-experts",
        )
    if not given and not extra:
        return None
    if d_model is None or d_hidden is None or num_experts is None:
        missing = ", ".join(flag for flag, value in sizes.items() if value is None)
        raise InputError(f"a layer lacks {missing}", "or name a model with --model")
    return LayerShape(
        d_model=d_model,
        d_hidden=d_hidden,
        num_experts=num_experts,
        top_k=top_k or 1,
        activation=activation or "gelu",
    )


def _tokens(tokens: str | None, batch: int | None, seq: str | None) -> int | None:
    if tokens is not None:
        if batch is not None or seq is not None:
            raise InputError("--tokens and --batch with --seq exclude each other")
        return parse_count(tokens)
    if (batch is None) != (seq is None):
        raise InputError("--batch and --seq go together", "or give --tokens")
    return None if batch is None or seq is None else batch * parse_count(seq)


def _bounds(
    settings: "Settings",
    forward_degree: int | None,
    backward_degree: int | None,
    max_degree: int | None,
    min_chunk_tokens: int | None,
    order: Order | None,
    strategy: Strategy | None,
) -> "Bounds":
    from moetune.solve.choice import Bounds

    return Bounds(
        forward_degree=forward_degree,
        backward_degree=backward_degree,
        max_degree=max_degree or settings.max_degree,
        min_chunk_tokens=min_chunk_tokens or settings.min_chunk_tokens,
        order=order,
        strategy=strategy,
    )


def _show(
    session: Session, planned: "Planned", *, output: Path | None, save: bool, as_json: bool
) -> None:
    from moetune.cli.plan_view import show_plan
    from moetune.workflows.explain import explain_plan
    from moetune.workflows.files import plan_to_json
    from moetune.workflows.profiles import machine_note

    screen, made = session.screen, planned.plan
    profile = planned.found.profile
    screen.detail(f"profile {profile.name} ({profile.digest[:8]}, {planned.found.source})")
    if as_json:
        typer.echo(plan_to_json(made), nl=False)
    else:
        show_plan(screen, explain_plan(made, profile=profile))
        # To look at this machine loads torch, which takes ten times as long as the plan.
        if session.verbosity > 0 and (note := machine_note(profile)):
            screen.say(f"Note: {note}.", indent=2)
            screen.say()
    if output is not None:
        screen.note(f"Plan {made.id[:6]} is written to {output}.")
    if not save:
        screen.note(f"Plan {made.id[:6]} is not kept in the store.")
    elif as_json:
        screen.note(f"Plan {made.id[:6]} saved.")
    else:
        short = made.id[:6]
        screen.line(f"Plan {short} saved. See why: moetune explain {short}")
        screen.line(f"Check it on this machine: moetune verify {short}")
