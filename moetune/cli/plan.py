"""`moetune plan`: the best plan for a layer or a whole model on a profile's machine."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.completers import model_names
from moetune.cli.next_step import what_runs_it
from moetune.cli.session import Json, ProfileOption, Session, example, saved_or_written, session_of
from moetune.domain.constraints import Order, Strategy
from moetune.domain.layer import Activation, ExpertParallel
from moetune.domain.optimizers import OPTIMIZERS
from moetune.domain.pipeline import SCHEDULES
from moetune.domain.placement import PlacementRule
from moetune.domain.targets import TARGETS
from moetune.domain.training import CUDA_GRAPHS, OVERLAPS, RECOMPUTES, TOKEN_DISPATCHERS
from moetune.domain.units import parse_bytes, parse_count
from moetune.workflows.flags import parsed

if TYPE_CHECKING:
    from moetune.workflows.plan import NewPlan
    from moetune.workflows.plan_flags import PlanFlags
    from moetune.workflows.profiles import FoundProfile

EPILOG = example("moetune plan --model gpt-xl --profile rtx2080ti-x64 --dtype float16")


def _size(flag: str, words: str) -> typer.models.OptionInfo:
    """Return an option for a whole number from 1."""
    found: typer.models.OptionInfo = typer.Option(flag, min=1, help=words)
    return found


def plan(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(autocompletion=model_names, help="A named model: see `moetune models list`."),
    ] = None,
    d_model: Annotated[int | None, _size("--d-model", "Width of the tokens.")] = None,
    d_hidden: Annotated[int | None, _size("--d-hidden", "Width of the experts.")] = None,
    num_experts: Annotated[int | None, _size("--num-experts", "Experts on all ranks.")] = None,
    top_k: Annotated[int | None, _size("--top-k", "Experts per token. Default: 1.")] = None,
    activation: Annotated[
        Activation | None, typer.Option(help="Of the experts. Default: gelu.")
    ] = None,
    profile: ProfileOption = None,
    world_size: Annotated[
        int | None, _size("--world-size", "Ranks. Default: the profile's devices.")
    ] = None,
    nodes: Annotated[
        int | None, _size("--nodes", "Instead of ranks: nodes of the profile's size.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Tokens per rank and step, such as 8192 or 8k. Default: the model's."),
    ] = None,
    batch: Annotated[int | None, _size("--batch", "With --seq: sequences per rank.")] = None,
    seq: Annotated[
        str | None, typer.Option(help="Tokens per sequence: with --batch, or of a whole model.")
    ] = None,
    num_layers: Annotated[int | None, _size("--num-layers", "Blocks of a whole model.")] = None,
    num_heads: Annotated[int | None, _size("--num-heads", "Attention heads of its blocks.")] = None,
    vocab: Annotated[str | None, typer.Option(help="Its vocabulary size, such as 50k.")] = None,
    moe_every: Annotated[
        int | None,
        typer.Option(min=0, help="Every n-th block has experts; 0 for none. Default: 2."),
    ] = None,
    ep: Annotated[int | None, _size("--ep", "Pin the replicas per expert-parallel group.")] = None,
    tp: Annotated[int | None, _size("--tp", "Pin the ranks per tensor-parallel group.")] = None,
    pp: Annotated[int | None, _size("--pp", "Pin the pipeline stages.")] = None,
    expert_parallel: Annotated[
        ExpertParallel | None,
        typer.Option(
            help="How ranks share a layer's experts: all_to_all sends tokens to their experts; "
            "tensor gives every rank all tokens and sums the outputs. Default: all_to_all."
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel",
            help="With --expert-parallel tensor: each rank has a shard of --tokens, "
            "with an all-gather before the experts and a reduce-scatter after them.",
        ),
    ] = False,
    micro_batch: Annotated[
        int | None, _size("--micro-batch", "Pin the sequences per micro-batch.")
    ] = None,
    global_batch: Annotated[
        int | None,
        _size("--global-batch", "Sequences of a step of a whole model."),
    ] = None,
    cp: Annotated[int | None, _size("--cp", "Pin the ranks that share a sequence.")] = None,
    vpp: Annotated[int | None, _size("--vpp", "Pin the stages of a pipeline rank.")] = None,
    etp: Annotated[int | None, _size("--etp", "Pin the ranks that share one expert.")] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            metavar="MODULES",
            help=f"Pin what is recomputed: none, or some of {', '.join(RECOMPUTES)}.",
        ),
    ] = None,
    overlap: Annotated[
        str | None,
        typer.Option(metavar=f"[{'|'.join(OVERLAPS)}]", help="Pin how exchanges are hidden."),
    ] = None,
    offload_activations: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Pin the share of blocks whose activations wait in host memory.",
        ),
    ] = None,
    offload_optimizer: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Pin the share of the optimizer on the host."),
    ] = None,
    cuda_graphs: Annotated[
        str | None,
        typer.Option(
            metavar=f"[{'|'.join(CUDA_GRAPHS)}]",
            help="Pin what the host replays: nothing, attention and router, or whole steps.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar=f"[{'|'.join(TARGETS)}]",
            help="The runtime, with a version or without: megatron@0.17. Default: moetune.",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar=f"[{'|'.join(SCHEDULES)}]", help="Pin the order of a pipeline's passes."
        ),
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            metavar="LETTERS",
            help="Pin the modules of each stage as Megatron writes them: 'Ettt|(tt|)*29m|L'.",
        ),
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(
            metavar="[balanced|natural|FILE]",
            help="How evenly tokens reach experts; a file has one load for each. "
            "Default: balanced.",
        ),
    ] = None,
    expert_placement: Annotated[
        PlacementRule | None,
        typer.Option(
            metavar="[planned|natural]",
            help="Place experts on ranks by their loads in --routing where that is worth it, or "
            "keep their order. Default: planned.",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar=f"[{'|'.join(OPTIMIZERS)}]",
            help="Of a decoder's training: the bytes kept for a parameter. Default: adam.",
        ),
    ] = None,
    zero: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=3,
            help="Pin what replicas shard: 0 nothing, 1 optimizer states, 2 gradients, "
            "3 parameters.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Element type. Default: bfloat16 on CUDA where measured, else float32."),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of one device, such as 40GiB. Default: all, of a GPU 92 %."
        ),
    ] = None,
    memory_taken: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Part of it for the rest of the model. Default: 0."),
    ] = None,
    strategy: Annotated[
        Strategy | None,
        typer.Option(help="Pin the memory strategy. Default: the fastest that fits."),
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
        int | None, _size("--min-chunk-tokens", "Fewest tokens per chunk. Default: 1.")
    ] = None,
    order: Annotated[
        Order | None, typer.Option(help="Pin the order of the transfers on the link.")
    ] = None,
    dispatcher: Annotated[
        str | None,
        typer.Option(
            metavar=f"[{'|'.join(TOKEN_DISPATCHERS)}]",
            help="Pin the exchange of tokens of a whole model.",
        ),
    ] = None,
    allow_modelled: Annotated[
        bool | None,
        typer.Option(
            "--allow-modelled/--no-allow-modelled",
            help="Use the nearest group size where the plan's own was not measured.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the plan to this file.")
    ] = None,
    front: Annotated[
        bool,
        typer.Option("--front", help="Show the fastest layout for every memory of a device, too."),
    ] = False,
    no_save: Annotated[
        bool, typer.Option("--no-save", help="Do not save the plan in the store.")
    ] = False,
    json: Json = False,
) -> None:
    """Solve for the best plan of a layer or model.

    A layer's plan has the chunks and the memory strategy of its passes, a whole model's the layout
    of its training over the ranks.
    """
    from moetune.workflows.plan_flags import PlanFlags

    flags = PlanFlags(
        model=model, d_model=d_model, d_hidden=d_hidden, num_experts=num_experts, top_k=top_k,
        activation=activation, world_size=world_size, nodes=nodes,
        tokens=parsed(tokens, parse_count, "--tokens"), batch=batch,
        seq=parsed(seq, parse_count, "--seq"), num_layers=num_layers, num_heads=num_heads,
        vocab=parsed(vocab, parse_count, "--vocab"), moe_every=moe_every, ep=ep, tp=tp, pp=pp,
        expert_parallel=expert_parallel, sequence_parallel=sequence_parallel,
        micro_batch=micro_batch, global_batch=global_batch, cp=cp, vpp=vpp, etp=etp,
        recompute=recompute, overlap=overlap, offload_activations=offload_activations,
        offload_optimizer=offload_optimizer, cuda_graphs=cuda_graphs, target=target,
        schedule=schedule, stages=stages, routing=routing, expert_placement=expert_placement,
        optimizer=optimizer, zero=zero, dtype=dtype,
        memory_limit=parsed(memory_limit, parse_bytes, "--memory-limit"),
        memory_taken=parsed(memory_taken, parse_bytes, "--memory-taken"), strategy=strategy,
        forward_degree=forward_degree, backward_degree=backward_degree, max_degree=max_degree,
        min_chunk_tokens=min_chunk_tokens, order=order, dispatcher=dispatcher,
        allow_modelled=allow_modelled, front=front,
    )  # fmt: skip
    session = session_of(context)
    _print(session, flags, profile=profile, output=output, save=not no_save, as_json=json)


def _print(
    session: Session,
    flags: "PlanFlags",
    *,
    profile: str | None,
    output: Path | None,
    save: bool,
    as_json: bool,
) -> None:
    """Plan, print the plan and save it."""
    from moetune.workflows.files import write_text
    from moetune.workflows.plan_flags import plan_flags

    screen = session.screen
    make = partial(plan_flags, flags, profile=profile)
    planned, save = saved_or_written(session, make, save=save, output=output)
    plan = planned.plan
    if output is not None:
        write_text(output, plan.text)
    _say_profile(session, planned.found)
    if as_json:
        typer.echo(plan.text, nl=False)
    else:
        _show(session, planned)
    short = plan.id[:6]
    if output is not None:
        screen.note(f"Plan {short} is written to {output}.")
    if not save:
        screen.note(f"Plan {short} is not saved in the store.")
    elif as_json:
        screen.note(f"Plan {short} saved.")
    else:
        screen.line(f"Plan {short} saved. Explain it: moetune explain {short}")
        screen.line(what_runs_it(plan, planned.found.profile.machine))


def _say_profile(session: Session, found: "FoundProfile") -> None:
    from moetune.workflows.staleness import stale_note

    if note := stale_note(found.profile):
        session.screen.note(f"Note: {note}.")
    session.screen.detail(f"profile {found.profile.name} ({found.digest[:8]}, {found.source})")


def _show(session: Session, planned: "NewPlan") -> None:
    from moetune.workflows.profiles import machine_note
    from moetune.workflows.subjects import subject_of
    from moetune.workflows.views.plan import plan_sections

    screen, used = session.screen, planned.found.profile
    screen.answer(plan_sections(subject_of(planned.plan, profile=used)))
    # Detecting this machine loads torch, which takes ten times as long as the plan.
    if session.verbosity > 0 and (note := machine_note(used)):
        screen.say(f"Note: {note}.", indent=2)
    screen.say()
