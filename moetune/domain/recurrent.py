"""Mixers whose cost does not grow with the sequence: linear attention, state spaces, convolutions.

Parts are as in `attention.py`. A few multiply-accumulates update each element of their states. They
are counted as Megatron-LM does where it knows the mixer, and otherwise as the recurrence is
written.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from moetune.domain.errors import check_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet:
    """Gated delta rule (Qwen3-Next): a state of key by value width in each value head.

    Args:
        gate_rank: 0 where each gate is a number a head (projected from `d_model`). Else the rank of
            the projections of channel-wise decay and output gate in Kimi Delta Attention.
        gate_width: width of an output gate of full rank; a `gate_rank` is then the decay's only.
        extra_parameters: decay rates, time-step biases and norms.
        conv_channels: channels of the short convolution, over `kernel` tokens.
    """

    d_model: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    gate_width: int
    num_head_gates: int
    gate_rank: int = 0
    extra_parameters: int

    def __post_init__(self) -> None:
        check_positive(
            self, "d_model", "num_key_heads", "num_value_heads", "key_dim", "value_dim", "kernel"
        )

    @property
    def name(self) -> str:
        """The mixer's name in tables."""
        return "gated delta net" if not self.gate_rank else "delta attention"

    @property
    def widths(self) -> Mapping[str, int]:
        """Elements of a token's queries, keys, values, gates and output."""
        values = self.num_value_heads * self.value_dim
        keys = self.num_key_heads * self.key_dim
        low_rank = self._low_rank_outputs if self.gate_rank else 0
        return {"q": keys, "k": keys, "v": values, "gate": self.gate_width + low_rank,
                "output": values}  # fmt: skip

    @property
    def state(self) -> int:
        """Elements of a sequence's state."""
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def _projections(self) -> int:
        keys = self.num_key_heads * self.key_dim
        values = self.num_value_heads * self.value_dim
        direct = 2 * keys + 2 * values + self.gate_width + self.num_head_gates
        inputs = self.d_model * (1 if self.gate_width else 2)
        low_rank = self.gate_rank * (inputs + self._low_rank_outputs)
        return self.d_model * direct + low_rank + self.kernel * (2 * keys + values)

    @property
    def _low_rank_outputs(self) -> int:
        """Outputs of the decay's projection, and of the gate's where it is of low rank."""
        gate = 0 if self.gate_width else self.num_value_heads * self.value_dim
        return self.num_key_heads * self.key_dim + gate

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self._projections + self.extra_parameters

    def forward_macs(self, length: int) -> float:
        """Return the MACs of one token: KKᵀ, VKᵀ, the state's update and SQ."""
        del length
        return self._projections + 4 * self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """Mamba-2 mixer, or Mamba-1 where `rank` is given.

    Args:
        d_state: elements of a channel's state.
        num_groups: groups that share B and C.
        num_heads: heads with a time step; 0 for Mamba-1.
        rank: rank of Mamba-1's time steps; 0 for Mamba-2.
        extra_parameters: biases, decay rates, skips and norms.
    """

    d_model: int
    d_inner: int
    d_state: int
    kernel: int
    num_groups: int = 1
    num_heads: int = 0
    rank: int = 0
    extra_parameters: int

    def __post_init__(self) -> None:
        check_positive(self, "d_model", "d_inner", "d_state", "kernel", "num_groups")

    @property
    def name(self) -> str:
        """The mixer's name in tables."""
        return "mamba" if self.rank else "mamba 2"

    @property
    def widths(self) -> Mapping[str, int]:
        """Elements of a token's inner vectors, B and C, time steps and output."""
        states = 2 * self.num_groups * self.d_state
        steps = self.num_heads or self.d_inner
        return {"x": self.d_inner, "gate": self.d_inner, "states": states, "steps": steps,
                "output": self.d_inner}  # fmt: skip

    @property
    def state(self) -> int:
        """Elements of a sequence's state."""
        return self.d_inner * self.d_state

    @property
    def _projections(self) -> int:
        states = 2 * self.num_groups * self.d_state
        outer = 3 * self.d_model * self.d_inner
        if self.rank:
            steps = self.d_inner * (self.rank + states) + self.rank * self.d_inner
            return outer + steps + self.kernel * self.d_inner
        inside = self.d_model * (states + self.num_heads)
        return outer + inside + self.kernel * (self.d_inner + states)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self._projections + self.extra_parameters

    def forward_macs(self, length: int) -> float:
        """Return the MACs of one token: Megatron-LM counts 7 operations a state's element."""
        del length
        return self._projections + 3.5 * self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Linear attention with a decay a head (lightning attention): states of key by value width."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gate_width: int
    extra_parameters: int

    def __post_init__(self) -> None:
        check_positive(self, "d_model", "num_heads", "num_kv_heads", "head_dim")

    @property
    def name(self) -> str:
        """The mixer's name in tables."""
        return "linear attention"

    @property
    def widths(self) -> Mapping[str, int]:
        """Elements of a token's queries, keys, values, gate and output."""
        keys = self.num_kv_heads * self.head_dim
        queries = self.num_heads * self.head_dim
        return {"q": queries, "k": keys, "v": keys, "gate": self.gate_width, "output": queries}

    @property
    def state(self) -> int:
        """Elements of a sequence's state."""
        return self.num_heads * self.head_dim**2

    @property
    def _projections(self) -> int:
        return self.d_model * sum(self.widths.values())

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self._projections + self.extra_parameters

    def forward_macs(self, length: int) -> float:
        """Return the MACs of one token: the state's update and its product with the query."""
        del length
        return self._projections + 2 * self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution:
    """Gated short convolution over a few tokens (LFM2)."""

    d_model: int
    kernel: int
    biases: int

    def __post_init__(self) -> None:
        check_positive(self, "d_model", "kernel")

    @property
    def name(self) -> str:
        """The mixer's name in tables."""
        return "convolution"

    @property
    def widths(self) -> Mapping[str, int]:
        """Elements of a token's two gates, its value and the output."""
        return {"gates": 2 * self.d_model, "x": self.d_model, "output": self.d_model}

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return 4 * self.d_model**2 + self.kernel * self.d_model + self.biases

    def forward_macs(self, length: int) -> float:
        """Return the MACs of one token."""
        del length
        return 4 * self.d_model**2 + self.kernel * self.d_model
