"""Parameters of a module that are still being gathered: whoever reads them waits.

The optimizer's step starts to gather the shards of ZeRO stage 1. A module's forward pass reads its
parameters from the module, and waits there for its own bucket, as late as can be; so does whatever
else reads the module, such as `parameters` or `state_dict`. A parameter that was taken out of its
module before the step is NaN until then: a wrong number that shows, and not a mixture of two steps.
"""

from collections.abc import ItemsView, Iterable, Sequence, ValuesView
from typing import Any

from torch import nn

from moetune.runtime.parallel.parameter_buffer import ParameterBuffer


class ArrivingParameters(dict[str, nn.Parameter | None]):
    """The parameters of a module, in place of its own dictionary.

    Args:
        buckets: that they are gathered in.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter | None], buckets: Sequence[ParameterBuffer]
    ) -> None:
        super().__init__(parameters)
        self._buckets = buckets

    def _wait(self) -> None:
        for bucket in self._buckets:
            bucket.wait()

    def __getitem__(self, name: str) -> nn.Parameter | None:
        """Return a parameter, once all have their values."""
        self._wait()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - as of dict
        """Return a parameter, once all have their values."""
        self._wait()
        return super().get(name, default)

    # The views that dict itself returns have no public type to name here.
    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        """Return names and parameters, once all have their values."""
        self._wait()
        return super().items()

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        """Return the parameters, once all have their values."""
        self._wait()
        return super().values()

    def __reduce__(self) -> tuple[type[dict[str, nn.Parameter | None]], tuple[object]]:
        """Copy and pickle as a plain dictionary."""
        return dict, ([*self.items()],)


def wait_where_used(parts: nn.Module, buckets: Iterable[ParameterBuffer]) -> None:
    """Let every read of a sharded parameter from its module wait for the parameter's values."""
    of_parameter = {
        id(one): bucket for bucket in buckets if bucket.is_sharded for one in bucket.parameters
    }
    for module in parts.modules():
        own: dict[str, nn.Parameter | None] = module._parameters  # noqa: SLF001 - where torch looks
        found = [of_parameter[id(one)] for one in own.values() if id(one) in of_parameter]
        if found:
            module._parameters = ArrivingParameters(own, [*dict.fromkeys(found)])  # noqa: SLF001
