"""Feed-forward parts of a decoder's block: dense FFNs, routed and shared experts, amounts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from moetune.domain.errors import InputError, check_positive
from moetune.domain.layer import Activation, LayerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """One number for each part of a block or a decoder, in a common unit.

    Args:
        attention: projections, softmax or state updates, and their norms and biases.
        dense: FFNs that every token passes.
        router: gates of the routed experts.
        routed: experts that a router chooses, and their latent projections.
        shared: experts that every token passes in addition to routed experts.
        norms: around the parts, and residual mixing.
        embedding: token embeddings, and projections of them.
        head: the projection onto the vocabulary.
    """

    attention: float = 0
    dense: float = 0
    router: float = 0
    routed: float = 0
    shared: float = 0
    norms: float = 0
    embedding: float = 0
    head: float = 0

    def __add__(self, addend: "Amounts") -> "Amounts":
        return Amounts(
            **{
                item.name: getattr(self, item.name) + getattr(addend, item.name)
                for item in fields(self)
            }
        )

    def times(self, factor: float) -> "Amounts":
        """Return every amount multiplied by the factor."""
        return Amounts(**{item.name: getattr(self, item.name) * factor for item in fields(self)})

    @property
    def total(self) -> float:
        """Sum of the parts."""
        amounts: list[float] = [getattr(self, item.name) for item in fields(self)]
        return sum(amounts)


RouterScore = Literal["softmax", "softmax_of_top_k", "sigmoid", "sqrtsoftplus", "sparsemixer"]
"""Weights by scores: softmax over all or over the chosen experts, or a function of each score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFfn:
    """Feed-forward network that every token passes; a gated network has three matrices.

    Args:
        function: activation as the configuration names it.
    """

    d_model: int
    d_hidden: int
    is_gated: bool = True
    function: str = "silu"
    biases: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "d_model", "d_hidden")

    @property
    def num_gemms(self) -> int:
        """Matrices, each a GEMM of the forward pass."""
        return 3 if self.is_gated else 2

    @property
    def macs(self) -> int:
        """MACs of one token."""
        return self.num_gemms * self.d_model * self.d_hidden

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.macs + self.biases

    @property
    def widths(self) -> Mapping[str, int]:
        """Elements of a token's hidden vectors."""
        return {"hidden": (self.num_gemms - 1) * self.d_hidden}

    @property
    def layer(self) -> LayerShape:
        """The network as the single expert of a layer."""
        activation: Activation = "swiglu" if self.is_gated else "gelu"
        return LayerShape(
            d_model=self.d_model, d_hidden=self.d_hidden, num_experts=1, activation=activation
        )

    def forward_macs(self, length: int) -> int:  # noqa: ARG002 - the same in any sequence
        """Return the MACs of one token; mixers have the same signature."""
        return self.macs


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Choice of experts for a token.

    Args:
        num_groups, top_groups: groups of experts, and the best groups that experts come from.
        has_bias: whether a bias of each expert balances the choice, as a buffer or a parameter.
        is_normalized: whether the chosen weights are divided by their sum.
    """

    score: RouterScore
    parameters: int
    num_groups: int = 1
    top_groups: int = 1
    has_bias: bool = False
    is_normalized: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """Experts of which a router chooses some for each token, and shared experts for all tokens.

    Args:
        latent: width of the tokens that experts receive, where a projection shrinks them before
            the dispatch and another widens them after the combine; None for `d_model`.
        num_zero_experts: experts that return their input and cost nothing.
        shared: the shared experts as one FFN; None if there are none.
        shared_gate: parameters of a gate on the shared experts' output.
        latent_biases: biases and norms of the projections to the latent width and back.
        record: number of the layer's routing record; None where layers have no record.

    Raises:
        InputError: a size below 1, more choices than experts, or groups that do not divide them.
    """

    d_model: int
    num_experts: int
    top_k: int
    d_hidden: int
    router: Router
    is_gated: bool = True
    function: str = "silu"
    biases: int = 0
    latent: int | None = None
    latent_biases: int = 0
    num_zero_experts: int = 0
    shared: DenseFfn | None = None
    shared_gate: int = 0
    record: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_positive(self, "d_model", "num_experts", "top_k", "d_hidden", "latent")
        num_choices = self.num_experts + self.num_zero_experts
        if self.top_k > num_choices:
            raise InputError(
                f"top_k ({self.top_k}) is larger than the number of experts ({num_choices})"
            )
        groups, top = self.router.num_groups, self.router.top_groups
        if groups < 1 or num_choices % groups or not 1 <= top <= groups:
            raise InputError(
                f"{num_choices} experts cannot be chosen from {top} of {groups} groups",
                "the groups must divide the experts, and the chosen groups be among them",
            )

    @property
    def d_expert(self) -> int:
        """Width of the tokens that are dispatched."""
        return self.latent or self.d_model

    @property
    def num_gemms(self) -> int:
        """Matrices of one expert."""
        return 3 if self.is_gated else 2

    @property
    def mean_top_k(self) -> float:
        """Experts that a token reaches with balanced routing; zero experts do not count."""
        return self.top_k * self.num_experts / (self.num_experts + self.num_zero_experts)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return self.num_gemms * self.d_expert * self.d_hidden + self.biases

    @property
    def layer(self) -> LayerShape:
        """The layer to plan for: the width is that of the dispatched tokens."""
        activation: Activation = "swiglu" if self.is_gated else _plain(self.function)
        return LayerShape(
            d_model=self.d_expert,
            d_hidden=self.d_hidden,
            num_experts=self.num_experts,
            top_k=min(self.top_k, self.num_experts),
            activation=activation,
        )

    @property
    def widths(self) -> Mapping[str, int]:
        """Elements of a token's dispatched copies, their hidden vectors, and the shared FFN's."""
        shared = {} if self.shared is None else {"shared": self.shared.widths["hidden"]}
        return {
            "dispatched": self.top_k * self.d_expert,
            "hidden": self.top_k * (self.num_gemms - 1) * self.d_hidden,
            **shared,
        }

    def parameters(self, *, active: bool = False) -> Amounts:
        """Return the parameters by part, either all or those that are active for a token."""
        count = self.mean_top_k if active else self.num_experts
        outside = 0 if self.latent is None else 2 * self.d_model * self.latent + self.latent_biases
        shared = 0 if self.shared is None else self.shared.parameters
        return Amounts(
            router=self.router.parameters,
            routed=round(count * self.expert_parameters) + outside,
            shared=shared + self.shared_gate,
        )

    def forward_macs(self) -> Amounts:
        """Return the MACs of one token by part; the router's GEMM is not counted."""
        routed = self.mean_top_k * self.num_gemms * self.d_expert * self.d_hidden
        outside = 0 if self.latent is None else 2 * self.d_model * self.latent
        shared = 0 if self.shared is None else self.shared.macs
        return Amounts(routed=routed + outside, shared=shared)


def _plain(function: str) -> Activation:
    """Return the runtime's activation for an ungated activation function."""
    by_name: Mapping[str, Activation] = {"relu": "relu", "relu2": "relu", "silu": "silu"}
    return by_name.get(function, "gelu")
