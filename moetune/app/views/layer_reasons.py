"""Reasons of a layer's plan: its terms, memory strategies, and degrees for other tokens."""

from collections.abc import Iterator
from dataclasses import replace

from moetune.app.subjects.layer import LayerSubject
from moetune.app.views.layer import how_sure, is_one_chunk, plan_decision
from moetune.domain.plan import Plan
from moetune.domain.request import constraint_words
from moetune.domain.terms import PhaseTerms, StrategyTerms
from moetune.domain.units import format_degree, format_seconds
from moetune.fit.costs import costs_of
from moetune.report.figure import Figure
from moetune.report.plan_figures import timeline_figure
from moetune.report.reasons import STRATEGY_WORDS
from moetune.report.section import Cell, Section, Table, sentence
from moetune.report.words import Reasons, kernel_words, routing_words
from moetune.solve.trace import plan_timelines

_PHASES = (
    "experts: one chunk's; exposed: communication that the experts do not hide; hidden: what the "
    "overlap saves."
)
_BYTES = (
    "peak: of a step as the layer runs it, which the limit is for; formulas: Eq. 1 to 6 of "
    "MPipeMoE, which omit some buffers and the routing data."
)
_PAPER = (
    "Eq. 10 is MPipeMoE's rule, and * its choice where memory is reused. It has no start-up times "
    "and does not decide here."
)


def layer_reasons(subject: LayerSubject, *, is_drawn: bool = False) -> Reasons:
    """Return what an explanation shows of a layer's plan, with its timeline if `is_drawn`."""
    plan = subject.plan
    pins = sorted(plan.inputs.constraints.items())
    return Reasons(
        decision=plan_decision(plan),
        placement=tuple(routing_words(plan)),
        why=(plan.decision.why, *kernel_words(plan)),
        sure=how_sure(plan),
        pins=tuple((f"--{flag}", constraint_words(flag, value)) for flag, value in pins),
        terms=(_terms(subject, is_drawn=is_drawn), *_strategies(subject)),
        ranges=(_ranges(plan),),
    )


def _terms(subject: LayerSubject, *, is_drawn: bool) -> Section:
    terms, figures, tables = subject.plan.terms, list[Figure](), list[Table]()
    if terms is not None:
        tables.append(_phases(subject, terms.forward, terms.backward))
    if is_drawn and subject.profile:
        figures.append(timeline_figure(*plan_timelines(plan=subject.plan, costs=subject.costs)))
    return Section(
        name="terms",
        title="What the time consists of",
        tables=tuple(tables),
        figures=tuple(figures),
        notes=(sentence(subject.note),) if subject.note else (),
    )


def _phases(subject: LayerSubject, forward: PhaseTerms, backward: PhaseTerms) -> Table:
    return Table.of(
        "phases-terms",
        (("forward", forward), ("backward", backward)),
        {
            "phase": lambda phase: phase[0],
            "chunks": lambda phase: Cell.count(phase[1].degree),
            "transfer": lambda phase: Cell.seconds(phase[1].transfer_seconds),
            "experts": lambda phase: Cell.seconds(phase[1].compute_seconds),
            "all experts": lambda phase: Cell.seconds(phase[1].total_compute_seconds),
            "exposed": lambda phase: Cell.seconds(phase[1].exposed_communication_seconds),
            "hidden": lambda phase: Cell.seconds(phase[1].hidden_seconds),
            "planned": lambda phase: Cell.seconds(phase[1].seconds),
        },
        notes=(
            f"transfer: {_transfer(subject.plan)}; {_PHASES}",
            *_remarks(subject.plan, forward, backward),
            *_measured_steps(subject, forward, backward),
        ),
    )


def _transfer(plan: Plan) -> str:
    if plan.kind != "tensor":
        return "one chunk's dispatch, and the same again for its combine"
    return "one chunk's all-reduce, of the output or of the input's gradient"


def _measured_steps(
    subject: LayerSubject, forward: PhaseTerms, backward: PhaseTerms
) -> Iterator[str]:
    """Yield the ratio of the profile's measured steps to the sums of their operations."""
    if subject.profile is None or not subject.profile.steps:
        return
    load = subject.plan.workload
    errors = costs_of(subject.profile).step_errors(load.key, tokens=load.tokens_per_rank)
    ahead, back = (errors.factor(terms.degree).item() for terms in (forward, backward))
    yield (
        f"Times {ahead:.3f} forward and {back:.3f} backward, as steps that were measured with the "
        "profile took against the sum of their operations."
    )


def _remarks(plan: Plan, forward: PhaseTerms, backward: PhaseTerms) -> Iterator[str]:
    hidden = format_seconds(forward.hidden_seconds + backward.hidden_seconds)
    transfers = forward.total_transfer_seconds + backward.total_transfer_seconds
    if transfers == 0:
        yield "There is nothing to hide: one rank sends nothing."
    elif is_one_chunk(plan):
        yield f"Nothing is hidden: all {format_seconds(transfers)} of transfers are waited for."
    else:
        yield f"{hidden} of {format_seconds(transfers)} of transfers are hidden."


def _strategies(subject: LayerSubject) -> Iterator[Section]:
    strategies = subject.strategies
    if not strategies:
        return
    missing = [name for name in STRATEGY_WORDS if name not in {row.strategy for row in strategies}]
    absent = f"{', '.join(missing)}: not measured, the profile lacks copies to the host and back."
    table = Table.of(
        "strategies",
        strategies,
        {
            "strategy": lambda row: Cell.words(row.strategy, mark="chosen" * row.is_chosen),
            "chunks": lambda row: _degree_cell(row.forward_degree, row.backward_degree),
            "peak": lambda row: Cell.size(row.peak_bytes),
            "formulas": lambda row: Cell.size(row.needed_bytes),
            "host": lambda row: Cell.size(row.host_bytes or None),
            "step": lambda row: Cell.seconds(row.step_seconds),
            "Eq. 10": _paper_cell,
            "how": lambda row: STRATEGY_WORDS[row.strategy],
        },
        prose=("how",),
        notes=(*((absent,) if missing else ()), _BYTES, _PAPER),
    )
    yield Section(name="memory", title="Ways to keep activations", tables=(table,))


def _paper_cell(row: StrategyTerms) -> Cell:
    """Return the step by the paper's rule, with a star for its choice."""
    cell = Cell.seconds(row.paper_seconds)
    return replace(cell, text=f"{cell.text} *") if row.is_paper_choice else cell


def _ranges(plan: Plan) -> Section:
    tokens = "tokens on every rank" if plan.kind == "tensor" else "tokens per rank"
    table = Table.of(
        "ranges",
        plan.pipeline.ranges,
        {
            tokens: lambda row: Cell(text=f"{row[0]:,}–{row[1]:,}", value=row[0]),
            "chunks": lambda row: _degree_cell(row[2], row[3]),
        },
        is_narrow=True,
    )
    return Section(name="ranges", title="Chunks for other numbers of tokens", tables=(table,))


def _degree_cell(forward: int, backward: int) -> Cell:
    """Return the number of chunks, or both numbers of an older plan whose phases differ."""
    if forward == backward:
        return Cell.count(forward)
    return Cell.words(format_degree(forward, backward))
