"""Which parameters a model had when it was sharded: later ones would have no chunk."""

from torch import nn

from moetune.domain.errors import InputError
from moetune.runtime.chunked.guard import ChunkedParameter


class Structure:
    """Notices parameters that were added, replaced or removed since it was made."""

    def __init__(self, model: nn.Module) -> None:
        self._owners = [
            (module, tuple(module._parameters.items()), len(module._modules))  # noqa: SLF001
            for module in model.modules()
        ]
        self._names = {id(module): name for name, module in model.named_modules()}

    def check(self) -> None:
        """Compare the model's parameters with those that it had.

        Raises:
            InputError: there are others; it names the first.
        """
        for module, known, num_children in self._owners:
            now = module._parameters  # noqa: SLF001
            if len(now) != len(known) or any(now.get(name) is not old for name, old in known):
                self._complain(module, dict(known))
            if len(module._modules) != num_children:  # noqa: SLF001
                self._complain_of_children(module)

    def _complain(self, module: nn.Module, known: dict[str, nn.Parameter | None]) -> None:
        now = module._parameters  # noqa: SLF001
        for name, parameter in now.items():
            if parameter is not known.get(name):
                where = f"{self._names[id(module)]}.{name}".strip(".")
                raise _added(where, 0 if parameter is None else parameter.numel())
        gone = next(name for name in known if name not in now)
        raise InputError(
            f"{gone} of {self._names[id(module)] or 'the model'} was removed after the model "
            "was sharded"
        )

    def _complain_of_children(self, module: nn.Module) -> None:
        for path, child in module.named_modules(prefix=self._names[id(module)]):
            for name, parameter in child.named_parameters(recurse=False):
                if not isinstance(parameter, ChunkedParameter):
                    raise _added(f"{path}.{name}", parameter.numel())


def _added(name: str, num_elements: int) -> InputError:
    return InputError(
        f"{name} ({num_elements} elements) was added after the model was sharded",
        "add it before moetune.shard",
    )
