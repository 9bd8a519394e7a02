"""Optimizers of Trainer's arguments, of DeepSpeed's and of torchtitan's keys, by their bytes.

Bytes of the moments were counted on the libraries' own states after a step on a matrix of 4 million
parameters: bitsandbytes 0.50 (blocks of 256, `optim/optimizer.py`), torchao 0.18 (`torchao/optim`),
torch 2.13. Names are those of transformers (`OptimizerNames` of `training_args.py`), of axolotl,
which adds "ao_", and of the classes. Trainer keeps the states of embeddings in float32 with 8-bit
optimizers of bitsandbytes (`trainer.py`, `register_module_override`), as a step of it with
transformers 5.24 has shown.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from moetune.domain.architecture import Decoder
from moetune.domain.optimizers import Optimizer, optimizer_of
from moetune.domain.targets import Target
from moetune.domain.tuning import Tuning
from moetune.launches.reading import Given, Problem, Row

_EIGHT_BITS, _FULL = 2 * (1 + 4 / 256), 8.0
_MOMENTS: Mapping[float, str] = MappingProxyType({
    _FULL: "adam adamw fusedadam adamwtorch adamwtorchfused adamwapexfused adamwhf pagedadamw "
           "pagedadamw32bit lamb",
    _EIGHT_BITS: "adam8bit adamw8bit adamwbnb8bit pagedadamw8bit adamwtorch8bit aoadamw8bit "
                 "adamwfp8 aoadamwfp8",
    2 * (1 / 2 + 4 / 128): "adamw4bit aoadamw4bit",
    2 * (1 / 2 + 4 / 256): "adamwtorch4bit",  # Trainer's blocks are of 256 in 4 bits, too
    4.0: "lion lion32bit pagedlion32bit fusedlion rmsprop rmspropbnb rmspropbnb32bit adagrad",
    1 + 4 / 256: "lion8bit pagedlion8bit rmspropbnb8bit",
    12.0: "ademamix pagedademamix32bit", 3 * (1 + 4 / 256): "ademamix8bit pagedademamix8bit",
    0.0: "sgd",
})  # fmt: skip
_BYTES = MappingProxyType(
    {name: size for size, names in _MOMENTS.items() for name in names.split()}
)
_KEYS = ("optimizer.type", "optimizer.name", "optim", "optimizer")
_BF16 = ("pure_bf16", "training.dtype")
"""Keys of LLaMA-Factory and torchtitan for weights, gradients and states in bfloat16."""
_LOADED = ("dtype", "torch_dtype")
"""Keys of the weights' format on loading, which FSDP with mixed precision widens to float32."""
_BF16_STATES = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")
_VERSION = ("fsdp_version", "fsdp_config.version", "fsdp_config.fsdp_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedOptimizer:
    """The optimizer that keys give.

    Args:
        zero: ZeRO stage of the layout.
        ranks: replicas.
    """

    given: Mapping[str, Given]
    target: Target
    decoder: Decoder
    tuning: Tuning
    zero: int
    ranks: int

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, with the name of a planned optimizer of the runtime or "adam"."""
        base = self._base
        moments = _BYTES.get(self._name, _FULL)
        if moments != _FULL:
            base = replace(base, moment_bytes=moments)
        if moments == _EIGHT_BITS and "adam-8bit" in self.target.optimizers:
            base = replace(base, name="adam-8bit", moment_bytes=moments + self._of_embedding)
        for name in self.target.optimizers:
            if replace(optimizer_of(name, self.target.adam), name=base.name) == base:
                return replace(base, name=name)
        return base

    @property
    def problems(self) -> Iterator[Problem]:
        """Notes on what is priced as another optimizer, and what stops the launch."""
        place, name = self._place, self._name
        if place is None or self._is_container:
            return
        line, words = place.shown, f"{place.written} {place.value}"
        is_made = self.target.name == "torchtitan" and not place.written.endswith("name")
        if name not in _BYTES and not is_made:
            what = f"{words}: its states are priced as those of AdamW in float32"
            yield Problem(severity="note", line=line, what=what)
        if name.startswith("paged"):
            what = f"{words}: states are priced on the GPU, which may page them to its host"
            yield Problem(severity="note", line=line, what=what)
        is_sharded = self.zero and self.ranks > 1 and self.target.name == "transformers"
        if is_sharded and self._is_of_bitsandbytes:
            versions = {str(self.given[key].value) for key in _VERSION if key in self.given}
            is_second = "2" in versions or "fsdp_size" in self.given
            yield Problem(
                severity="stops" if is_second else "note", line=line,
                what=f"{words}: optimizers of bitsandbytes do not update shards of FSDP2",
                why="bitsandbytes 0.50, whose operators refuse DTensor", fix="adamw_torch_8bit",
            )  # fmt: skip

    @property
    def rows(self) -> Iterator[Row]:
        """The row of the optimizer, if the launch gives it."""
        if (place := self._place) is not None and not self._is_container:
            name = self.optimizer.name
            is_named = name != "adam" or _BYTES.get(self._name) == _FULL
            yield Row(
                name="optimizer", value=name if is_named else str(place.value),
                key=place.written.lstrip("."), line=place.shown, file=place.file,
            )  # fmt: skip

    @property
    def _is_whole(self) -> bool:
        """Whether a rank has all parameters and states."""
        return self.zero == 0 or self.ranks == 1

    @property
    def _is_container(self) -> bool:
        """Whether the value is torchtitan's configuration of optimizers, whose fields say more."""
        return "OptimizersContainer" in str(self._place.value if self._place else "")

    @property
    def _place(self) -> Given | None:
        places = (self.given[key] for key in _KEYS if key in self.given)
        return next((place for place in places if place.value is not None), None)

    @property
    def _name(self) -> str:
        """The optimizer's name without case and underscores; "adamw" by default."""
        if self._place is None:
            return "adamw"
        return str(self._place.value).rpartition(".")[2].lower().replace("_", "")

    @property
    def _is_of_bitsandbytes(self) -> bool:
        word = str(self._place.value) if self._place else ""
        is_of_torch = "torch" in word or word.startswith("ao_")
        return not is_of_torch and ("8bit" in self._name or "bnb" in word or "paged" in word)

    @property
    def _base(self) -> Optimizer:
        """The runtime's Adam with weights, gradients and states in the formats that keys give."""
        adam = self.target.adam
        keys = [key for key in self.given if key.endswith(_BF16)]
        if self.target.name == "transformers" and self._is_whole and self.tuning.trains_all:
            keys += [key for key in _LOADED if key in self.given]
        said = {str(self.given[key].value).removeprefix("torch.") for key in keys}
        if adam.updates_parameters and said & {"True", "bfloat16"}:
            return replace(adam, parameter_bytes=2, gradient_bytes=2, moment_bytes=4)
        if all(key in self.given and self.given[key].value is True for key in _BF16_STATES):
            return replace(adam, master_bytes=2, moment_bytes=4, step_bytes=2)
        states = self.given.get("implementation")
        if states is not None and states.value == "fused_opt_states_bf16":
            return replace(adam, moment_bytes=4)
        return adam

    @property
    def _of_embedding(self) -> float:
        """Bytes a parameter by which states of embeddings in float32 exceed 8 bits."""
        is_of_trainer = self._place is not None and self._place.written.endswith("optim")
        is_apart = self._is_of_bitsandbytes and is_of_trainer and self._is_whole
        if not is_apart or not self.tuning.trains_all or self.target.name != "transformers":
            return 0.0
        amounts = self.decoder.parameters
        return (_FULL - _EIGHT_BITS) * amounts.embedding / amounts.total
